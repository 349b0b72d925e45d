// Vectors of 8 floats: AVX2.

constexpr int W = 8, kRegisters = 16;

#include "cpu/kernels/vectors.inl"

// a * b + c, rounded once where the set can. Written out, as clang moves a selection of the sum in between the two, which are
// then rounded one by one.
CPU_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

// Values of fewer bits as one vector of words. Written out, as GCC makes steps of several instructions of a conversion.
CPU_INLINE vu widened(const uint16_t* from) { return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)); }
CPU_INLINE vi widened(const uint8_t* from) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }

CPU_INLINE vf load_half(const uint16_t* from) {
  const __m256i places = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                          -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
  return (vf)_mm256_shuffle_epi8(twice, places);  // one instruction where a FMA does not want the same unit
}

CPU_INLINE float float_of_half_precision(uint16_t half) { return _cvtsh_ss(half); }

// Half floats and bytes without a sign as floats, W of them.
CPU_INLINE vf half_floats(const uint8_t* from) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
CPU_INLINE vf byte_floats(const uint8_t* from) {
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}

CPU_INLINE bool any(vi holds) { return _mm256_movemask_epi8((__m256i)holds) != 0; }

// Return the sum of the lanes of each of kAtOnce vectors.
constexpr int kAtOnce = 4;
CPU_INLINE void add_up(const vf* lanes, float* sums) {
  const __m256 a = (__m256)lanes[0], b = (__m256)lanes[1], c = (__m256)lanes[2], d = (__m256)lanes[3];
  const __m256d ab = (__m256d)_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256d cd = (__m256d)_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 fours = _mm256_add_ps((__m256)_mm256_unpacklo_pd(ab, cd), (__m256)_mm256_unpackhi_pd(ab, cd));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
}

// rows[i] lane j to rows[j] lane i.
CPU_INLINE void turn(vu* rows) {
  __m256i fours[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const __m256i a = _mm256_unpacklo_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
    const __m256i b = _mm256_unpackhi_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
    const __m256i c = _mm256_unpacklo_epi32((__m256i)rows[i + 2], (__m256i)rows[i + 3]);
    const __m256i d = _mm256_unpackhi_epi32((__m256i)rows[i + 2], (__m256i)rows[i + 3]);
    fours[i] = _mm256_unpacklo_epi64(a, c), fours[i + 1] = _mm256_unpackhi_epi64(a, c);
    fours[i + 2] = _mm256_unpacklo_epi64(b, d), fours[i + 3] = _mm256_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = (vu)_mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
    rows[i + 4] = (vu)_mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
  }
}

#include "cpu/kernels/singly.inl"
