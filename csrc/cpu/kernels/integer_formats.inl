// Weights of packed blocks as integers: integers/*.inl. A block has rows of 64 bytes, of which byte 4 * o + b is input b of a
// word of output o; so a vector holds one word, which is four inputs, for each of its outputs.

constexpr int64_t kAhead = 8192;  // bytes that are asked for ahead of their use

CPU_INLINE void ask_for(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

constexpr int kSigned = -1;
constexpr int kWordsOfBlock = kDepth / 4;

struct Integers {
  static constexpr int kLargest = 15;      // of the bytes of words; kSigned: these have a sign
  static constexpr int kOffset = 0;        // what is subtracted from each byte, a power of two
  static constexpr int kGroups = 1;        // of a block's inputs, with a scale each
  static constexpr bool kScaled = true;    // scale(block, group, o): of outputs [o, o + W)
  static constexpr bool kLow = false;      // low(block, group, o): their minima, which are added to each weight
  static constexpr int64_t kMostInputs = INT64_MAX;
  static constexpr Quantize* quantize = nullptr;
};

// Word i of outputs [o, o + W), of which each input has so many bits.
template <int Bits>
CPU_INLINE vu bits_of(const uint8_t* rows, int i, int o) {
  constexpr int kPer = 8 / Bits;  // words that share a row
  vu words;
  __builtin_memcpy(&words, rows + i / kPer * 64 + 4 * o, sizeof words);
  return Bits == 8 ? words : words >> Bits * (i % kPer) & ((1u << Bits) - 1) * 0x01010101u;
}

namespace integers {
#include "cpu/integers.inl"
}  // namespace integers

// Calls body(format) for that of a matrix of integers.
template <typename Body>
CPU_INLINE void by_integers(Kind kind, const Body& body) {
  switch (kind) {
#define CPU_CASE(name) \
  case Kind::int_##name: return body(integers::name{});
    CPU_INTEGERS(CPU_CASE)
#undef CPU_CASE
    default: return;
  }
}

typedef int16_t vs __attribute__((vector_size(4 * W)));

// One output's weights of a block, as the model has them: rounded once.
template <typename F>
CPU_INLINE void expand(const Block& block, int output, float* out) {
  const int o = output / W * W, lane = output % W;
  for (int i = 0; i < kWordsOfBlock; ++i) {
    const int group = i * F::kGroups / kWordsOfBlock;
    const vu word = F::word(block, i, o);
    for (int b = 0; b < 4; ++b) {
      const vi value = F::kLargest == kSigned ? (vi)(word << (24 - 8 * b)) >> 24 : (vi)(word >> 8 * b & 255u) - F::kOffset;
      vf weight = __builtin_convertvector(value, vf);
      if constexpr (F::kLow)
        weight = fused(weight, F::scale(block, group, o), F::low(block, group, o));
      else if constexpr (F::kScaled)
        weight = weight * F::scale(block, group, o);
      out[4 * i + b] = weight[lane];
    }
  }
}

static void expand_output(const Matrix& m, int64_t output, float* out) {
  if (!has_integers(m.kind)) return weights(m, output, out);
  by_integers(m.kind, [&](auto format) {
    using F = decltype(format);
    const uint8_t* panel = panel_of(m, output / kOutputs);
    for (int64_t b = 0; b < m.blocks; ++b)
      expand<F>(block_of<F>(panel, b), static_cast<int>(output % kOutputs), out + b * kDepth);
  });
  if (m.scales)
    for (int64_t k = 0; k < m.inputs; ++k) out[k] *= m.scales[output];
}

// A row of 32 inputs as integers, of one line of a cache: [tile][block][rows of the tile], 16 rows to a whole tile. All products
// of integers read the same.
struct Record {
  int32_t words[kWordsOfBlock];  // four int8 each
  float scale;                   // the step; NaN where an input is not finite, zero where all are below 2^-100
  float sums[3];                 // scale * sum of the inputs' steps: all, and those of either half
  int32_t negated[3];            // -(sum of the inputs' steps)
  int32_t unused;
};
constexpr int kRecordWords = sizeof(Record) / 4;
static_assert(kRecordWords == kRows, "records are transposed as tiles are");

