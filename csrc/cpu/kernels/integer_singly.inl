// What vectors of 16 lanes do with transpositions (integer_lanes_16.inl), one number at a time.

CPU_INLINE void turn_records(const uint32_t* from, int64_t live, uint32_t* to) {
  for (int64_t r = 0; r < live; ++r)
    for (int k = 0; k < kRows; ++k) to[r * kRows + k] = from[k * kRows + r];
}

CPU_INLINE void turn_sums(const float* from, int64_t live, float* to) {
  if (live < kRows) __builtin_memset(to, 0, sizeof(float) * kOutputs * kRows);
  for (int o = 0; o < kOutputs; ++o)
    for (int64_t r = 0; r < live; ++r) to[o * kRows + r] = from[r * kOutputs + o];
}
