// Sampling by argmax: scores plus Gumbel noise that is a pure function of (seed, position, index).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "spec/philox.hpp"
#include "spec/scores.hpp"

namespace spec {

constexpr int kNoiseBlock = 256;          // elements; 64 Philox counters of 4 words
constexpr double kLargestNoise = 22.875;  // -log(-log(1 - 2^-33)) = 22.8738...: no score gains more

SPEC_INLINE double gumbel(uint32_t word) {
  return -std::log(-std::log((static_cast<double>(word) + 0.5) * 0x1p-32));
}

// Largest score of a block of `count` elements.
SPEC_CLONES inline float block_peak(const float* scores, int count) {
  if (count == kNoiseBlock) return block_max<kNoiseBlock>(scores);
  float peak = kLowest;
  for (int i = 0; i < count; ++i) peak = std::max(peak, defined(scores[i]));
  return peak;
}

// Random words of one block of elements, and an upper bound of score + noise for each; returns the largest bound.
// The bound: noise = -log(-log u) <= -log(1 - u), as -log u >= 1 - u; and log2(2^e * (1 + m)) >= e + m, which are
// the bits of the float. Rounding errors stay below 1e-4; the caller allows for more.
SPEC_CLONES inline float block_bounds(const float* scores, int count, uint32_t first_counter, uint64_t position,
                                      PhiloxKey key, uint32_t* words, float* bounds) {
  constexpr int kCounters = kNoiseBlock / 4;
  uint32_t by_word[4][kCounters];
  for (int i = 0; i < kCounters; ++i) {
    by_word[0][i] = first_counter + static_cast<uint32_t>(i);
    by_word[1][i] = static_cast<uint32_t>(position);
    by_word[2][i] = static_cast<uint32_t>(position >> 32);
    by_word[3][i] = 0;
  }
  philox(by_word, key);
  for (int i = 0; i < kCounters; ++i)
    for (int word = 0; word < 4; ++word) words[4 * i + word] = by_word[word][i];
  float noise_bounds[kNoiseBlock];
  for (int i = 0; i < kNoiseBlock; ++i) {
    const float rest = static_cast<float>(~words[i]) + 0.5f;  // (1 - u) * 2^32
    int32_t bits;
    std::memcpy(&bits, &rest, sizeof bits);
    noise_bounds[i] = (32.0f - static_cast<float>(bits - 0x3f800000) * 0x1p-23f) * 0.693147181f;
  }
  for (int i = 0; i < count; ++i) bounds[i] = defined(scores[i]) + noise_bounds[i];
  return block_peak(bounds, count);
}

// Index of the largest score + noise, the lowest one of equals; -1 where every score is -inf or NaN.
inline int64_t keyed_gumbel_argmax(const float* scores, int64_t size, uint64_t seed, uint64_t position) {
  const PhiloxKey key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  float peak = kLowest;
  int64_t peak_block = 0;
  for (int64_t first = 0; first < size; first += kNoiseBlock) {
    const float block = block_peak(scores + first, static_cast<int>(std::min<int64_t>(kNoiseBlock, size - first)));
    if (block > peak) peak = block, peak_block = first;
  }
  if (peak == kLowest) return -1;

  double best = -std::numeric_limits<double>::infinity();
  int64_t best_index = -1;
  const auto visit = [&](int64_t first) {
    uint32_t words[kNoiseBlock];
    float bounds[kNoiseBlock];
    const int count = static_cast<int>(std::min<int64_t>(kNoiseBlock, size - first));
    const auto limit = static_cast<float>(best - 1e-3 - 1e-6 * std::fabs(best));
    if (block_bounds(scores + first, count, static_cast<uint32_t>(first / 4), position, key, words, bounds) < limit)
      return;
    for (int i = 0; i < count; ++i) {
      if (bounds[i] < limit || bounds[i] == kLowest) continue;
      const double sum = static_cast<double>(defined(scores[first + i])) + gumbel(words[i]);
      if (sum > best || (sum == best && first + i < best_index)) best = sum, best_index = first + i;
    }
  };
  visit(peak_block);
  for (int64_t first = 0; first < size; first += kNoiseBlock) {
    const float block = block_peak(scores + first, static_cast<int>(std::min<int64_t>(kNoiseBlock, size - first)));
    if (static_cast<double>(block) + kLargestNoise >= best) visit(first);
  }
  return best_index;
}

}  // namespace spec
