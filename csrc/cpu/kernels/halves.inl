// Weights of a block as bfloat16, in AVX512: from the form that a format says it has, else from its floats.

// Single floats of the array are then broadcast by loads; compilers that know the vector it came from would rather
// permute that, on the one port that is busy anyway.
#define CPU_IN_MEMORY(array) __asm__("" : "+m"(array))

template <typename F, typename Put>
CPU_INLINE void halves(Singly, F, const Block& block, const Put& put) {
  for (int o = 0; o < kOutputs; ++o) {
    alignas(64) float values[kDepth];
    F::weights(block, o, values);
    put(o, (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(values + 16), _mm512_load_ps(values)));
  }
}

template <typename Put>
CPU_INLINE void halves(Singly, formats::bf16, const Block& block, const Put& put) {
#pragma GCC unroll 16
  for (int o = 0; o < kOutputs; ++o) put(o, _mm512_loadu_si512(block.at + o * 64));
}

template <typename F, typename Put>
CPU_INLINE void halves(Nibbles, F, const Block& block, const Put& put) {
  const __m512 counts = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // 16 values per output and block are a table; a register holds those of two outputs, the second behind the first
  alignas(64) float factors[kOutputs], terms[kOutputs];
  F::lines(block, factors, terms);
  CPU_IN_MEMORY(factors);
  CPU_IN_MEMORY(terms);
  const __m512i nibble = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; o += 2) {
    const __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(block.at + o / 4 * 64), o % 4 * 4);
    const __m512 a = _mm512_fmadd_ps(counts, _mm512_set1_ps(factors[o]), _mm512_set1_ps(terms[o]));
    const __m512 b = _mm512_fmadd_ps(counts, _mm512_set1_ps(factors[o + 1]), _mm512_set1_ps(terms[o + 1]));
    const __m512i tables = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    const __m512i of_a = _mm512_and_si512(words, nibble);
    const __m512i of_b = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 4), nibble, second, 0xEA);  // (x & y) | z
    put(o, _mm512_permutexvar_epi16(of_a, tables));
    put(o + 1, _mm512_permutexvar_epi16(of_b, tables));
  }
}

template <typename F, typename Put>
CPU_INLINE void halves(Bytes, F, const Block& block, const Put& put) {
  alignas(64) float factors[kOutputs];
  if constexpr (F::kScaled) F::factors(block, factors);
  CPU_IN_MEMORY(factors);
#pragma GCC unroll 16
  for (int o = 0; o < kOutputs; ++o) {
    const auto* values = (const __m128i*)(block.at + o * F::kStride);
    __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(values)));
    __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(values + 1)));
    if (F::kScaled) {
      const __m512 d = _mm512_set1_ps(factors[o]);
      first = _mm512_mul_ps(first, d), second = _mm512_mul_ps(second, d);
    }
    put(o, (__m512i)_mm512_cvtne2ps_pbh(second, first));
  }
}

#include "cpu/kernels/halves_q6_k.inl"

// Calls put(output, its 32 weights of a block as bfloat16) for each output.
template <typename F, typename Put>
CPU_INLINE void half_block(const Block& block, const Put& put) {
  halves(typename F::Form{}, F{}, block, put);
}
