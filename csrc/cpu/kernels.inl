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
CPU_INLINE vf set(float value) { return value - vf{}; }
CPU_INLINE vf as_floats(vu bits) { return (vf)bits; }
CPU_INLINE vu as_bits(vf value) { return (vu)value; }
CPU_INLINE vf greater(vf a, vf b) { return a > b ? a : b; }

// a * b + c, rounded once where the set can. Written out, as clang moves a selection of the sum in between the two, which are
// then rounded one by one.
CPU_INLINE vf fused(vf a, vf b, vf c) {
#if CPU_LANES == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif CPU_LANES == 8
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Values of fewer bits as one vector of words. Written out, as GCC makes steps of several instructions of a conversion.
#if CPU_LANES == 16
CPU_INLINE vu widened(const uint16_t* from) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)); }
CPU_INLINE vi widened(const uint8_t* from) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }
#elif CPU_LANES == 8
CPU_INLINE vu widened(const uint16_t* from) { return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)); }
CPU_INLINE vi widened(const uint8_t* from) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
#else
CPU_INLINE vu widened(const uint16_t* from) {
  vh half;
  __builtin_memcpy(&half, from, sizeof half);
  return __builtin_convertvector(half, vu);
}
CPU_INLINE vi widened(const uint8_t* from) {
  vb value;
  __builtin_memcpy(&value, from, sizeof value);
  return __builtin_convertvector(value, vi);
}
#endif

CPU_INLINE vf load_half(const uint16_t* from) {
#if CPU_LANES == 8
  const __m256i places = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                          -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
  return (vf)_mm256_shuffle_epi8(twice, places);  // one instruction where a FMA does not want the same unit
#else
  return as_floats(widened(from) << 16);
#endif
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

#if CPU_LANES == 4
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
#else
CPU_INLINE float float_of_half_precision(uint16_t half) { return _cvtsh_ss(half); }
#endif

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
    const vu q = widened(reinterpret_cast<const uint16_t*>(words) + k) >> shift & 15u;
    store(out + k, as_half(__builtin_convertvector((vi)q, vf) * factor + term));
  }
}

CPU_INLINE vf bytes(const uint8_t* from) {
  return __builtin_convertvector(widened(from), vf);
}

// kind: that of the matrix
CPU_INLINE void block_weights_of(Kind kind, const Matrix& m, int64_t panel, int64_t block, int output, float* out) {
  const uint8_t* at = block_at(m, panel, block);
  switch (kind) {
    case Kind::f32: __builtin_memcpy(out, at + output * 128, 128); return;
    case Kind::bf16:
      for (int k = 0; k < kDepth; k += W)
        store(out + k, load_half(reinterpret_cast<const uint16_t*>(at + output * 64) + k));
      return;
    case Kind::i8:
      for (int k = 0; k < kDepth; k += W) store(out + k, bytes(at + output * 64 + k));
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
      const uint8_t *words = at + output / 4 * 64, *high = at + 256 + output * 8, *scales = at + 384 + output * 2;
      vu twice;  // input k's two bits are 2 k and 2 k + 1 of its output's
      for (int i = 0; i < W; ++i) twice[i] = static_cast<uint32_t>(2 * i);
      for (int k = 0; k < kDepth; k += W) {
        uint32_t bits = 0;
        __builtin_memcpy(&bits, high + k / 4, W / 4);
        const vu low = widened(reinterpret_cast<const uint16_t*>(words) + k) >> output % 4 * 4 & 15u;
        const vi q = (vi)(low | (bits >> twice & 3u) << 4) - 32;
        const float scale = d * static_cast<float>(static_cast<int8_t>(scales[k / 16]));
        store(out + k, as_half(__builtin_convertvector(q, vf) * scale));
      }
      return;
    }
  }
}

static void block_weights(const Matrix& m, int64_t panel, int64_t block, int output, float* out) {
  block_weights_of(m.kind, m, panel, block, output, out);
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

CPU_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
CPU_INLINE int vectors_of(int64_t rows) { return rows >= kRows ? V : static_cast<int>((rows + W - 1) / W); }

constexpr int64_t kAhead = 16384;  // bytes that are asked for ahead of their use

CPU_INLINE void ask_for(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
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
    case Kind::f32:
      if (!CPU_PAIRS) body(std::integral_constant<Kind, Kind::f32>{});
      return;
  }
}

#if CPU_PAIRS
// Single floats of the array are then broadcast by loads; compilers that know the vector it came from would rather
// permute that, on the one port that is busy anyway.
#define CPU_IN_MEMORY(array) __asm__("" : "+m"(array))

// Calls put(output, its 32 weights of a block as bfloat16) for each output.
template <Kind kind, typename Put>
CPU_INLINE void half_block(const Matrix& m, int64_t panel, int64_t block, const uint8_t* from, const Put& put) {
  const __m512 counts = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  switch (kind) {
    case Kind::bf16:
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) put(o, _mm512_loadu_si512(from + o * 64));
      return;
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
        put(o, _mm512_permutexvar_epi16(of_a, tables));
        put(o + 1, _mm512_permutexvar_epi16(of_b, tables));
      }
      return;
    }
    case Kind::i8:
    case Kind::q8_0: {
      alignas(64) float factors[kOutputs];
      if (kind == Kind::q8_0)
        _mm512_store_ps(factors, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + 512))));
      CPU_IN_MEMORY(factors);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        const auto* values = (const __m128i*)(from + o * (kind == Kind::i8 ? 64 : 32));
        __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(values)));
        __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(values + 1)));
        if (kind == Kind::q8_0) {
          const __m512 d = _mm512_set1_ps(factors[o]);
          first = _mm512_mul_ps(first, d), second = _mm512_mul_ps(second, d);
        }
        put(o, (__m512i)_mm512_cvtne2ps_pbh(second, first));
      }
      return;
    }
    case Kind::q6_k: {
      alignas(64) float factors[2][kOutputs];  // of the first and of the last 16 inputs
      const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)super_head(m, panel, block)));
      const __m512i scales = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(from + 384)));
      _mm512_store_ps(factors[0], _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(scales, 16), 16))));
      _mm512_store_ps(factors[1], _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_srai_epi32(scales, 16))));
      CPU_IN_MEMORY(factors);
      // a byte's four times two bits to four words
      const __m512i quarters = _mm512_set_epi64(0x8007800780078007, 0x8006800680068006, 0x8005800580058005, 0x8004800480048004,
                                                0x8003800380038003, 0x8002800280028002, 0x8001800180018001, 0x8000800080008000);
      const __m512i shifts = _mm512_set1_epi64(0x0006000400020000), nibble = _mm512_set1_epi16(15), two = _mm512_set1_epi16(48);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        int64_t bytes;
        __builtin_memcpy(&bytes, from + 256 + o * 8, 8);
        const __m512i low = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(from + o / 4 * 64), o % 4 * 4), nibble);
        const __m512i high = _mm512_srlv_epi16(_mm512_shuffle_epi8(_mm512_set1_epi64(bytes), quarters), shifts);
        const __m512i bits = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 4), two, low, 0xEA);  // (x & y) | z
        const __m512i q = _mm512_sub_epi16(bits, _mm512_set1_epi16(32));
        const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(q)));
        const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(q, 1)));
        put(o, (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(second, _mm512_set1_ps(factors[1][o])),
                                            _mm512_mul_ps(first, _mm512_set1_ps(factors[0][o]))));
      }
      return;
    }
    case Kind::f32: return;  // not where there are pairs
  }
}
#endif

#if !CPU_AMX
// Lanes are inputs here, so that a few rows cost no more than reading the weights: `prepare` lays rows out one behind the
// other. A lane sums every W-th input, or pair of inputs where there are pairs, and the lanes are added up at the end.
constexpr int64_t kWords = CPU_PAIRS ? kDepth / 2 : kDepth;  // of a row's block
#if defined(__aarch64__)
constexpr bool kManyRegisters = true;  // 32, not 16
#else
constexpr bool kManyRegisters = W == 16;
#endif
constexpr int kTogether = kManyRegisters ? 4 : 3;  // rows
constexpr int64_t kPart = CPU_PAIRS ? 64 : 12;  // blocks
constexpr int64_t kStrip = kKeptBytes / (4 * kOutputs * W) / kRows * kRows;  // rows whose lanes are kept
constexpr int outputs_by(int rows) { return kManyRegisters ? 16 / rows : rows == 1 ? 8 : 4; }

#if CPU_LANES == 16
CPU_INLINE void transpose(__m512i* r);
#endif

CPU_INLINE uint32_t* rows_of(uint8_t* scratch, int64_t blocks) {
  return reinterpret_cast<uint32_t*>(scratch + made_bytes(blocks));
}

static void prepare(const Matrix& m, const Input& in, int64_t rows, uint8_t* scratch) {
  const int64_t words = m.blocks * kWords;
  uint32_t* to = rows_of(scratch, m.blocks);
  for (int64_t first = 0; first < rows; first += kRows, to += kRows * words) {
    const uint32_t* from = in.pairs(first / kRows);
    const int64_t live = least(kRows, rows - first);
#if CPU_LANES == 16
    if (live > 4) {
      for (int64_t k = 0; k < words; k += 16) {
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + (k + i) * kRows);
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          if (i < live) _mm512_storeu_si512(to + i * words + k, r[i]);
      }
      continue;
    }
#endif
    for (int64_t lane = 0; lane < live; ++lane)
      for (int64_t k = 0; k < words; ++k) to[lane * words + k] = from[k * kRows + lane];
  }
}

// What the lanes of each of kAtOnce vectors add up to.
constexpr int kAtOnce = W == 16 ? 16 : 4;
CPU_INLINE void add_up(const vf* lanes, float* sums) {
#if CPU_LANES == 16
  __m512 fours[4], pairs[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = (__m512)lanes[4 * i], b = (__m512)lanes[4 * i + 1];
    const __m512 c = (__m512)lanes[4 * i + 2], d = (__m512)lanes[4 * i + 3];
    const __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    fours[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
  }
  for (int i = 0; i < 2; ++i)
    pairs[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xDD));
  _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_shuffle_f32x4(pairs[0], pairs[1], 0x88),
                                       _mm512_shuffle_f32x4(pairs[0], pairs[1], 0xDD)));
#elif CPU_LANES == 8
  const __m256 a = (__m256)lanes[0], b = (__m256)lanes[1], c = (__m256)lanes[2], d = (__m256)lanes[3];
  const __m256d ab = (__m256d)_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256d cd = (__m256d)_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 fours = _mm256_add_ps((__m256)_mm256_unpacklo_pd(ab, cd), (__m256)_mm256_unpackhi_pd(ab, cd));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
#else
  for (int i = 0; i < kAtOnce; ++i) sums[i] = (lanes[i][0] + lanes[i][1]) + (lanes[i][2] + lanes[i][3]);
#endif
}

// Weights [blocks][16 outputs][32], bfloat16 or float: where they stand, and the bytes from block to block and from four
// outputs to the next four.
struct Weights {
  const uint8_t* data;
  int64_t block, group;
};

// Memory that is asked for meanwhile: so many bytes for each block.
struct Ahead {
  const uint8_t* from;
  int64_t bytes;
};

// Where sums begin and end that are made of several parts of the inputs, and what is kept of their lanes between these.
struct Part {
  bool first, last;
  float* kept;
};

// Sums of some outputs by `Rows` rows, `words` words apart, over blocks of inputs, to [outputs][16].
template <bool Half, int Rows>
CPU_INLINE void multiply(Weights weights, const uint32_t* rows, int64_t words, int64_t blocks, Ahead ahead, const Part& part,
                         float* sums) {
  constexpr int kOf = outputs_by(Rows), kSums = kOf * Rows, kStride = kDepth * (Half ? 2 : 4);
  vf lanes[kSums];
  if (part.first)
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) lanes[i] = vf{};
  else
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) lanes[i] = load(part.kept + i * W);
  for (int64_t b = 0; b < blocks; ++b, weights.data += weights.block, rows += kWords, ahead.from += ahead.bytes) {
    ask_for(ahead.from, ahead.bytes);
#if CPU_PAIRS
    __m512bh x[Rows];
    for (int r = 0; r < Rows; ++r) x[r] = (__m512bh)_mm512_loadu_si512(rows + r * words);
#pragma GCC unroll 16
    for (int o = 0; o < kOf; ++o) {
      const __m512bh w = (__m512bh)_mm512_loadu_si512(weights.data + o / 4 * weights.group + o % 4 * kStride);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) lanes[o * Rows + r] = (vf)_mm512_dpbf16_ps((__m512)lanes[o * Rows + r], w, x[r]);
    }
#else
#pragma GCC unroll 8
    for (int k = 0; k < kDepth; k += W) {
      vf x[Rows];
      for (int r = 0; r < Rows; ++r) x[r] = load(reinterpret_cast<const float*>(rows + r * words) + k);
#pragma GCC unroll 16
      for (int o = 0; o < kOf; ++o) {
        const uint8_t* at = weights.data + o / 4 * weights.group + o % 4 * kStride;
        const vf w = Half ? load_half(reinterpret_cast<const uint16_t*>(at) + k) : load(reinterpret_cast<const float*>(at) + k);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) lanes[o * Rows + r] = fused(w, x[r], lanes[o * Rows + r]);
      }
    }
#endif
  }
  if (!part.last) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) store(part.kept + i * W, lanes[i]);
    return;
  }
  alignas(64) float found[kSums];
#pragma GCC unroll 4
  for (int i = 0; i < kSums; i += kAtOnce) add_up(lanes + i, found + i);
  for (int o = 0; o < kOf; ++o) __builtin_memcpy(sums + o * kRows, found + o * Rows, sizeof(float) * Rows);
}

// All outputs of a panel by all rows.
template <bool Half>
CPU_INLINE void multiply_rows(const Weights& weights, const uint32_t* x, int64_t words, int64_t rows, int64_t blocks,
                              Ahead ahead, const Part& part, float* sums) {
  // what is asked for goes with up to so many passes over the weights
  int64_t passes = least((rows + kTogether - 1) / kTogether, 4);
  ahead.bytes /= passes;
  for (int64_t r = 0; r < rows;) {
    const auto run = [&](auto count) __attribute__((always_inline)) {
      constexpr int kCount = decltype(count)::value, kOf = outputs_by(kCount);
      const int64_t bytes = ahead.bytes * kOf / kOutputs;
      float* to = sums + r / kRows * kOutputs * kRows + r % kRows;
      for (int o = 0; o < kOutputs; o += kOf, ahead.from += blocks * bytes) {
        const uint8_t* from = weights.data + o / 4 * weights.group + o % 4 * kDepth * (Half ? 2 : 4);
        multiply<Half, kCount>({from, weights.block, weights.group}, x + r * words, words, blocks, {ahead.from, bytes},
                               {part.first, part.last, part.kept + (r * kOutputs + o * kCount) * W}, to + o * kRows);
      }
      r += kCount;
      if (--passes == 0) ahead.bytes = 0;
    };
    const int64_t left = least(rows - r, kRows - r % kRows);
    if (left >= kTogether)
      run(std::integral_constant<int, kTogether>{});
    else if (left >= 2)
      run(std::integral_constant<int, 2>{});
    else
      run(std::integral_constant<int, 1>{});
  }
}

// Blocks [first, last) of a panel to `to`, as [4][blocks][4 outputs][32].
template <Kind kind>
CPU_INLINE void make_weights(const Matrix& m, int64_t panel, int64_t first, int64_t last, Ahead ahead, const Weights& made,
                             uint8_t* to) {
  for (int64_t b = first; b < last; ++b, ahead.from += ahead.bytes, to += made.block) {
    ask_for(ahead.from, ahead.bytes);
#if CPU_PAIRS
    half_block<kind>(m, panel, b, block_at(m, panel, b), [&](int o, __m512i weights) __attribute__((always_inline)) {
      _mm512_store_si512(to + o / 4 * made.group + o % 4 * 64, weights);
    });
#else
    for (int o = 0; o < kOutputs; ++o)
      block_weights_of(kind, m, panel, b, o, reinterpret_cast<float*>(to + o / 4 * made.group) + o % 4 * kDepth);
#endif
  }
}

#if CPU_PAIRS
// All outputs of a panel by one row, its weights as they are made.
template <Kind kind>
CPU_INLINE void multiply_made(const Matrix& m, int64_t panel, const uint32_t* x, Ahead ahead, float* sums) {
  vf lanes[kOutputs];
#pragma GCC unroll 16
  for (int o = 0; o < kOutputs; ++o) lanes[o] = vf{};
  for (int64_t b = 0; b < m.blocks; ++b, x += kWords, ahead.from += ahead.bytes) {
    ask_for(ahead.from, ahead.bytes);
    const __m512bh row = (__m512bh)_mm512_loadu_si512(x);
    half_block<kind>(m, panel, b, block_at(m, panel, b), [&](int o, __m512i weights) __attribute__((always_inline)) {
      lanes[o] = (vf)_mm512_dpbf16_ps((__m512)lanes[o], (__m512bh)weights, row);
    });
  }
  alignas(64) float found[kOutputs];
  add_up(lanes, found);
  for (int o = 0; o < kOutputs; ++o) sums[o * kRows] = found[o];
}
#endif

template <Kind kind>
CPU_INLINE void products_of_kind(const Matrix& m, int64_t panel, int64_t tiles, int64_t rows, float* sums, uint8_t* scratch) {
  constexpr bool kAsItIs = kind == Kind::bf16 || kind == Kind::f32;
  constexpr int64_t kBytes = block_bytes(kind), kFour = 4 * kDepth * (CPU_PAIRS ? 2 : 4);
  __builtin_memset(sums, 0, static_cast<size_t>(tiles * kOutputs * kRows) * sizeof(float));
  const int64_t words = m.blocks * kWords;
  const uint32_t* const x = rows_of(scratch, m.blocks);
  float* const kept = reinterpret_cast<float*>(scratch + scratch_bytes(m.blocks, tiles) - kKeptBytes);
  // memory gives the panel behind this one meanwhile
  Ahead ahead{block_at(m, panel, 0) + panel_bytes(kind, m.blocks), kBytes};
  if (kAsItIs && rows <= (CPU_PAIRS ? 4 : 2))
    return multiply_rows<kind == Kind::bf16>({block_at(m, panel, 0), kBytes, kBytes / 4}, x, words, rows, m.blocks, ahead,
                                             {true, true, kept}, sums);
#if CPU_PAIRS
  if (rows == 1) return multiply_made<kind>(m, panel, x, ahead, sums);
#endif
  // Several rows read weights several times, each time four outputs': these stand together then, and as many of their
  // inputs as the first cache keeps.
  const int64_t parts = (m.blocks + kPart - 1) / kPart, size = (m.blocks + parts - 1) / parts;
  const int64_t making = kAsItIs ? 0 : rows > 2 ? kBytes / 4 : kBytes;
  for (int64_t strip = 0; strip < rows; strip += kStrip)
    for (int64_t b = 0; b < m.blocks; b += size) {
      const int64_t blocks = least(size, m.blocks - b);
      const Weights made{scratch, kFour, blocks * kFour};
      make_weights<kind>(m, panel, b, b + blocks, {ahead.from, making}, made, scratch);
      ahead.from += blocks * making;
      multiply_rows<CPU_PAIRS != 0>(made, x + strip * words + b * kWords, words, least(kStrip, rows - strip), blocks,
                                    {ahead.from, kBytes - making}, {b == 0, b + blocks == m.blocks, kept},
                                    sums + strip * kOutputs);
      ahead.from += blocks * (kBytes - making);
    }
}

static void panel_products(const Matrix& m, int64_t panel, int64_t tiles, int64_t rows, float* sums, uint8_t* scratch) {
  by_kind(m.kind, [&](auto kind) __attribute__((always_inline)) {
    products_of_kind<decltype(kind)::value>(m, panel, tiles, rows, sums, scratch);
  });
}
#endif

// Denormals are zero between begin and end, as they are for tiles: attention makes them where scores lie far apart, and a
// vector that meets one takes a hundred cycles.
#if defined(__SSE2__)
static unsigned& control() {
  static thread_local unsigned before = 0;
  return before;
}
static void flush_denormals() {
  control() = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(control() | 0x8040);
}
static void restore_denormals() { __builtin_ia32_ldmxcsr(control()); }
#else
static void flush_denormals() {}
static void restore_denormals() {}
#endif

#if !CPU_AMX
static void products(const Matrix* const* matrices, const int64_t* panels, int count, const Input&, int64_t tiles,
                     int64_t rows, float* const* sums, uint8_t* scratch) {
  for (int i = 0; i < count; ++i) {
    panel_products(*matrices[i], panels[i], tiles, rows, sums[i], scratch);
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
  CPU_MEMBER void expand(int64_t block) const {
    uint8_t* const to = place(block);
    half_block<kind>(m_, panel_, block, from_of(block), [&](int o, __m512i weights) __attribute__((always_inline)) {
      _mm512_store_si512(to + o * 64, weights);
    });
  }

  const Matrix& m_;
  const int64_t panel_;
  const uint8_t* const first_;
  uint8_t* const scratch_;
  const bool again_;
};

// Two panels by one or two tiles of rows, from tile `first`: up to four sums under way. The weights are made bfloat16 for
// first 0 alone.
template <Kind kind, int Tiles>
CPU_INLINE void two_panels(const Matrix* const* m, const int64_t* panels, const Input& in, int64_t first, bool again,
                           float* const* sums, uint8_t* scratch) {
  const int64_t blocks = m[0]->blocks;
  uint8_t* const behind = scratch + (again ? blocks : kRing) * 1024;
  const HalfPanel<kind> one(*m[0], panels[0], scratch, again), two(*m[1], panels[1], behind, again);
  CPU_FENCE();
  _tile_zero(0);
  _tile_zero(1);
  if (Tiles > 1) _tile_zero(2);
  if (Tiles > 1) _tile_zero(3);
  const uint32_t *x = in.pairs(first), *y = in.pairs(Tiles > 1 ? first + 1 : first);
  if (first == 0) one.begin();
  if (first == 0) two.begin();
  for (int64_t b = 0; b < blocks; ++b) {
    if (first == 0) one.make(b);
    _tile_loadd(6, x + b * 256, 64);
    if (Tiles > 1) _tile_loadd(7, y + b * 256, 64);
    _tile_loadd(4, one.at(b), 64);
    _tile_dpbf16ps(0, 4, 6);
    if (Tiles > 1) _tile_dpbf16ps(2, 4, 7);
    if (first == 0) two.make(b);
    _tile_loadd(5, two.at(b), 64);
    _tile_dpbf16ps(1, 5, 6);
    if (Tiles > 1) _tile_dpbf16ps(3, 5, 7);
  }
  CPU_STORE(0, sums[0] + first * 256);
  CPU_STORE(1, sums[1] + first * 256);
  if (Tiles > 1) CPU_STORE(2, sums[0] + (first + 1) * 256);
  if (Tiles > 1) CPU_STORE(3, sums[1] + (first + 1) * 256);
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

// int8 weights stay as they are, and rows become integers of 16 bits in two planes, the high byte with its sign and the low
// byte without one. A row's step is a power of two, by its largest value: what is at least a 128th of that keeps all that
// bfloat16 has of it. Sums are of integers and exact, so they are those of any order.
//
// Planes: [tiles][pairs of blocks][high, low][16 times 4 inputs][16 rows][4], then, by tile, the steps as [16 rows] floats,
// NaN for a row with a value that is not finite.

static void prepare(const Matrix& m, const Input& in, int64_t rows, uint8_t* scratch) {
  if (m.kind != Kind::i8) return;
  const int64_t tiles = (rows + kRows - 1) / kRows, pairs = (m.blocks + 1) / 2, words = m.blocks * kDepth / 2;
  uint8_t* planes = scratch + made_bytes(m.blocks);
  float* powers = reinterpret_cast<float*>(planes + tiles * pairs * 2048);
  const __m512i upper = _mm512_set1_epi32(-65536), size_of = _mm512_set1_epi16(0x7FFF);
  const __m512i order = _mm512_set4_epi32(0x0F0D0E0C, 0x0B090A08, 0x07050604, 0x03010200);
  const __mmask32 odd = 0xAAAAAAAA;
  for (int64_t t = 0; t < tiles; ++t, planes += pairs * 2048, powers += kRows) {
    const uint32_t* from = in.pairs(t);
    __m512i peaks[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t k = 0; k < words; k += 2)
      for (int i = 0; i < 2; ++i)
        peaks[i] = _mm512_max_epu16(peaks[i], _mm512_and_si512(_mm512_loadu_si512(from + (k + i) * kRows), size_of));
    const __m512i both = _mm512_max_epu16(peaks[0], peaks[1]);
    const __m512i peak = _mm512_max_epi32(_mm512_srli_epi32(both, 16), _mm512_and_si512(both, _mm512_set1_epi32(0xFFFF)));
    const __mmask16 finite = _mm512_cmplt_epu32_mask(peak, _mm512_set1_epi32(0x7F80));
    // exponents of the steps, as floats have them: at least that of the smallest whose inverse is no denormal either
    const __m512i wanted = _mm512_sub_epi32(_mm512_srli_epi32(peak, 7), _mm512_set1_epi32(14));
    const __m512i step = _mm512_max_epi32(wanted, _mm512_set1_epi32(1));
    const __m512 up = (__m512)_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254), step), 23);
    const __m512 not_a_number = _mm512_set1_ps(__builtin_nanf(""));
    _mm512_storeu_ps(powers, _mm512_mask_mov_ps(not_a_number, finite, (__m512)_mm512_slli_epi32(step, 23)));
    const auto steps = [&](__m512i value) __attribute__((always_inline)) {
      return _mm512_cvtps_epi32(_mm512_mul_ps((__m512)value, up));
    };
    // two inputs as [low of one, of the other, high of one, of the other]
    const auto two = [&](__m512i pair) __attribute__((always_inline)) {
      const __m512i first = steps(_mm512_slli_epi32(pair, 16)), second = steps(_mm512_and_si512(pair, upper));
      return _mm512_shuffle_epi8(_mm512_mask_blend_epi16(odd, first, _mm512_slli_epi32(second, 16)), order);
    };
    for (int64_t k = 0; k < words; k += 2) {
      const __m512i a = two(_mm512_loadu_si512(from + k * kRows)), b = two(_mm512_loadu_si512(from + (k + 1) * kRows));
      uint8_t* to = planes + k / 32 * 2048 + k % 32 * 32;
      _mm512_storeu_si512(to, _mm512_mask_blend_epi16(odd, _mm512_srli_epi32(a, 16), b));
      _mm512_storeu_si512(to + 1024, _mm512_mask_blend_epi16(odd, a, _mm512_slli_epi32(b, 16)));
    }
    if (m.blocks % 2) {
      __builtin_memset(planes + pairs * 2048 - 1536, 0, 512);
      __builtin_memset(planes + pairs * 2048 - 512, 0, 512);
    }
  }
  CPU_FENCE();
}

// Sums of a tile's high and low planes to floats.
CPU_INLINE void join_planes(const Matrix& m, int64_t panel, const int32_t* high, const int32_t* low, const float* powers,
                            float* sums) {
  const __m512 power = _mm512_loadu_ps(powers), high_step = _mm512_set1_ps(256.0f);
  for (int o = 0; o < kOutputs; ++o) {
    const __m512 above = _mm512_cvtepi32_ps(_mm512_load_si512(high + o * kRows));
    const __m512 below = _mm512_cvtepi32_ps(_mm512_load_si512(low + o * kRows));
    const __m512 sum = _mm512_mul_ps(_mm512_fmadd_ps(above, high_step, below), power);
    const __m512 bias = _mm512_set1_ps(m.bias ? m.bias[panel * kOutputs + o] : 0.0f);
    _mm512_storeu_ps(sums + o * kRows, _mm512_fmadd_ps(sum, _mm512_set1_ps(m.scales[panel * kOutputs + o]), bias));
  }
}

template <int Panels>
CPU_INLINE void by_planes(const Matrix* const* m, const int64_t* panels, int64_t tiles, float* const* sums,
                          const uint8_t* planes) {
  const int64_t pairs = (m[0]->blocks + 1) / 2;
  const float* powers = reinterpret_cast<const float*>(planes + tiles * pairs * 2048);
  const uint8_t *one = block_at(*m[0], panels[0], 0), *two = Panels > 1 ? block_at(*m[1], panels[1], 0) : one;
  alignas(64) int32_t found[4 * 256];
  for (int64_t t = 0; t < tiles; ++t, planes += pairs * 2048, powers += kRows) {
    CPU_FENCE();
    _tile_zero(0);
    _tile_zero(1);
    if (Panels > 1) _tile_zero(2);
    if (Panels > 1) _tile_zero(3);
    for (int64_t p = 0; p < pairs; ++p) {
      if (t == 0) ask_for(one + p * 1024 + kAhead, 1024);
      if (t == 0 && Panels > 1) ask_for(two + p * 1024 + kAhead, 1024);
      _tile_loadd(4, planes + p * 2048, 64);
      _tile_loadd(5, planes + p * 2048 + 1024, 64);
      _tile_loadd(6, one + p * 1024, 64);
      _tile_dpbssd(0, 6, 4);
      _tile_dpbsud(1, 6, 5);
      if (Panels > 1) {
        _tile_loadd(7, two + p * 1024, 64);
        _tile_dpbssd(2, 7, 4);
        _tile_dpbsud(3, 7, 5);
      }
    }
    CPU_STORE(0, found);
    CPU_STORE(1, found + 256);
    if (Panels > 1) CPU_STORE(2, found + 512);
    if (Panels > 1) CPU_STORE(3, found + 768);
    CPU_FENCE();
    for (int i = 0; i < Panels; ++i)
      join_planes(*m[i], panels[i], found + i * 512, found + i * 512 + 256, powers, sums[i] + t * 256);
  }
}

static void products(const Matrix* const* matrices, const int64_t* panels, int count, const Input& in, int64_t tiles,
                     int64_t, float* const* sums, uint8_t* scratch) {
  // more than two tiles read weights twice, the second time from the cache: cheaper than inputs twice as often, but not than
  // making them again
  const int64_t most = matrices[0]->kind == Kind::bf16 ? 4 : 2;
  const bool alike = count == 2 && matrices[0]->kind == matrices[1]->kind, together = alike && tiles <= most;
  if (alike && matrices[0]->kind == Kind::i8)
    return by_planes<2>(matrices, panels, tiles, sums, scratch + made_bytes(matrices[0]->blocks));
  for (int i = 0; i < (together ? 1 : count); ++i)
    by_kind(matrices[i]->kind, [&](auto of) __attribute__((always_inline)) {
      constexpr Kind kind = decltype(of)::value;
      if (kind == Kind::i8)
        return;
      else if (!together)
        panel_products<kind>(*matrices[i], panels[i], in, tiles, sums[i], scratch);
      else
        for (int64_t t = 0; t < tiles; t += 2)
          if (tiles - t == 1)
            two_panels<kind, 1>(matrices, panels, in, t, tiles > 2, sums, scratch);
          else
            two_panels<kind, 2>(matrices, panels, in, t, tiles > 2, sums, scratch);
    });
  for (int i = 0; i < count; ++i)
    if (matrices[i]->kind == Kind::i8)
      by_planes<1>(matrices + i, panels + i, tiles, sums + i, scratch + made_bytes(matrices[i]->blocks));
    else
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
  flush_denormals();
}
static void end() {
  _tile_release();
  restore_denormals();
}
#endif

#if !CPU_AMX
static void begin() { flush_denormals(); }
static void end() { restore_denormals(); }
#endif

// ---- what stands between the products

#if CPU_PAIRS
// As bfloat16, each of `even` in the low half of a word, with that of `odd` in the high half.
CPU_INLINE __m512i pairs_of(vf even, vf odd) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), halves);
}
#endif

#if CPU_PAIRS
// 2 to the power t, to four millionths, which is more than bfloat16 keeps.
CPU_INLINE __m512 power_of_two(__m512 t) {
  const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(0.0135341674f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0520114616f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.241442756f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693003835f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.00000259f));
  return _mm512_scalef_ps(p, t);
}
#endif

// Channels 2 i and 2 i + 1 of a tile.
CPU_INLINE void put_pair(const Input& out, int64_t tile, int64_t channel, int v, vf even, vf odd) {
#if CPU_PAIRS
  (void)v;
  _mm512_storeu_si512(out.pairs(tile) + channel / 2 * kRows, pairs_of(even, odd));
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

#if CPU_PAIRS
CPU_INLINE vf gated(vf gate, vf up) {
  const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
  // a denominator of infinity would make NaN below
  const __m512 t = _mm512_min_ps(_mm512_set1_ps(126.0f), _mm512_mul_ps((__m512)gate, _mm512_set1_ps(-1.44269504f)));
  const __m512 below = _mm512_add_ps(one, power_of_two(t)), near = _mm512_rcp14_ps(below);
  return gate * (vf)_mm512_mul_ps(near, _mm512_fnmadd_ps(below, near, two)) * up;
}
#else
CPU_INLINE vf gated(vf gate, vf up) { return gate / (1.0f + exponential(-gate)) * up; }
#endif

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

CPU_INLINE bool any(vi holds) {
#if CPU_LANES == 16
  return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds) != 0;
#elif CPU_LANES == 8
  return _mm256_movemask_epi8((__m256i)holds) != 0;
#else
  return (holds[0] | holds[1] | holds[2] | holds[3]) != 0;
#endif
}

// Puts `output` into each lane's list, [count][16], at its value's place; -inf has none.
CPU_INLINE void insert(vf value, int32_t output, int64_t count, float* most, int32_t* at) {
  vi moved = {}, from = vi{} + output;
  for (int64_t i = 0; i < count; ++i) {
    const vf held = load(most + i * kRows);
    vi held_at;
    __builtin_memcpy(&held_at, at + i * kRows, sizeof held_at);
    moved |= value > held;  // behind the place all move on, equals too
    store(most + i * kRows, moved ? value : held);
    const vi kept = moved ? from : held_at;
    __builtin_memcpy(at + i * kRows, &kept, sizeof kept);
    value = moved ? held : value;
    from = moved ? held_at : from;
  }
}

static void best(const float* sums, int32_t first, int32_t outputs, int64_t count, float* most, int32_t* at) {
  const vf infinity = set(__builtin_inff());
  for (int v = 0; v < V; ++v) {
    const float* last = most + (count - 1) * kRows + v * W;
    const vf least = load(last);
    vi some = {};
    for (int32_t o = 0; o < outputs; ++o) {
      const vf value = load(sums + o * kRows + v * W);
      some |= (value > least) & (value < infinity);
    }
    if (!any(some)) continue;  // as for nearly all panels
    for (int32_t o = 0; o < outputs; ++o) {
      const vf value = load(sums + o * kRows + v * W);
      const vi better = (value > load(last)) & (value < infinity);
      if (any(better)) insert(better ? value : -infinity, first + o, count, most + v * W, at + v * W);
    }
  }
}

// ---- attention

// Where bit i of `lanes` is set, for the W lanes of vector v.
CPU_INLINE vi chosen_lanes(uint32_t lanes, int v) {
  vi bit = {};
  for (int i = 0; i < W; ++i) bit[i] = 1 << i;
  return ((vi{} + static_cast<int32_t>(lanes >> v * W)) & bit) != 0;
}

#if CPU_LANES == 16
// r[i] lane j to r[j] lane i.
CPU_INLINE void transpose(__m512i* r) {
  __m512i t[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, c), t[i + 1] = _mm512_unpackhi_epi64(a, c);
    t[i + 2] = _mm512_unpacklo_epi64(b, d), t[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xDD);
    const __m512i c = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xDD);
    r[i] = _mm512_shuffle_i32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
    r[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
  }
}

// Lane i of a group is channel d of row rows[i] of one of its heads: source(head) is that head's vector of 16 rows.
class Lanes {
 public:
  CPU_MEMBER explicit Lanes(const AttendTask& task) : per_row_(task.per_row), first_(task.first), count_(task.count) {
    alignas(64) int32_t rows[kRows], heads[kRows];
    for (int i = 0; i < kRows; ++i) {
      rows[i] = static_cast<int32_t>((first_ + i) / per_row_) & 15;
      heads[i] = i < count_ ? static_cast<int32_t>((first_ + i) % per_row_) : -1;
    }
    rows_ = _mm512_load_si512(rows);
    heads_ = _mm512_load_si512(heads);
  }
  CPU_MEMBER __m512 gather(const float* queries, int64_t size, int64_t channel) const {
    __m512 found = _mm512_setzero_ps();
    for (int64_t h = 0; h < per_row_; ++h)
      found = _mm512_mask_permutexvar_ps(found, of(h), rows_, _mm512_loadu_ps(queries + (h * size + channel) * kRows));
    return found;
  }
  // The group's words to the rows of its heads: `stride` words from head to head.
  CPU_MEMBER void scatter(__m512i words, void* to, int64_t stride) const {
    const __m512i counting = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i base = _mm512_sub_epi32(_mm512_mullo_epi32(counting, _mm512_set1_epi32(static_cast<int>(per_row_))),
                                          _mm512_set1_epi32(static_cast<int>(first_)));
    for (int64_t h = 0; h < per_row_; ++h) {
      const __m512i lane = _mm512_add_epi32(base, _mm512_set1_epi32(static_cast<int>(h)));
      const __mmask16 mine = _mm512_cmplt_epu32_mask(lane, _mm512_set1_epi32(static_cast<int>(count_)));
      _mm512_mask_storeu_epi32(static_cast<uint32_t*>(to) + h * stride, mine, _mm512_permutexvar_epi32(lane, words));
    }
  }

 private:
  CPU_MEMBER __mmask16 of(int64_t head) const {
    return _mm512_cmpeq_epi32_mask(heads_, _mm512_set1_epi32(static_cast<int>(head)));
  }
  const int64_t per_row_, first_, count_;
  __m512i rows_, heads_;
};
#endif

// query: [size][16]
CPU_INLINE void gather(const AttendTask& task, float* query) {
#if CPU_LANES == 16
  const Lanes lanes(task);
  for (int64_t d = 0; d < task.size; ++d)
    _mm512_storeu_ps(query + d * kRows, _mm512_mul_ps(lanes.gather(task.queries, task.size, d), _mm512_set1_ps(task.scale)));
#else
  __builtin_memset(query, 0, static_cast<size_t>(task.size * kRows) * sizeof(float));
  for (int64_t lane = 0; lane < task.count; ++lane) {
    const int64_t of = task.first + lane;
    const float* from = task.queries + of % task.per_row * task.size * kRows + of / task.per_row;
    for (int64_t d = 0; d < task.size; ++d) query[d * kRows + lane] = from[d * kRows] * task.scale;
  }
#endif
}

// sums [size][16] times `share`, to where the product behind attention reads them.
CPU_INLINE void scatter(const AttendTask& task, float* sums, const float* share) {
#if CPU_LANES == 16
  const Lanes lanes(task);
  const __m512 times = _mm512_loadu_ps(share);
  for (int64_t d = 0; d < task.size; d += 2) {
    const __m512 even = _mm512_mul_ps(_mm512_loadu_ps(sums + d * kRows), times);
    const __m512 odd = _mm512_mul_ps(_mm512_loadu_ps(sums + (d + 1) * kRows), times);
#if CPU_PAIRS
    lanes.scatter(pairs_of((vf)even, (vf)odd), task.out->pairs(task.tile) + (task.channel + d) / 2 * kRows,
                  task.size / 2 * kRows);
#else
    float* to = task.out->floats(task.tile) + (task.channel + d) * kRows;
    lanes.scatter((__m512i)even, to, task.size * kRows);
    lanes.scatter((__m512i)odd, to + kRows, task.size * kRows);
#endif
  }
#else
  for (int64_t lane = 0; lane < task.count; ++lane) {
    const int64_t of = task.first + lane;
    float* to = task.out->floats(task.tile) + (task.channel + of % task.per_row * task.size) * kRows + of / task.per_row;
    for (int64_t d = 0; d < task.size; ++d) to[d * kRows] = sums[d * kRows + lane] * share[lane];
  }
#endif
}

// One over the sum of a lane's weights; where nothing is visible all are 0.
CPU_INLINE vf share_of(vf sum) { return sum > 0.0f ? 1.0f / sum : (sum == sum ? vf{} : sum); }

CPU_INLINE void expand_slot(const AttendTask& task, const void* from, int64_t slot, float* to) {
  const int64_t size = task.size;
  if (!task.half) {
    __builtin_memcpy(to, static_cast<const float*>(from) + slot * size, static_cast<size_t>(size) * sizeof(float));
    return;
  }
  const uint16_t* at = static_cast<const uint16_t*>(from) + slot * size;
  int64_t i = 0;
  for (; i + W <= size; i += W) store(to + i, load_half(at + i));
  for (; i < size; ++i) {
    const uint32_t bits = static_cast<uint32_t>(at[i]) << 16;
    __builtin_memcpy(to + i, &bits, 4);
  }
}

constexpr int kSlots = 16;    // expanded at a time
constexpr int kChannels = 8;  // of the output, summed side by side

// The slots of a group in order: those that all lanes see, then its steps. `expanded`: [kSlots][size].
class Slots {
 public:
  CPU_MEMBER Slots(const AttendTask& task, const void* from, float* expanded) : task_(task), from_(from), to_(expanded) {}
  CPU_MEMBER int64_t count() const { return task_.prefix + task_.steps; }
  CPU_MEMBER int64_t at(int64_t i) const { return i < task_.prefix ? i : task_.step[i - task_.prefix].slot; }
  // [count][size] of those from `first` on
  CPU_MEMBER const float* floats(int64_t first, int64_t count) const {
    if (!task_.half && first + count <= task_.prefix) return static_cast<const float*>(from_) + first * task_.size;
    for (int64_t i = 0; i < count; ++i) expand_slot(task_, from_, at(first + i), to_ + i * task_.size);
    return to_;
  }

 private:
  const AttendTask& task_;
  const void* const from_;
  float* const to_;
};

// scores[slot][16] of `Count` slots; each is one sum over the channels, in their order.
template <int Count>
CPU_INLINE void score(const float* keys, const float* query, int64_t size, int live, float* scores) {
  for (int v = 0; v < live; ++v) {
    vf sums[Count] = {};
    for (int64_t d = 0; d < size; ++d) {
      const vf q = load(query + d * kRows + v * W);
      for (int s = 0; s < Count; ++s) sums[s] = q * keys[s * size + d] + sums[s];
    }
    for (int s = 0; s < Count; ++s) store(scores + s * kRows + v * W, sums[s]);
  }
}

// out[d][16] += weights[slot][16] * values[slot][d], slot after slot; where a lane does not see a step it is left out, not
// added as zero. step: null, or one for each slot.
template <int Channels>
CPU_INLINE void add_values(const float* values, const float* weights, const Step* step, int64_t count, int64_t size,
                           int live, float* out) {
  for (int v = 0; v < live; ++v) {
    vf sums[Channels];
    for (int i = 0; i < Channels; ++i) sums[i] = load(out + i * kRows + v * W);
    for (int64_t s = 0; s < count; ++s) {
      const vf weight = load(weights + s * kRows + v * W);
      if (step) {
        const vi seen = chosen_lanes(step[s].lanes, v);
        for (int i = 0; i < Channels; ++i) sums[i] = seen ? fused(weight, set(values[s * size + i]), sums[i]) : sums[i];
      } else {
        for (int i = 0; i < Channels; ++i) sums[i] = fused(weight, set(values[s * size + i]), sums[i]);
      }
    }
    for (int i = 0; i < Channels; ++i) store(out + i * kRows + v * W, sums[i]);
  }
}


// Sums over slots in their order, in float.
static void attend_in_order(const AttendTask& task) {
  const int64_t size = task.size, prefix = task.prefix, all = prefix + task.steps;
  float *query = task.scratch, *sums = query + size * kRows, *expanded = sums + size * kRows;
  float* scores = expanded + kSlots * size;
  const int live = vectors_of(task.count);
  gather(task, query);
  const Slots keys(task, task.keys, expanded), values(task, task.values, expanded);
  for (int64_t slot = 0; slot < all; slot += kSlots) {
    const int64_t count = least(kSlots, all - slot);
    const float* from = keys.floats(slot, count);
    int64_t s = 0;
    for (; s + 8 <= count; s += 8) score<8>(from + s * size, query, size, live, scores + (slot + s) * kRows);
    for (; s < count; ++s) score<1>(from + s * size, query, size, live, scores + (slot + s) * kRows);
  }
  alignas(64) float share[kRows] = {};
  for (int v = 0; v < live; ++v) {
    float* at = scores + v * W;
    vf peak = set(-3.0e38f), sum = {};
    for (int64_t s = 0; s < prefix; ++s) peak = greater(peak, load(at + s * kRows));
    for (int64_t s = prefix; s < all; ++s)
      peak = chosen_lanes(task.step[s - prefix].lanes, v) ? greater(peak, load(at + s * kRows)) : peak;
    for (int64_t s = 0; s < all; ++s) {
      vf weight = exponential(load(at + s * kRows) - peak);
      if (s >= prefix) weight = chosen_lanes(task.step[s - prefix].lanes, v) ? weight : vf{};
      store(at + s * kRows, weight);
      sum = sum + weight;
    }
    store(share + v * W, share_of(sum));
  }
  __builtin_memset(sums, 0, static_cast<size_t>(size * kRows) * sizeof(float));
  for (int64_t slot = 0; slot < all;) {
    const Step* step = slot < prefix ? nullptr : task.step + (slot - prefix);
    const int64_t count = least(kSlots, (step ? all : prefix) - slot);
    const float *from = values.floats(slot, count), *weights = scores + slot * kRows;
    int64_t d = 0;
    for (; d + kChannels <= size; d += kChannels)
      add_values<kChannels>(from + d, weights, step, count, size, live, sums + d * kRows);
    for (; d < size; ++d) add_values<1>(from + d, weights, step, count, size, live, sums + d * kRows);
    slot += count;
  }
  scatter(task, sums, share);
}

#if CPU_AMX
// Scores and values by tiles, over a bfloat16 cache.
//
// A tile that multiplies 32 slots sums those at even places, then those at odd places, each one after the other from zero, and
// adds both to what it had. So a query's sum is made of chunks of 32 places on its own path, whatever the slots are: what all
// lanes see in whole chunks goes through tiles, and what a tile does is done lane by lane for the rest, with a sum for the
// even and one for the odd places. Tiles take denormals for zero, so threads do too (see begin).

CPU_INLINE __m512 even_of(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }
CPU_INLINE __m512 odd_of(__m512i pairs) { return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)); }

// scores of `Blocks` times 16 keys, each [16][size] halves. query: [size / 32][2][16 pairs][16], what bfloat16 keeps of it
// and what it keeps of the rest
template <int Blocks>
CPU_INLINE void score_tiles(const uint16_t* const* keys, const uint32_t* query, int64_t size, float* scores) {
  _tile_zero(0);
  if (Blocks > 1) _tile_zero(1);
  if (Blocks > 2) _tile_zero(2);
  if (Blocks > 3) _tile_zero(3);
  for (int64_t d = 0; d < size; d += kDepth, query += 512) {
    _tile_loadd(4, query, 64);
    _tile_loadd(5, query + 256, 64);
    _tile_loadd(6, keys[0] + d, size * 2);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(0, 6, 5);
    if (Blocks > 1) {
      _tile_loadd(7, keys[1] + d, size * 2);
      _tile_dpbf16ps(1, 7, 4);
      _tile_dpbf16ps(1, 7, 5);
    }
    if (Blocks > 2) {
      _tile_loadd(6, keys[2] + d, size * 2);
      _tile_dpbf16ps(2, 6, 4);
      _tile_dpbf16ps(2, 6, 5);
    }
    if (Blocks > 3) {
      _tile_loadd(7, keys[3] + d, size * 2);
      _tile_dpbf16ps(3, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
  CPU_STORE(0, scores);
  if (Blocks > 1) CPU_STORE(1, scores + 256);
  if (Blocks > 2) CPU_STORE(2, scores + 512);
  if (Blocks > 3) CPU_STORE(3, scores + 768);
}

// Values of slots [first, first + 32), those from `end` on as zero, to [size / 16][16 channels][32 slots].
static void turn(const uint16_t* values, int64_t size, int64_t first, int64_t end, uint16_t* to) {
  for (int64_t d = 0; d < size; d += 32) {
    __m512i low[16], high[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const int64_t slot = first + 2 * i;
      const __m512i zero = _mm512_setzero_si512();
      const __m512i a = slot < end ? _mm512_loadu_si512(values + slot * size + d) : zero;
      const __m512i b = slot + 1 < end ? _mm512_loadu_si512(values + (slot + 1) * size + d) : zero;
      low[i] = _mm512_unpacklo_epi16(a, b);    // channels 0 to 3, 8 to 11, 16 to 19, 24 to 27
      high[i] = _mm512_unpackhi_epi16(a, b);
    }
    transpose(low);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (d + i / 4 * 8 + i % 4) * 32, low[i]);
    transpose(high);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (d + i / 4 * 8 + 4 + i % 4) * 32, high[i]);
  }
}

// sums of `Tiles` times 16 channels over `count` chunks, `stride` halves apart; weights: [count][16 pairs of slots][16]
template <int Tiles, typename Make>
CPU_INLINE void value_tiles(const uint16_t* chunks, int64_t stride, int64_t count, const uint32_t* weights, float* sums,
                            const Make& make) {
  _tile_zero(0);
  if (Tiles > 1) _tile_zero(1);
  if (Tiles > 2) _tile_zero(2);
  if (Tiles > 3) _tile_zero(3);
  for (int64_t c = 0; c < count; ++c) {
    make(c + 1);
    CPU_FENCE();
    const uint16_t* at = chunks + c * stride;
    _tile_loadd(4, weights + c * 256, 64);
    _tile_loadd(5, at, 64);
    _tile_dpbf16ps(0, 5, 4);
    if (Tiles > 1) {
      _tile_loadd(6, at + 512, 64);
      _tile_dpbf16ps(1, 6, 4);
    }
    if (Tiles > 2) {
      _tile_loadd(7, at + 1024, 64);
      _tile_dpbf16ps(2, 7, 4);
    }
    if (Tiles > 3) {
      _tile_loadd(5, at + 1536, 64);
      _tile_dpbf16ps(3, 5, 4);
    }
  }
  CPU_STORE(0, sums);
  if (Tiles > 1) CPU_STORE(1, sums + 256);
  if (Tiles > 2) CPU_STORE(2, sums + 512);
  if (Tiles > 3) CPU_STORE(3, sums + 768);
  CPU_FENCE();
}

// What tiles would add for the places behind theirs: slots [tiled, prefix), then the steps, their values in `expanded`.
static void add_rest(const AttendTask& task, int64_t tiled, const float* scores, const float* expanded, float* sums) {
  for (int64_t d = 0; d < task.size; d += kChannels) {
    __m512 out[kChannels], even[kChannels], odd[kChannels];
#pragma GCC unroll 8
    for (int i = 0; i < kChannels; ++i) {
      out[i] = _mm512_loadu_ps(sums + (d + i) * kRows);
      even[i] = odd[i] = _mm512_setzero_ps();
    }
    const float* values = expanded + d;
    int64_t slot = tiled;
    for (; slot + 2 <= task.prefix; slot += 2, values += 2 * task.size) {
      const __m512 first = _mm512_loadu_ps(scores + slot * kRows), second = _mm512_loadu_ps(scores + (slot + 1) * kRows);
#pragma GCC unroll 8
      for (int i = 0; i < kChannels; ++i) {
        even[i] = _mm512_fmadd_ps(first, _mm512_set1_ps(values[i]), even[i]);
        odd[i] = _mm512_fmadd_ps(second, _mm512_set1_ps(values[task.size + i]), odd[i]);
      }
    }
    if (slot < task.prefix) {
      const __m512 weight = _mm512_loadu_ps(scores + slot * kRows);
#pragma GCC unroll 8
      for (int i = 0; i < kChannels; ++i) even[i] = _mm512_fmadd_ps(weight, _mm512_set1_ps(values[i]), even[i]);
      values += task.size;
    }
    for (int64_t s = 0; s < task.steps; ++s, values += task.size) {
      const Step& step = task.step[s];
      const __m512 weight = _mm512_loadu_ps(scores + step.slot * kRows);
      const __mmask16 at_odd = step.odd, at_even = static_cast<__mmask16>(step.lanes ^ step.odd), last = step.last;
      if (at_even)
#pragma GCC unroll 8
        for (int i = 0; i < kChannels; ++i)
          even[i] = _mm512_mask3_fmadd_ps(weight, _mm512_set1_ps(values[i]), even[i], at_even);
      if (at_odd)
#pragma GCC unroll 8
        for (int i = 0; i < kChannels; ++i)
          odd[i] = _mm512_mask3_fmadd_ps(weight, _mm512_set1_ps(values[i]), odd[i], at_odd);
      if (last)
#pragma GCC unroll 8
        for (int i = 0; i < kChannels; ++i) {
          out[i] = _mm512_mask_add_ps(out[i], last, out[i], _mm512_add_ps(even[i], odd[i]));
          even[i] = _mm512_mask_mov_ps(even[i], last, _mm512_setzero_ps());
          odd[i] = _mm512_mask_mov_ps(odd[i], last, _mm512_setzero_ps());
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kChannels; ++i)
      _mm512_storeu_ps(sums + (d + i) * kRows, _mm512_add_ps(out[i], _mm512_add_ps(even[i], odd[i])));
  }
}

static void attend_by_tiles(const AttendTask& task) {
  const int64_t size = task.size, prefix = task.prefix, slots = task.slots;
  // where all lanes see all slots the last chunk is one of tiles too, filled up with zeros
  const int64_t tiled = task.steps ? prefix / kChunk * kChunk : slots, chunks = (tiled + kChunk - 1) / kChunk;
  uint32_t* query = reinterpret_cast<uint32_t*>(task.scratch);
  uint32_t* pairs = query + size * kRows;
  float* sums = reinterpret_cast<float*>(pairs + (slots / kChunk + 1) * 256);
  float* scores = sums + size * kRows;
  float* expanded = scores + (slots / kRows + 1) * 256;
  const auto* keys = static_cast<const uint16_t*>(task.keys);
  const auto* values = static_cast<const uint16_t*>(task.values);

  const Lanes lanes(task);
  for (int64_t d = 0; d < size; d += 2) {
    const __m512 even = lanes.gather(task.queries, size, d), odd = lanes.gather(task.queries, size, d + 1);
    const __m512i kept = pairs_of((vf)even, (vf)odd);
    uint32_t* to = query + d / kDepth * 512 + d % kDepth / 2 * kRows;
    _mm512_storeu_si512(to, kept);
    const __m512 even_rest = _mm512_sub_ps(even, even_of(kept)), odd_rest = _mm512_sub_ps(odd, odd_of(kept));
    _mm512_storeu_si512(to + 256, pairs_of((vf)even_rest, (vf)odd_rest));
  }
  // between the queries' stores and their tiles' loads, which would wait for them
  const int64_t whole = slots / kRows * kRows, rest = prefix + task.steps - tiled;
  for (int64_t i = 0; i < rest; ++i)
    expand_slot(task, values, tiled + i < prefix ? tiled + i : task.step[tiled + i - prefix].slot, expanded + i * size);
  auto* last_keys = reinterpret_cast<uint16_t*>(expanded + rest * size);
  __builtin_memcpy(last_keys, keys + whole * size, static_cast<size_t>((slots - whole) * size) * sizeof(uint16_t));
  CPU_FENCE();
  for (int64_t slot = 0; slot < slots; slot += 4 * kRows) {
    const uint16_t* at[4];
    for (int64_t i = 0; i < 4; ++i) at[i] = slot + i * kRows < whole ? keys + (slot + i * kRows) * size : last_keys;
    float* to = scores + slot * kRows;
    switch (least(4, (slots - slot + kRows - 1) / kRows)) {
      case 1: score_tiles<1>(at, query, size, to); break;
      case 2: score_tiles<2>(at, query, size, to); break;
      case 3: score_tiles<3>(at, query, size, to); break;
      default: score_tiles<4>(at, query, size, to);
    }
  }
  CPU_FENCE();

  const auto at = [&](int64_t slot) __attribute__((always_inline)) { return _mm512_loadu_ps(scores + slot * kRows); };
  __m512 peaks[4];
  for (__m512& peak : peaks) peak = _mm512_set1_ps(-3.0e38f);
  int64_t s = 0;
  for (; s + 4 <= prefix; s += 4)
    for (int i = 0; i < 4; ++i) peaks[i] = _mm512_max_ps(peaks[i], at(s + i));
  for (; s < prefix; ++s) peaks[0] = _mm512_max_ps(peaks[0], at(s));
  for (int64_t i = 0; i < task.steps; ++i)
    peaks[0] = _mm512_mask_max_ps(peaks[0], task.step[i].lanes, peaks[0], at(task.step[i].slot));
  const __m512 scale = _mm512_set1_ps(task.scale * 1.44269504f);
  const __m512 peak = _mm512_max_ps(_mm512_max_ps(peaks[0], peaks[1]), _mm512_max_ps(peaks[2], peaks[3]));
  const __m512 shift = _mm512_mul_ps(peak, scale), zero = _mm512_setzero_ps();
  __m512 sum = zero;
  const auto weight_at = [&](int64_t slot) __attribute__((always_inline)) {
    return power_of_two(_mm512_fmsub_ps(at(slot), scale, shift));
  };
  const auto put = [&](int64_t slot, __m512 first, __m512 second) __attribute__((always_inline)) {
    const __m512i pair = pairs_of((vf)first, (vf)second);
    _mm512_storeu_si512(pairs + slot / 2 * kRows, pair);
    sum = _mm512_add_ps(_mm512_add_ps(sum, even_of(pair)), odd_of(pair));
  };
#pragma GCC unroll 2
  for (s = 0; s + 2 <= tiled; s += 2) put(s, weight_at(s), weight_at(s + 1));
  if (s < tiled) put(s, weight_at(s), zero), s += 2;
  for (; s < chunks * kChunk; s += 2) _mm512_storeu_si512(pairs + s / 2 * kRows, _mm512_setzero_si512());
  for (s = tiled; s < prefix + task.steps; ++s) {
    const int64_t slot = s < prefix ? s : task.step[s - prefix].slot;
    const __mmask16 seen = s < prefix ? 0xFFFF : task.step[s - prefix].lanes;
    const __m512 weight = even_of(pairs_of((vf)_mm512_maskz_mov_ps(seen, weight_at(slot)), (vf)zero));
    _mm512_storeu_ps(scores + slot * kRows, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  alignas(64) float share[kRows];
  store(share, share_of((vf)sum));

  // chunk c of the values, [size / 16][16 channels][32 slots], is at task.chunks + c * kChunk * size
  const auto make = [&](int64_t c) {
    if (c < *task.turned || c >= chunks) return;
    turn(values, size, c * kChunk, slots, task.chunks + c * kChunk * size);
    if ((c + 1) * kChunk <= slots) *task.turned = c + 1;
  };
  make(0);
  for (int64_t d = 0; d < size; d += 64) {
    const uint16_t* from = task.chunks + d * kChunk;
    float* to = sums + d * kRows;
    if (size - d == 32)
      value_tiles<2>(from, kChunk * size, chunks, pairs, to, make);
    else
      value_tiles<4>(from, kChunk * size, chunks, pairs, to, make);
  }
  if (tiled < prefix + task.steps) add_rest(task, tiled, scores, expanded, sums);
  scatter(task, sums, share);
}
#endif

static void attend(const AttendTask& task) {
#if CPU_AMX
  if (task.half && task.size % kDepth == 0) return attend_by_tiles(task);
#endif
  attend_in_order(task);
}

static void write(const float* states, int64_t size, int64_t rows, void* to, int64_t stride, bool half) {
  int64_t done = 0;
#if CPU_LANES == 16
  for (; done + 16 <= size; done += 16) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(states + (done + i) * kRows);
    transpose(r);
    alignas(64) float row[16][16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_store_si512(row[i], r[i]);
    for (int64_t lane = 0; lane < rows; ++lane)
      if (half) {
        const vf value = load(row[lane]);
        const vu kept = (vu)(value == value ? (vf)rounded(value) : (vf)(as_bits(value) | 0x400000u));
        const vh halves = __builtin_convertvector(kept >> 16, vh);
        __builtin_memcpy(static_cast<uint16_t*>(to) + lane * stride + done, &halves, sizeof halves);
      } else {
        store(static_cast<float*>(to) + lane * stride + done, load(row[lane]));
      }
  }
#endif
  for (int64_t lane = 0; lane < rows; ++lane)
    for (int64_t d = done; d < size; ++d)
      if (half)
        static_cast<uint16_t*>(to)[lane * stride + d] = half_of(states[d * kRows + lane]);
      else
        static_cast<float*>(to)[lane * stride + d] = states[d * kRows + lane];
}

static void add(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += W) store(to + i, load(to + i) + load(from + i));
}

static Kernels table(const char* name) {
  return {name, CPU_PAIRS != 0, begin, end, prepare, products, weights, norm, copy, gate, rotate, attend, best, write, add};
}
