// Weights of the formats as floats: formats/*.inl, each of which says there what every set needs of it.

CPU_INLINE float half_precision(const uint8_t* at, int index) {
  uint16_t half;
  __builtin_memcpy(&half, at + 2 * index, 2);
  return float_of_half_precision(half);
}

// Where a block of 16 outputs by 32 inputs begins, and what it shares with kSuper - 1 others.
struct Block {
  const uint8_t *at, *head;
};

// Forms in which products may unpack several outputs' weights at once; see halves.inl.
struct Singly {};   // as floats, an output at a time
struct Nibbles {};  // of four bits each, factor * q + term: lines(block, factors, terms) of 16 outputs
struct Bytes {};    // of eight bits each, kStride apart: factors(block, factors) of 16 outputs where kScaled

struct Format {
  using Form = Singly;
  static constexpr bool kScaled = false;
  static constexpr int64_t kMostInputs = INT64_MAX;
  static constexpr Quantize* quantize = nullptr;
};

// factor * q + term of one output's 32 weights in nibbles, rounded to bfloat16
CPU_INLINE void nibbles(const uint8_t* block, int output, float factor, float term, float* out) {
  const uint8_t* words = block + output / 4 * 64;
  const int shift = output % 4 * 4;
  for (int k = 0; k < kDepth; k += W) {
    const vu q = widened(reinterpret_cast<const uint16_t*>(words) + k) >> shift & 15u;
    store(out + k, as_half(mac(__builtin_convertvector((vi)q, vf), factor, term)));
  }
}

CPU_INLINE vf bytes(const uint8_t* from) { return __builtin_convertvector(widened(from), vf); }

namespace formats {
#include "cpu/formats.inl"
}  // namespace formats

// Calls body(format) for that of a matrix.
template <typename Body>
CPU_INLINE void by_format(Kind kind, const Body& body) {
  switch (kind) {
#define CPU_CASE(name) \
  case Kind::name: return body(formats::name{});
    CPU_FORMATS(CPU_CASE)
#undef CPU_CASE
    default: return;  // integers
  }
}

CPU_INLINE const uint8_t* panel_of(const Matrix& m, int64_t panel) { return m.data + panel * m.step; }
template <typename F>
CPU_INLINE Block block_of(const uint8_t* panel, int64_t block) {
  return {panel + F::kLayout.at(block), panel + F::kLayout.head_at(block)};
}

// One output's weights, [blocks * 32].
static void weights(const Matrix& m, int64_t output, float* out) {
  by_format(m.kind, [&](auto format) {
    using F = decltype(format);
    const uint8_t* panel = panel_of(m, output / kOutputs);
    for (int64_t b = 0; b < m.blocks; ++b)
      F::weights(block_of<F>(panel, b), static_cast<int>(output % kOutputs), out + b * kDepth);
  });
  if (m.scales)
    for (int64_t k = 0; k < m.inputs; ++k) out[k] *= m.scales[output];
}
