// The kernels of one instruction set, in the vectors of the compiler. Included by isa_*.cpp inside a namespace of its own,
// behind a target pragma, with
//   CPU_LANES   floats of a native vector: 16, 8 or 4
//   CPU_PAIRS   1: products read pairs of bfloat16 (AVX512-BF16, AMX), 0: floats
//   CPU_AMX     1: products by tiles
// Everything here has internal linkage and calls nothing of the standard library that could be shared with other files,
// so no instruction of this set leaks into code that runs elsewhere.

constexpr int W = CPU_LANES;
constexpr int V = kRows / W;  // vectors of a tile's row of 16

typedef float vf __attribute__((vector_size(4 * CPU_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * CPU_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * CPU_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * CPU_LANES)));
typedef int8_t vb __attribute__((vector_size(CPU_LANES)));

#define CPU_INLINE static inline __attribute__((always_inline))
#define CPU_MEMBER inline __attribute__((always_inline))

CPU_INLINE vf load(const float* from) {
  vf value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
CPU_INLINE void store(float* to, vf value) { __builtin_memcpy(to, &value, sizeof value); }
CPU_INLINE vf set(float value) { return vf{} + value; }
CPU_INLINE vf as_floats(vu bits) { return (vf)bits; }
CPU_INLINE vu as_bits(vf value) { return (vu)value; }
CPU_INLINE vf greater(vf a, vf b) { return a > b ? a : b; }

CPU_INLINE vf load_half(const uint16_t* from) {
  vh half;
  __builtin_memcpy(&half, from, sizeof half);
  return as_floats(__builtin_convertvector(half, vu) << 16);
}

// Rounded to bfloat16, to nearest even, in the upper half of each word; finite values only.
CPU_INLINE vu rounded(vf value) {
  const vu bits = as_bits(value);
  return bits + 0x7FFFu + (bits >> 16 & 1);
}
CPU_INLINE vf as_half(vf value) { return as_floats(rounded(value) & 0xFFFF0000u); }
CPU_INLINE uint16_t half_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 64);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

// exp of what is at most 88, a unit in the last place or two off; NaN stays NaN.
CPU_INLINE vf exponential(vf given) {
  vf x = greater(given, set(-87.3f));
  x = x > set(88.0f) ? set(88.0f) : x;
  const vf magic = set(12582912.0f);
  const vf n = x * 1.44269504f + magic - magic;
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = set(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  return given == given ? p * (vf)power : given;
}

CPU_INLINE float float_of_half_precision(uint16_t half) {  // IEEE binary16
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
  uint32_t bits = (magnitude << 13) + 0x38000000u;
  float value;
  if (magnitude < 0x0400u) {
    value = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    __builtin_memcpy(&bits, &value, 4);
  } else if (magnitude >= 0x7C00u) {
    bits = 0x7F800000u | (magnitude & 0x3FFu) << 13;
  }
  bits |= sign;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

CPU_INLINE float half_precision(const uint8_t* at, int index) {
  uint16_t half;
  __builtin_memcpy(&half, at + 2 * index, 2);
  return float_of_half_precision(half);
}

// ---- one output's 32 weights of a block, as float

CPU_INLINE void nibbles(const uint8_t* block, int output, float factor, float term, float* out) {
  const uint8_t* words = block + output / 4 * 64;
  const int shift = output % 4 * 4;
  for (int k = 0; k < kDepth; k += W) {
    vh word;
    __builtin_memcpy(&word, words + 2 * k, sizeof word);
    const vu q = __builtin_convertvector(word, vu) >> shift & 15u;
    store(out + k, as_half(__builtin_convertvector((vi)q, vf) * factor + term));
  }
}

CPU_INLINE vf bytes(const uint8_t* from) {
  vb value;
  __builtin_memcpy(&value, from, sizeof value);
  return __builtin_convertvector(__builtin_convertvector(value, vi), vf);
}

static void block_weights(const Matrix& m, int64_t panel, int64_t block, int output, float* out) {
  const uint8_t* at = block_at(m, panel, block);
  switch (m.kind) {
    case Kind::f32: __builtin_memcpy(out, at + output * 128, 128); return;
    case Kind::bf16:
      for (int k = 0; k < kDepth; k += W)
        store(out + k, load_half(reinterpret_cast<const uint16_t*>(at + output * 64) + k));
      return;
    case Kind::i8:
      for (int k = 0; k < kDepth; k += W) store(out + k, bytes(at + output * 32 + k));
      return;
    case Kind::q4_0: {
      const float d = half_precision(at + 256, output);
      return nibbles(at, output, d, -8.0f * d, out);
    }
    case Kind::q4_1:
      return nibbles(at, output, half_precision(at + 256, output), half_precision(at + 288, output), out);
    case Kind::q8_0: {
      const float d = half_precision(at + 512, output);
      for (int k = 0; k < kDepth; k += W) store(out + k, as_half(bytes(at + output * 32 + k) * d));
      return;
    }
    case Kind::q4_k: {
      const uint8_t* head = super_head(m, panel, block);
      const float scale = half_precision(head, output) * static_cast<float>(at[256 + output]);
      const float low = half_precision(head + 32, output) * static_cast<float>(at[272 + output]);
      return nibbles(at, output, scale, -low, out);
    }
    case Kind::q6_k: {
      const float d = half_precision(super_head(m, panel, block), output);
      const uint8_t* high = at + 256 + output * 8;
      for (int k = 0; k < kDepth; ++k) {
        const float scale = d * static_cast<float>(static_cast<int8_t>(at[384 + output * 2 + k / 16]));
        uint16_t word;
        __builtin_memcpy(&word, at + (output / 4 * kDepth + k) * 2, 2);
        const int q = (word >> output % 4 * 4 & 15) | (high[k / 4] >> 2 * (k % 4) & 3) << 4;
        const uint32_t bits = static_cast<uint32_t>(half_of(scale * static_cast<float>(q - 32))) << 16;
        __builtin_memcpy(out + k, &bits, 4);
      }
      return;
    }
  }
}

static void weights(const Matrix& m, int64_t output, float* out) {
  const int64_t panel = output / kOutputs;
  for (int64_t b = 0; b < m.blocks; ++b) block_weights(m, panel, b, static_cast<int>(output % kOutputs), out + b * kDepth);
  if (m.scales)
    for (int64_t k = 0; k < m.inputs; ++k) out[k] *= m.scales[output];
}

// ---- products

// Scales and bias; sums: [16 outputs][16 rows].
CPU_INLINE void finish(const Matrix& m, int64_t panel, float* sums) {
  if (!m.scales && !m.bias) return;
  for (int o = 0; o < kOutputs; ++o) {
    const vf scale = set(m.scales ? m.scales[panel * kOutputs + o] : 1.0f);
    const vf bias = set(m.bias ? m.bias[panel * kOutputs + o] : 0.0f);
    for (int v = 0; v < V; ++v) {
      float* at = sums + o * kRows + v * W;
      store(at, m.scales ? load(at) * scale + bias : load(at) + bias);
    }
  }
}

CPU_INLINE int vectors_of(int64_t rows) { return rows >= kRows ? V : static_cast<int>((rows + W - 1) / W); }

#if !CPU_PAIRS
// sums of `Outputs` outputs by `Vectors` vectors of rows, gone on with for one block of inputs.
template <int Outputs, int Vectors>
CPU_INLINE void add_block(const float* weights, const float* inputs, float* sums) {
  vf lanes[Outputs][Vectors];
  for (int o = 0; o < Outputs; ++o)
    for (int v = 0; v < Vectors; ++v) lanes[o][v] = load(sums + o * kRows + v * W);
  for (int k = 0; k < kDepth; ++k) {
    vf x[Vectors];
    for (int v = 0; v < Vectors; ++v) x[v] = load(inputs + k * kRows + v * W);
    for (int o = 0; o < Outputs; ++o)
      for (int v = 0; v < Vectors; ++v) lanes[o][v] = x[v] * weights[o * kDepth + k] + lanes[o][v];
  }
  for (int o = 0; o < Outputs; ++o)
    for (int v = 0; v < Vectors; ++v) store(sums + o * kRows + v * W, lanes[o][v]);
}

static void panel_products(const Matrix& m, int64_t panel, const Input& in, int64_t tiles, int64_t rows, float* sums,
                           uint8_t*) {
  __builtin_memset(sums, 0, static_cast<size_t>(tiles * kOutputs * kRows) * sizeof(float));
  alignas(64) float expanded[kOutputs * kDepth];
  for (int64_t b = 0; b < m.blocks; ++b) {
    const float* weights = expanded;
    if (m.kind == Kind::f32)
      weights = reinterpret_cast<const float*>(block_at(m, panel, b));
    else
      for (int o = 0; o < kOutputs; ++o) block_weights(m, panel, b, o, expanded + o * kDepth);
    for (int64_t t = 0; t < tiles; ++t) {
      const float* x = in.floats(t) + b * kDepth * kRows;
      float* to = sums + t * kOutputs * kRows;
      const int live = vectors_of(rows - t * kRows);
      int v = 0;
      for (; v + 2 <= live; v += 2)
        for (int o = 0; o < kOutputs; o += 4) add_block<4, 2>(weights + o * kDepth, x + v * W, to + o * kRows + v * W);
      for (; v < live; ++v)
        for (int o = 0; o < kOutputs; o += 8) add_block<8, 1>(weights + o * kDepth, x + v * W, to + o * kRows + v * W);
    }
  }
}
#else
// Single floats of the array are then broadcast by loads; compilers that know the vector it came from would rather
// permute that, on the one port that is busy anyway.
#define CPU_IN_MEMORY(array) __asm__("" : "+m"(array))

// One block's weights as bfloat16, [16][32], at `at`; where they stand for bfloat16 itself.
template <Kind kind>
CPU_INLINE const uint8_t* half_block(const Matrix& m, int64_t panel, int64_t block, const uint8_t* from, uint8_t* at) {
  const __m512 counts = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  switch (kind) {
    case Kind::bf16: return from;
    case Kind::q4_0:
    case Kind::q4_1:
    case Kind::q4_k: {
      // 16 values per output and block are a table; a register holds those of two outputs, the second behind the first
      alignas(64) float factors[kOutputs], terms[kOutputs];
      if (kind == Kind::q4_1) {
        _mm512_store_ps(factors, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + 256))));
        _mm512_store_ps(terms, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + 288))));
      } else if (kind == Kind::q4_0) {
        const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + 256)));
        _mm512_store_ps(factors, d);
        _mm512_store_ps(terms, _mm512_mul_ps(d, _mm512_set1_ps(-8.0f)));
      } else {
        const uint8_t* head = super_head(m, panel, block);
        const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)head));
        const __m512 low = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(head + 32)));
        const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from + 256)));
        const __m512i t = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from + 272)));
        _mm512_store_ps(factors, _mm512_mul_ps(d, _mm512_cvtepi32_ps(s)));
        _mm512_store_ps(terms, _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(low, _mm512_cvtepi32_ps(t))));
      }
      CPU_IN_MEMORY(factors);
      CPU_IN_MEMORY(terms);
      const __m512i nibble = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; o += 2) {
        const __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(from + o / 4 * 64), o % 4 * 4);
        const __m512 a = _mm512_fmadd_ps(counts, _mm512_set1_ps(factors[o]), _mm512_set1_ps(terms[o]));
        const __m512 b = _mm512_fmadd_ps(counts, _mm512_set1_ps(factors[o + 1]), _mm512_set1_ps(terms[o + 1]));
        const __m512i tables = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        const __m512i of_a = _mm512_and_si512(words, nibble);
        const __m512i of_b = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 4), nibble, second, 0xEA);  // (x & y) | z
        _mm512_store_si512(at + o * 64, _mm512_permutexvar_epi16(of_a, tables));
        _mm512_store_si512(at + o * 64 + 64, _mm512_permutexvar_epi16(of_b, tables));
      }
      return at;
    }
    case Kind::i8:
    case Kind::q8_0: {
      alignas(64) float factors[kOutputs];
      if (kind == Kind::q8_0)
        _mm512_store_ps(factors, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + 512))));
      CPU_IN_MEMORY(factors);
      for (int o = 0; o < kOutputs; ++o) {
        __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + o * 32))));
        __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + o * 32 + 16))));
        if (kind == Kind::q8_0) {
          const __m512 d = _mm512_set1_ps(factors[o]);
          first = _mm512_mul_ps(first, d), second = _mm512_mul_ps(second, d);
        }
        _mm512_store_si512(at + o * 64, (__m512i)_mm512_cvtne2ps_pbh(second, first));
      }
      return at;
    }
    default: {
      alignas(64) float row[kDepth];
      for (int o = 0; o < kOutputs; ++o) {
        block_weights(m, panel, block, o, row);
        const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(row + 16), _mm512_load_ps(row));
        _mm512_store_si512(at + o * 64, halves);
      }
      return at;
    }
  }
}

// Calls body(constant kind) for the kind of a matrix.
template <typename Body>
CPU_INLINE void by_kind(Kind kind, const Body& body) {
  switch (kind) {
    case Kind::bf16: return body(std::integral_constant<Kind, Kind::bf16>{});
    case Kind::i8: return body(std::integral_constant<Kind, Kind::i8>{});
    case Kind::q4_0: return body(std::integral_constant<Kind, Kind::q4_0>{});
    case Kind::q4_1: return body(std::integral_constant<Kind, Kind::q4_1>{});
    case Kind::q8_0: return body(std::integral_constant<Kind, Kind::q8_0>{});
    case Kind::q4_k: return body(std::integral_constant<Kind, Kind::q4_k>{});
    case Kind::q6_k: return body(std::integral_constant<Kind, Kind::q6_k>{});
    case Kind::f32: return;  // not by these kernels
  }
}
#endif

#if CPU_PAIRS && !CPU_AMX
template <int Outputs, int Tiles>
CPU_INLINE void add_block(const uint8_t* weights, const uint32_t* const* inputs, float* sums) {
  __m512 lanes[Outputs][Tiles];
  for (int o = 0; o < Outputs; ++o)
    for (int t = 0; t < Tiles; ++t) lanes[o][t] = _mm512_loadu_ps(sums + (t * kOutputs + o) * kRows);
  for (int k = 0; k < kDepth / 2; ++k) {
    __m512bh x[Tiles];
    for (int t = 0; t < Tiles; ++t) x[t] = (__m512bh)_mm512_loadu_si512(inputs[t] + k * kRows);
    for (int o = 0; o < Outputs; ++o) {
      int pair;
      __builtin_memcpy(&pair, weights + o * 64 + k * 4, 4);
      const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
      for (int t = 0; t < Tiles; ++t) lanes[o][t] = _mm512_dpbf16_ps(lanes[o][t], x[t], w);
    }
  }
  for (int o = 0; o < Outputs; ++o)
    for (int t = 0; t < Tiles; ++t) _mm512_storeu_ps(sums + (t * kOutputs + o) * kRows, lanes[o][t]);
}

template <Kind kind>
CPU_INLINE void products_of_kind(const Matrix& m, int64_t panel, const Input& in, int64_t tiles, float* sums,
                                 uint8_t* scratch) {
  __builtin_memset(sums, 0, static_cast<size_t>(tiles * kOutputs * kRows) * sizeof(float));
  for (int64_t b = 0; b < m.blocks; ++b) {
    const uint8_t* w = half_block<kind>(m, panel, b, block_at(m, panel, b), scratch);
    for (int64_t t = 0; t < tiles; t += 2) {
      const uint32_t* x[2] = {in.pairs(t) + b * 256, t + 1 < tiles ? in.pairs(t + 1) + b * 256 : nullptr};
      float* to = sums + t * kOutputs * kRows;
      if (t + 1 < tiles)
        for (int o = 0; o < kOutputs; o += 8) add_block<8, 2>(w + o * 64, x, to + o * kRows);
      else
        add_block<16, 1>(w, x, to);
    }
  }
}

static void panel_products(const Matrix& m, int64_t panel, const Input& in, int64_t tiles, int64_t, float* sums,
                           uint8_t* scratch) {
  by_kind(m.kind, [&](auto kind) __attribute__((always_inline)) {
    products_of_kind<decltype(kind)::value>(m, panel, in, tiles, sums, scratch);
  });
}
#endif

#if !CPU_AMX
static void products(const Matrix* const* matrices, const int64_t* panels, int count, const Input& in, int64_t tiles,
                     int64_t rows, float* const* sums, uint8_t* scratch) {
  for (int i = 0; i < count; ++i) {
    panel_products(*matrices[i], panels[i], in, tiles, rows, sums[i], scratch);
    for (int64_t t = 0; t < tiles; ++t) finish(*matrices[i], panels[i], sums[i] + t * kOutputs * kRows);
  }
}
#else
// Tiles 0 to 3 hold sums [16 outputs][16 rows], the others weights [16 outputs][32 inputs] and inputs [16 pairs][16 rows].
// The intrinsics do not tell the compiler which memory they touch.
#define CPU_FENCE() __asm__ volatile("" ::: "memory")
#define CPU_STORE(tile, to) _tile_stored(tile, to, 64)

// A tile cannot be loaded from stores that are still under way, so weights are made some blocks before they are needed.
constexpr int64_t kBefore = 4, kRing = 8;  // blocks
constexpr int64_t kAhead = 16384;  // bytes that are asked for ahead of their use

// The blocks of one panel as bfloat16: `make` is called kBefore blocks ahead of `at`.
template <Kind kind>
class HalfPanel {
 public:
  // scratch: [kRing] blocks, or, where the panel is read again, [blocks]
  CPU_MEMBER HalfPanel(const Matrix& m, int64_t panel, uint8_t* scratch, bool again)
      : m_(m), panel_(panel), first_(block_at(m, panel, 0)), scratch_(scratch), again_(again) {}

  CPU_MEMBER void begin() const {
    for (int64_t b = 0; kind != Kind::bf16 && b < kBefore && b < m_.blocks; ++b) expand(b);
  }
  CPU_MEMBER void make(int64_t block) const {
    const uint8_t* from = from_of(block) + kAhead;
#pragma GCC unroll 16
    for (int64_t i = 0; i < kBytes; i += 64) _mm_prefetch((const char*)(from + i), _MM_HINT_T1);
    if (kind != Kind::bf16 && block + kBefore < m_.blocks) expand(block + kBefore);
    CPU_FENCE();
  }
  CPU_MEMBER const uint8_t* at(int64_t block) const { return kind == Kind::bf16 ? from_of(block) : place(block); }

 private:
  static constexpr int64_t kBytes = block_bytes(kind);
  CPU_MEMBER const uint8_t* from_of(int64_t block) const {
    return head_bytes(kind) == 0 ? first_ + block * kBytes : block_at(m_, panel_, block);
  }
  CPU_MEMBER uint8_t* place(int64_t block) const { return scratch_ + (again_ ? block : block % kRing) * 1024; }
  CPU_MEMBER void expand(int64_t block) const { half_block<kind>(m_, panel_, block, from_of(block), place(block)); }

  const Matrix& m_;
  const int64_t panel_;
  const uint8_t* const first_;
  uint8_t* const scratch_;
  const bool again_;
};

// Two panels by one or two tiles of rows: up to four sums under way.
template <Kind kind, int Tiles>
CPU_INLINE void two_panels(const Matrix* const* m, const int64_t* panels, const Input& in, float* const* sums,
                           uint8_t* scratch) {
  const int64_t blocks = m[0]->blocks;
  const HalfPanel<kind> one(*m[0], panels[0], scratch, false), two(*m[1], panels[1], scratch + kRing * 1024, false);
  CPU_FENCE();
  _tile_zero(0);
  _tile_zero(1);
  if (Tiles > 1) _tile_zero(2);
  if (Tiles > 1) _tile_zero(3);
  const uint32_t *x = in.pairs(0), *y = in.pairs(Tiles > 1 ? 1 : 0);
  one.begin();
  two.begin();
  for (int64_t b = 0; b < blocks; ++b) {
    one.make(b);
    _tile_loadd(6, x + b * 256, 64);
    if (Tiles > 1) _tile_loadd(7, y + b * 256, 64);
    _tile_loadd(4, one.at(b), 64);
    _tile_dpbf16ps(0, 4, 6);
    if (Tiles > 1) _tile_dpbf16ps(2, 4, 7);
    two.make(b);
    _tile_loadd(5, two.at(b), 64);
    _tile_dpbf16ps(1, 5, 6);
    if (Tiles > 1) _tile_dpbf16ps(3, 5, 7);
  }
  CPU_STORE(0, sums[0]);
  CPU_STORE(1, sums[1]);
  if (Tiles > 1) CPU_STORE(2, sums[0] + 256);
  if (Tiles > 1) CPU_STORE(3, sums[1] + 256);
  CPU_FENCE();
}

// One panel by up to four tiles of rows. The weights are made bfloat16 for the first four alone.
template <Kind kind, int Tiles>
CPU_INLINE void one_panel(const Matrix& m, int64_t panel, const Input& in, int64_t first, bool again, float* sums,
                          uint8_t* scratch) {
  const HalfPanel<kind> made(m, panel, scratch, again);
  CPU_FENCE();
  _tile_zero(0);
  if (Tiles > 1) _tile_zero(1);
  if (Tiles > 2) _tile_zero(2);
  if (Tiles > 3) _tile_zero(3);
  const uint32_t* x = in.pairs(first);
  const int64_t stride = in.stride;
  if (first == 0) made.begin();
  for (int64_t b = 0; b < m.blocks; ++b) {
    if (first == 0) made.make(b);
    _tile_loadd(4, made.at(b), 64);
    _tile_loadd(5, x + b * 256, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (Tiles > 1) {
      _tile_loadd(6, x + stride + b * 256, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (Tiles > 2) {
      _tile_loadd(7, x + 2 * stride + b * 256, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (Tiles > 3) {
      _tile_loadd(5, x + 3 * stride + b * 256, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  CPU_STORE(0, sums + first * 256);
  if (Tiles > 1) CPU_STORE(1, sums + (first + 1) * 256);
  if (Tiles > 2) CPU_STORE(2, sums + (first + 2) * 256);
  if (Tiles > 3) CPU_STORE(3, sums + (first + 3) * 256);
  CPU_FENCE();
}

template <Kind kind>
static void panel_products(const Matrix& m, int64_t panel, const Input& in, int64_t tiles, float* sums, uint8_t* scratch) {
  const bool again = tiles > 4;
  for (int64_t t = 0; t < tiles; t += 4) switch (tiles - t) {
      case 1: one_panel<kind, 1>(m, panel, in, t, again, sums, scratch); break;
      case 2: one_panel<kind, 2>(m, panel, in, t, again, sums, scratch); break;
      case 3: one_panel<kind, 3>(m, panel, in, t, again, sums, scratch); break;
      default: one_panel<kind, 4>(m, panel, in, t, again, sums, scratch);
    }
}

static void products(const Matrix* const* matrices, const int64_t* panels, int count, const Input& in, int64_t tiles,
                     int64_t, float* const* sums, uint8_t* scratch) {
  const bool together = count == 2 && tiles <= 2 && matrices[0]->kind == matrices[1]->kind;
  for (int i = 0; i < (together ? 1 : count); ++i)
    by_kind(matrices[i]->kind, [&](auto of) __attribute__((always_inline)) {
      constexpr Kind kind = decltype(of)::value;
      if (!together)
        panel_products<kind>(*matrices[i], panels[i], in, tiles, sums[i], scratch);
      else if (tiles == 1)
        two_panels<kind, 1>(matrices, panels, in, sums, scratch);
      else
        two_panels<kind, 2>(matrices, panels, in, sums, scratch);
    });
  for (int i = 0; i < count; ++i)
    for (int64_t t = 0; t < tiles; ++t) finish(*matrices[i], panels[i], sums[i] + t * kOutputs * kRows);
}

static void begin() {
  alignas(64) uint8_t config[64] = {1};
  for (int i = 0; i < 8; ++i) {
    config[16 + 2 * i] = 64;  // bytes of a row
    config[48 + i] = 16;      // rows
  }
  CPU_FENCE();
  _tile_loadconfig(config);
}
static void end() { _tile_release(); }
#endif

#if !CPU_AMX
static void begin() {}
static void end() {}
#endif

// ---- what stands between the products

// Channels 2 i and 2 i + 1 of a tile.
CPU_INLINE void put_pair(const Input& out, int64_t tile, int64_t channel, int v, vf even, vf odd) {
#if CPU_PAIRS
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
  (void)v;
  _mm512_storeu_si512(out.pairs(tile) + channel / 2 * kRows, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#else
  float* at = out.floats(tile) + channel * kRows + v * W;
  store(at, even);
  store(at + kRows, odd);
#endif
}

static void copy(const float* x, int64_t channels, const Input& out, int64_t tile, int64_t first_channel) {
  for (int64_t c = 0; c < channels; c += 2)
    for (int v = 0; v < V; ++v)
      put_pair(out, tile, first_channel + c, v, load(x + c * kRows + v * W), load(x + (c + 1) * kRows + v * W));
}

static void norm(const float* x, const float* weight, int64_t channels, float eps, const Input* out, int64_t tile,
                 int64_t first_channel, float* plain) {
  for (int v = 0; v < V; ++v) {
    const float* at = x + v * W;
    vf squares[2] = {};
    for (int64_t c = 0; c < channels; c += 2) {
      const vf a = load(at + c * kRows), b = load(at + (c + 1) * kRows);
      squares[0] = a * a + squares[0];
      squares[1] = b * b + squares[1];
    }
    vf root = (squares[0] + squares[1]) / static_cast<float>(channels) + eps;
    for (int i = 0; i < W; ++i) root[i] = 1.0f / __builtin_sqrtf(root[i]);
    for (int64_t c = 0; c < channels; c += 2) {
      const vf even = load(at + c * kRows) * root * weight[c], odd = load(at + (c + 1) * kRows) * root * weight[c + 1];
      if (out) put_pair(*out, tile, first_channel + c, v, even, odd);
      if (plain) {
        store(plain + c * kRows + v * W, even);
        store(plain + (c + 1) * kRows + v * W, odd);
      }
    }
  }
}

CPU_INLINE vf gated(vf gate, vf up) { return gate / (1.0f + exponential(-gate)) * up; }

static void gate(const float* gates, const float* ups, const Input& out, int64_t tile, int64_t first_channel) {
  for (int c = 0; c < kOutputs; c += 2)
    for (int v = 0; v < V; ++v) {
      const int at = c * kRows + v * W, next = at + kRows;
      put_pair(out, tile, first_channel + c, v, gated(load(gates + at), load(ups + at)),
               gated(load(gates + next), load(ups + next)));
    }
}

static void rotate(float* head, const float* cosines, const float* sines, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t d = 0; d < half; ++d)
    for (int v = 0; v < V; ++v) {
      float *first = head + d * kRows + v * W, *second = first + half * kRows;
      const vf a = load(first), b = load(second);
      const vf cosine = load(cosines + d * kRows + v * W), sine = load(sines + d * kRows + v * W);
      store(first, a * cosine - b * sine);
      store(second, b * cosine + a * sine);
    }
}

static void best(const float* sums, int32_t first, int32_t outputs, float* most, int32_t* at) {
  for (int v = 0; v < V; ++v) {
    vf peak = load(most + v * W);
    vi found;
    __builtin_memcpy(&found, at + v * W, sizeof found);
    for (int32_t o = 0; o < outputs; ++o) {
      const vf value = load(sums + o * kRows + v * W);
      const vi better = (value > peak) & (value <= set(__FLT_MAX__));
      peak = better ? value : peak;
      found = better ? vi{} + (first + o) : found;
    }
    store(most + v * W, peak);
    __builtin_memcpy(at + v * W, &found, sizeof found);
  }
}

// ---- attention

constexpr int kSlots = 16;  // expanded at a time

CPU_INLINE void expand(const void* from, bool half, int64_t slot, int64_t count, int64_t size, float* to) {
  if (!half) {
    __builtin_memcpy(to, static_cast<const float*>(from) + slot * size, static_cast<size_t>(count * size) * sizeof(float));
    return;
  }
  const uint16_t* at = static_cast<const uint16_t*>(from) + slot * size;
  int64_t i = 0;
  for (; i + W <= count * size; i += W) store(to + i, load_half(at + i));
  for (; i < count * size; ++i) {
    const uint32_t bits = static_cast<uint32_t>(at[i]) << 16;
    __builtin_memcpy(to + i, &bits, 4);
  }
}

// scores[slot][16] of `Slots` slots; each is one sum over the channels, in their order.
template <int Slots>
CPU_INLINE void score(const float* keys, const float* query, int64_t size, float* scores) {
  for (int v = 0; v < V; ++v) {
    vf sums[Slots] = {};
    for (int64_t d = 0; d < size; ++d) {
      const vf q = load(query + d * kRows + v * W);
      for (int s = 0; s < Slots; ++s) sums[s] = q * keys[s * size + d] + sums[s];
    }
    for (int s = 0; s < Slots; ++s) store(scores + s * kRows + v * W, sums[s]);
  }
}

constexpr int kChannels = 8;  // of the output, summed side by side

// out[d][16] += weights[slot][16] * values[slot][d], slot after slot; hidden ones are left out, not added as zero.
template <int Channels, bool Masked>
CPU_INLINE void add_values(const AttendTask& task, const float* values, int64_t slot, int64_t count, int64_t d) {
  for (int v = 0; v < V; ++v) {
    vf sums[Channels];
    for (int i = 0; i < Channels; ++i) sums[i] = load(task.out + (d + i) * kRows + v * W);
    for (int64_t s = 0; s < count; ++s) {
      const vf weight = load(task.scores + (slot + s) * kRows + v * W);
      for (int i = 0; i < Channels; ++i) {
        const vf sum = weight * values[s * task.size + d + i] + sums[i];
        if (Masked) {
          const vf seen = load(task.visible + (slot + s - task.prefix) * kRows + v * W);
          sums[i] = seen != 0.0f ? sum : sums[i];
        } else {
          sums[i] = sum;
        }
      }
    }
    for (int i = 0; i < Channels; ++i) store(task.out + (d + i) * kRows + v * W, sums[i]);
  }
}

template <bool Masked>
CPU_INLINE void add_slots(const AttendTask& task, int64_t slot, int64_t count) {
  expand(task.values, task.half, slot, count, task.size, task.expanded);
  int64_t d = 0;
  for (; d + kChannels <= task.size; d += kChannels) add_values<kChannels, Masked>(task, task.expanded, slot, count, d);
  for (; d < task.size; ++d) add_values<1, Masked>(task, task.expanded, slot, count, d);
}

static void attend(const AttendTask& task) {
  const int64_t size = task.size, prefix = task.prefix, slots = task.slots;
  const vf lowest = set(-3.0e38f);
  for (int64_t slot = 0; slot < slots; slot += kSlots) {
    const int64_t count = slots - slot < kSlots ? slots - slot : kSlots;
    expand(task.keys, task.half, slot, count, size, task.expanded);
    int64_t s = 0;
    for (; s + 8 <= count; s += 8) score<8>(task.expanded + s * size, task.query, size, task.scores + (slot + s) * kRows);
    for (; s < count; ++s) score<1>(task.expanded + s * size, task.query, size, task.scores + (slot + s) * kRows);
  }
  for (int v = 0; v < V; ++v) {
    float* scores = task.scores + v * W;
    vf peak = lowest, sum = {};
    for (int64_t s = prefix; s < slots; ++s) {
      const vf seen = load(task.visible + (s - prefix) * kRows + v * W);
      store(scores + s * kRows, seen != 0.0f ? load(scores + s * kRows) : lowest);
    }
    for (int64_t s = 0; s < slots; ++s) peak = greater(peak, load(scores + s * kRows));
    for (int64_t s = 0; s < slots; ++s) {
      const vf score = load(scores + s * kRows);
      vf weight = exponential(score - peak);
      if (s >= prefix) weight = load(task.visible + (s - prefix) * kRows + v * W) != 0.0f ? weight : vf{};
      store(scores + s * kRows, weight);
      sum = sum + weight;
    }
    // where nothing is visible (padding) every weight and the sum are 0
    const vf share = sum > 0.0f ? 1.0f / sum : (sum == sum ? vf{} : sum);
    for (int64_t s = 0; s < slots; ++s) store(scores + s * kRows, load(scores + s * kRows) * share);
  }
  __builtin_memset(task.out, 0, static_cast<size_t>(size * kRows) * sizeof(float));
  for (int64_t slot = 0; slot < prefix; slot += kSlots)
    add_slots<false>(task, slot, prefix - slot < kSlots ? prefix - slot : kSlots);
  for (int64_t slot = prefix; slot < slots; slot += kSlots)
    add_slots<true>(task, slot, slots - slot < kSlots ? slots - slot : kSlots);
}

static Kernels table(const char* name) {
  return {name, CPU_PAIRS != 0, begin, end, products, weights, norm, copy, gate, rotate, attend, best};
}
