// Products read rows as pairs of bfloat16: AVX512-BF16 and AMX.

constexpr bool kPairs = true;

// Round to bfloat16: each of `even` in the low half of a word, that of `odd` in the high half.
CPU_INLINE __m512i pairs_of(vf even, vf odd) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), halves);
}

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

// Channels 2 i and 2 i + 1 of a tile.
CPU_INLINE void put_pair(const Input& out, int64_t tile, int64_t channel, int v, vf even, vf odd) {
  (void)v;
  _mm512_storeu_si512(out.pairs(tile) + channel / 2 * kRows, pairs_of(even, odd));
}

// Two channels of attention's sums, by lanes of a group.
template <typename Lanes>
CPU_INLINE void scatter_pair(const Lanes& lanes, const AttendTask& task, int64_t d, vf even, vf odd) {
  uint32_t* to = task.out->pairs(task.tile) + (task.channel + d) / 2 * kRows;
  lanes.scatter((vu)pairs_of(even, odd), to, task.size / 2 * kRows);
}

// gate * sigmoid(of) * up
CPU_INLINE vf gated(vf gate, vf of, vf up) {
  const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
  // a denominator of infinity would make NaN below
  const __m512 t = _mm512_min_ps(_mm512_set1_ps(126.0f), _mm512_mul_ps((__m512)of, _mm512_set1_ps(-1.44269504f)));
  const __m512 below = _mm512_add_ps(one, power_of_two(t)), near = _mm512_rcp14_ps(below);
  return gate * (vf)_mm512_mul_ps(near, _mm512_fnmadd_ps(below, near, two)) * up;
}
