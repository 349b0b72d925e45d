// What integer products do in vectors of 16 lanes.

constexpr int kTogether = 16;  // rows

CPU_INLINE vi nearest(vf value) { return (vi)_mm512_cvtps_epi32((__m512)value); }

// Keeps sums in the order they are written in: GCC makes trees of them, whose leaves then do not fit the registers.
template <typename T>
CPU_INLINE void in_order(T& sum) {
  __asm__("" : "+v"(sum));
}

// A table's bytes for those of `places`, which are below 16.
CPU_INLINE vu looked_up(const int8_t* table, vu places) {
  return (vu)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)places);
}

// Records of a tile, from [16 words][16 rows] to one behind the other.
CPU_INLINE void turn_records(const uint32_t* from, int64_t live, uint32_t* to) {
  if (live == 1) {
    for (int k = 0; k < kRows; ++k) to[k] = from[k * kRows];
    return;
  }
  turn_rows(from, kRows, live, to);
}

// Sums of a panel, from [16 rows][16 outputs] to [16 outputs][16 rows].
CPU_INLINE void turn_sums(const float* from, int64_t live, float* to) {
  if (live <= 4) {
    __m512 r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) r[i] = i < live ? _mm512_load_ps(from + i * kOutputs) : _mm512_setzero_ps();
    const __m512d ab = (__m512d)_mm512_unpacklo_ps(r[0], r[1]), cd = (__m512d)_mm512_unpacklo_ps(r[2], r[3]);
    const __m512d ef = (__m512d)_mm512_unpackhi_ps(r[0], r[1]), gh = (__m512d)_mm512_unpackhi_ps(r[2], r[3]);
    // outputs j, 4 + j, 8 + j and 12 + j
    const __m512d turned[4] = {_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd), _mm512_unpacklo_pd(ef, gh),
                               _mm512_unpackhi_pd(ef, gh)};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      float* at = to + j * kRows;
      const __m512 four = (__m512)turned[j];
      _mm512_store_ps(at, _mm512_zextps128_ps512(_mm512_castps512_ps128(four)));
      _mm512_store_ps(at + 4 * kRows, _mm512_zextps128_ps512(_mm512_extractf32x4_ps(four, 1)));
      _mm512_store_ps(at + 8 * kRows, _mm512_zextps128_ps512(_mm512_extractf32x4_ps(four, 2)));
      _mm512_store_ps(at + 12 * kRows, _mm512_zextps128_ps512(_mm512_extractf32x4_ps(four, 3)));
    }
    return;
  }
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = i < live ? _mm512_load_si512(from + i * kOutputs) : _mm512_setzero_si512();
  transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * kRows, r[i]);
}

// Add the 16 lanes of each of 16 sums: quads, then pairs of these.
CPU_INLINE void add_up_16(const float* lanes, float* sums) {
  __m512 fours[4], pairs[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = _mm512_load_ps(lanes + 64 * i), b = _mm512_load_ps(lanes + 64 * i + 16);
    const __m512 c = _mm512_load_ps(lanes + 64 * i + 32), d = _mm512_load_ps(lanes + 64 * i + 48);
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_ps(c, d, 0x88), _mm512_shuffle_ps(c, d, 0xDD));
    fours[i] = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xDD));
  }
  for (int i = 0; i < 2; ++i)
    pairs[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xDD));
  _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_shuffle_f32x4(pairs[0], pairs[1], 0x88),
                                       _mm512_shuffle_f32x4(pairs[0], pairs[1], 0xDD)));
}
