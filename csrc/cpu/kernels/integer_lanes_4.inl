// What integer products do in vectors of 4 lanes.

constexpr int kTogether = 2;  // rows

CPU_INLINE vi nearest(vf value) {
#if defined(__SSE2__)
  return (vi)__builtin_ia32_cvtps2dq((vf)value);
#elif defined(__aarch64__)
  return (vi)vcvtnq_s32_f32((float32x4_t)value);
#else
  vi whole;
  for (int i = 0; i < W; ++i) whole[i] = static_cast<int32_t>(__builtin_lrintf(value[i]));
  return whole;
#endif
}

// Keeps sums in the order they are written in: GCC makes trees of them, whose leaves then do not fit the registers.
template <typename T>
CPU_INLINE void in_order(T& sum) {
#if defined(__SSE2__)
  __asm__("" : "+x"(sum));
#elif defined(__aarch64__)
  __asm__("" : "+w"(sum));
#else
  (void)sum;
#endif
}

// A table's bytes for those of `places`, which are below 16.
CPU_INLINE vu looked_up(const int8_t* table, vu places) {
#if defined(__aarch64__)
  return (vu)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)places);
#else
  uint8_t bytes[4 * W];
  __builtin_memcpy(bytes, &places, sizeof bytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(table[byte]);
  __builtin_memcpy(&places, bytes, sizeof bytes);
  return places;
#endif
}

// Add the 16 lanes of each of 16 sums: quads, then pairs of these.
CPU_INLINE void add_up_16(const float* lanes, float* sums) {
  for (int i = 0; i < kOutputs; ++i, lanes += 16) {
    float quads[4];
    for (int q = 0; q < 4; ++q) quads[q] = (lanes[4 * q] + lanes[4 * q + 1]) + (lanes[4 * q + 2] + lanes[4 * q + 3]);
    sums[i] = (quads[0] + quads[1]) + (quads[2] + quads[3]);
  }
}

#include "cpu/kernels/integer_singly.inl"
