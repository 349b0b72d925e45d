// The vectors of one instruction set, of W floats each: every file of this folder is included by isa_*.cpp inside a namespace
// of the set's own, behind the pragma of isa_region.hpp. All has internal linkage there and calls nothing of the standard
// library that could be shared with other files, so no instruction of the set leaks into code that runs elsewhere.

constexpr int V = kRows / W;  // vectors of a tile's row of 16

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));

CPU_INLINE vf load(const float* from) {
  vf value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
CPU_INLINE void store(float* to, vf value) { __builtin_memcpy(to, &value, sizeof value); }
CPU_INLINE vf set(float value) { return value - vf{}; }
CPU_INLINE vf as_floats(vu bits) { return (vf)bits; }
CPU_INLINE vu as_bits(vf value) { return (vu)value; }
CPU_INLINE vf greater(vf a, vf b) { return a > b ? a : b; }

CPU_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
CPU_INLINE int vectors_of(int64_t rows) { return rows >= kRows ? V : static_cast<int>((rows + W - 1) / W); }

// Rounded to bfloat16, to nearest even, in the upper half of each word; finite values only.
CPU_INLINE vu rounded(vf value) {
  const vu bits = as_bits(value);
  return bits + 0x7FFFu + (bits >> 16 & 1);
}
CPU_INLINE vf as_half(vf value) { return as_floats(rounded(value) & 0xFFFF0000u); }
CPU_INLINE uint16_t half_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 64);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

// Rows of 16 lanes to one row behind the other, `words` apart: from [words][16] to `live` rows. One number at a time.
CPU_INLINE void turn_rows_singly(const uint32_t* from, int64_t words, int64_t live, uint32_t* to) {
  for (int64_t lane = 0; lane < live; ++lane)
    for (int64_t k = 0; k < words; ++k) to[lane * words + k] = from[k * kRows + lane];
}
