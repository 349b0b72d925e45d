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
  const uint8_t *one = panel_of(*m[0], panels[0]), *two = Panels > 1 ? panel_of(*m[1], panels[1]) : one;
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
