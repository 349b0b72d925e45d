// Scores as the selections read them, and their one order: value descending, index ascending.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "spec/vector.hpp"

namespace spec {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
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

constexpr int kLanes = 16;  // independent running results, which is what lets a compiler use vectors

// Largest of kCount values (a multiple of kLanes), as `defined`.
template <int kCount>
SPEC_INLINE float block_max(const float* values) {
  float lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = defined(values[lane]);
  for (int i = kLanes; i < kCount; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = defined(values[i + lane]);
      lanes[lane] = value > lanes[lane] ? value : lanes[lane];
    }
  return *std::max_element(lanes, lanes + kLanes);
}

struct Scored {
  float value;
  int64_t index;
};

inline bool better(const Scored& a, const Scored& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

}  // namespace spec
