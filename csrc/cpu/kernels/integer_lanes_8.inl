// What integer products do in vectors of 8 lanes.

constexpr int kTogether = 8;  // rows

CPU_INLINE vi nearest(vf value) { return (vi)_mm256_cvtps_epi32((__m256)value); }

// Keeps sums in the order they are written in: GCC makes trees of them, whose leaves then do not fit the registers.
template <typename T>
CPU_INLINE void in_order(T& sum) {
  __asm__("" : "+x"(sum));
}

// A table's bytes for those of `places`, which are below 16.
CPU_INLINE vu looked_up(const int8_t* table, vu places) {
  return (vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), (__m256i)places);
}

// Add the 16 lanes of each of 16 sums: quads, then pairs of these.
CPU_INLINE void add_up_16(const float* lanes, float* sums) {
  // two quads of each of four sums: the first of all four, then the second
  const auto quads = [](const float* from) __attribute__((always_inline)) {
    const __m256 ab = _mm256_hadd_ps(_mm256_load_ps(from), _mm256_load_ps(from + 16));
    const __m256 cd = _mm256_hadd_ps(_mm256_load_ps(from + 32), _mm256_load_ps(from + 48));
    const __m256 both = _mm256_hadd_ps(ab, cd);
    return _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  };
  for (int i = 0; i < kOutputs; i += 4, lanes += 64)
    _mm_storeu_ps(sums + i, _mm_add_ps(quads(lanes), quads(lanes + 8)));
}

#include "cpu/kernels/integer_singly.inl"
