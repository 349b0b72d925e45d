// Q6_K's weights as bfloat16.

template <typename Put>
CPU_INLINE void halves(Singly, formats::q6_k, const Block& block, const Put& put) {
  alignas(64) float factors[2][kOutputs];  // of the first and of the last 16 inputs
  const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)block.head));
  const __m512i scales = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(block.at + 384)));
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
    __builtin_memcpy(&bytes, block.at + 256 + o * 8, 8);
    const __m512i low = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(block.at + o / 4 * 64), o % 4 * 4), nibble);
    const __m512i high = _mm512_srlv_epi16(_mm512_shuffle_epi8(_mm512_set1_epi64(bytes), quarters), shifts);
    const __m512i bits = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 4), two, low, 0xEA);  // (x & y) | z
    const __m512i q = _mm512_sub_epi16(bits, _mm512_set1_epi16(32));
    const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(q)));
    const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(q, 1)));
    put(o, (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(second, _mm512_set1_ps(factors[1][o])),
                                        _mm512_mul_ps(first, _mm512_set1_ps(factors[0][o]))));
  }
}
