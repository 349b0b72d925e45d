// Scores as the selections read them, and their one order: value descending, index ascending.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "spec/lowest.hpp"
#include "spec/vector.hpp"

namespace spec {

constexpr float kLargest = 3e38f;  // what +inf counts as: finite, so that differences of scores stay defined

// NaN counts as -inf.
SPEC_INLINE float defined(float value) {
  value = value == value ? value : kLowest;
  return value < kLargest ? value : kLargest;
}

SPEC_INLINE float load(const float* values, int64_t i) { return values[i]; }

// bfloat16 is the upper half of a float32.
SPEC_INLINE float load(const uint16_t* values, int64_t i) {
  const uint32_t bits = static_cast<uint32_t>(values[i]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

SPEC_INLINE void store(float* out, float value) { *out = value; }

// bfloat16, to nearest, ties to even.
SPEC_INLINE void store(uint16_t* out, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  *out = static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}

// bfloat16 of -inf.
constexpr uint16_t kLowestBits = 0xff80;

// `least` where the value is smaller or NaN.
SPEC_INLINE float at_least(float value, float least) { return value > least ? value : least; }

constexpr int kLanes = 16;  // independent running results, which is what lets a compiler use vectors
constexpr int kWide = 64;   // the same where the result is a maximum: of fewer, g++ makes scalars

// Largest of kCount values (a multiple of kWide), as `defined`. T: float, or uint16_t for bfloat16.
template <int kCount, typename T>
SPEC_INLINE float block_max(const T* values) {
  float best[kWide];
  std::fill_n(best, kWide, kLowest);
  for (int first = 0; first < kCount; first += kWide)
    for (int i = 0; i < kWide; ++i) best[i] = at_least(load(values, first + i), best[i]);
  for (int half = kWide / 2; half >= kLanes; half /= 2)
    for (int i = 0; i < half; ++i) best[i] = at_least(best[i + half], best[i]);
  return defined(*std::max_element(best, best + kLanes));
}

struct Scored {
  float value;
  int64_t index;
};

inline bool better(const Scored& a, const Scored& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

}  // namespace spec
