// The compiler's own vectors of 4 floats: SSE2, NEON. isa_portable.cpp adds `fused` and kRegisters.

constexpr int W = 4;

#include "cpu/kernels/vectors.inl"

CPU_INLINE vu widened(const uint16_t* from) {
  vh half;
  __builtin_memcpy(&half, from, sizeof half);
  return __builtin_convertvector(half, vu);
}
CPU_INLINE vi widened(const uint8_t* from) {
  vb value;
  __builtin_memcpy(&value, from, sizeof value);
  return __builtin_convertvector(value, vi);
}

CPU_INLINE vf load_half(const uint16_t* from) { return as_floats(widened(from) << 16); }

CPU_INLINE float float_of_half_precision(uint16_t half) {  // IEEE binary16
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
  uint32_t bits = (magnitude << 13) + 0x38000000u;
  float value;
  if (magnitude < 0x0400u) {
    value = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    __builtin_memcpy(&bits, &value, 4);
  } else if (magnitude >= 0x7C00u) {
    bits = 0x7F800000u | (magnitude & 0x3FFu) << 13;
  }
  bits |= sign;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Half floats and bytes without a sign as floats, W of them.
CPU_INLINE vf half_floats(const uint8_t* from) {
  vf values;
  for (int i = 0; i < W; ++i) {
    uint16_t half;
    __builtin_memcpy(&half, from + 2 * i, 2);
    values[i] = float_of_half_precision(half);
  }
  return values;
}
CPU_INLINE vf byte_floats(const uint8_t* from) {
  vf values;
  for (int i = 0; i < W; ++i) values[i] = static_cast<float>(from[i]);
  return values;
}

CPU_INLINE bool any(vi holds) { return (holds[0] | holds[1] | holds[2] | holds[3]) != 0; }

// Return the sum of the lanes of each of kAtOnce vectors.
constexpr int kAtOnce = 4;
CPU_INLINE void add_up(const vf* lanes, float* sums) {
  for (int i = 0; i < kAtOnce; ++i) sums[i] = (lanes[i][0] + lanes[i][1]) + (lanes[i][2] + lanes[i][3]);
}

// rows[i] lane j to rows[j] lane i.
CPU_INLINE void turn(vu* rows) {
  for (int i = 0; i < W; ++i)
    for (int j = 0; j < i; ++j) {
      const uint32_t word = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = word;
    }
}

#include "cpu/kernels/singly.inl"
