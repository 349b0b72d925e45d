// Vectors of 16 floats: AVX512.

constexpr int W = 16, kRegisters = 32;

#include "cpu/kernels/vectors.inl"

// a * b + c, rounded once where the set can. Written out, as clang moves a selection of the sum in between the two, which are
// then rounded one by one.
CPU_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

// Values of fewer bits as one vector of words. Written out, as GCC makes steps of several instructions of a conversion.
CPU_INLINE vu widened(const uint16_t* from) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)); }
CPU_INLINE vi widened(const uint8_t* from) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }

CPU_INLINE vf load_half(const uint16_t* from) { return as_floats(widened(from) << 16); }

CPU_INLINE float float_of_half_precision(uint16_t half) { return _cvtsh_ss(half); }

// Half floats and bytes without a sign as floats, W of them.
CPU_INLINE vf half_floats(const uint8_t* from) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
CPU_INLINE vf byte_floats(const uint8_t* from) {
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

CPU_INLINE bool any(vi holds) { return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds) != 0; }

// Return the sum of the lanes of each of kAtOnce vectors.
constexpr int kAtOnce = 16;
CPU_INLINE void add_up(const vf* lanes, float* sums) {
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
}

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

// rows[i] lane j to rows[j] lane i.
CPU_INLINE void turn(vu* rows) { transpose((__m512i*)rows); }

CPU_INLINE void turn_rows(const uint32_t* from, int64_t words, int64_t live, uint32_t* to) {
  if (live <= 4) return turn_rows_singly(from, words, live, to);
  for (int64_t k = 0; k < words; k += 16) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + (k + i) * kRows);
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (i < live) _mm512_storeu_si512(to + i * words + k, r[i]);
  }
}

// The first channels of states [size][16 rows], to where each row stands: how many it has written.
CPU_INLINE int64_t write_vectors(const float* states, int64_t size, int64_t rows, void* to, int64_t stride, bool half) {
  int64_t done = 0;
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
  return done;
}
