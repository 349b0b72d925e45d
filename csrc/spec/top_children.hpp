// Log-probabilities of the best columns of a row of logits, in one pass over the row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "spec/scores.hpp"

namespace spec {

constexpr int kBlock = 256;  // columns whose maximum is kept: only blocks that can hold a winner are read again

constexpr float kFaintest = -87.0f;  // below the peak: what is fainter counts as this

// exp for x <= 0, relative error below 2e-7; below -87 it stays at 1.6e-38. Polynomial: Cephes expf.
SPEC_INLINE float exp_nonpositive(float x) {
  x = at_least(x, kFaintest);
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the addition rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// The kBlock columns from `first` on: in the row itself, or in `room`, filled up with -inf, where the row ends before.
SPEC_INLINE const float* full_block(const float* row, int64_t first, int64_t columns, float* room) {
  if (columns - first >= kBlock) return row + first;
  std::fill(std::copy(row + first, row + columns, room), room + kBlock, kLowest);
  return room;
}

SPEC_INLINE const uint16_t* full_block(const uint16_t* row, int64_t first, int64_t columns, uint16_t* room) {
  if (columns - first >= kBlock) return row + first;
  std::fill(std::copy(row + first, row + columns, room), room + kBlock, kLowestBits);
  return room;
}

// value - peak as exp_nonpositive tells it apart, -87 to 0; the value as `defined`, peak finite and not below it.
SPEC_INLINE float below_peak(float value, float peak) {
  const float below = at_least(value - peak, kFaintest);
  return below < 0.0f ? below : 0.0f;  // +inf
}

// Sum of exp(value - peak) over a full block; peak is finite and no value is above it.
template <typename T>
SPEC_INLINE float block_sum(const T* values, float peak) {
  float weights[kBlock], lanes[kLanes] = {}, sum = 0.0f;
  for (int i = 0; i < kBlock; ++i) weights[i] = exp_nonpositive(below_peak(load(values, i), peak));
  for (int i = 0; i < kBlock; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += weights[i + lane];
  for (const float lane : lanes) sum += lane;
  return sum;
}

// Writes each block's maximum; returns log(sum(exp(value - peak))) and the peak. Without `with_sum` the sum is 1.
template <typename T>
SPEC_INLINE void row_pass(const T* row, int64_t columns, bool with_sum, float* maxima, float* peak, float* log_sum) {
  double sum = 0.0;
  *peak = kLowest;
  T room[kBlock];
  for (int64_t first = 0, block = 0; first < columns; first += kBlock, ++block) {
    const T* values = full_block(row, first, columns, room);
    maxima[block] = block_max<kBlock>(values);
    if (maxima[block] > *peak) {
      sum *= *peak > kLowest ? std::exp(static_cast<double>(*peak) - maxima[block]) : 0.0;
      *peak = maxima[block];
    }
    if (with_sum && *peak > kLowest) sum += block_sum(values, *peak);
  }
  *log_sum = with_sum && *peak > kLowest ? static_cast<float>(std::log(sum)) : 0.0f;
}

SPEC_CLONES inline void row_pass_clones(const float* row, int64_t columns, bool with_sum, float* maxima, float* peak,
                                        float* log_sum) {
  row_pass(row, columns, with_sum, maxima, peak, log_sum);
}

SPEC_CLONES inline void row_pass_clones(const uint16_t* row, int64_t columns, bool with_sum, float* maxima,
                                        float* peak, float* log_sum) {
  row_pass(row, columns, with_sum, maxima, peak, log_sum);
}

// Places at which a block's flags, 0 or 1, are set, ascending; returns how many. Few are expected.
SPEC_INLINE int list_hits(const int32_t* reached, int16_t* hits) {
  int count = 0;
  for (int group = 0; group < kBlock; group += kLanes) {
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= reached[group + lane];
    if (!any) continue;
    for (int lane = 0; lane < kLanes; ++lane) {
      hits[count] = static_cast<int16_t>(group + lane);
      count += reached[group + lane];
    }
  }
  return count;
}

// Columns of the block at `first` that are not below the threshold (NaN is not), as places in it; returns how many.
template <typename T>
SPEC_INLINE int block_winners(const T* row, int64_t first, int64_t columns, float threshold, int16_t* winners) {
  T room[kBlock];
  const T* values = full_block(row, first, columns, room);
  int32_t reached[kBlock];
  for (int i = 0; i < kBlock; ++i) reached[i] = !(load(values, i) < threshold);
  return list_hits(reached, winners);
}

SPEC_CLONES inline int block_winners_clones(const float* row, int64_t first, int64_t columns, float threshold,
                                            int16_t* winners) {
  return block_winners(row, first, columns, threshold, winners);
}

SPEC_CLONES inline int block_winners_clones(const uint16_t* row, int64_t first, int64_t columns, float threshold,
                                            int16_t* winners) {
  return block_winners(row, first, columns, threshold, winners);
}

// The k best columns of each row by (value descending, column ascending), 1 <= k <= columns, and their values, or
// log-probabilities over the row unless `normalized`. T: float, or uint16_t for bfloat16; row_stride in elements.
// log_probs, best: [rows, k].
template <typename T>
void top_children(const T* logits, int64_t rows, int64_t columns, int64_t row_stride, int64_t k, bool normalized,
                  float* log_probs, int64_t* best) {
  const int64_t blocks = (columns + kBlock - 1) / kBlock;
  std::vector<float> maxima(static_cast<size_t>(blocks)), ranked;
  std::vector<Scored> candidates;
  int16_t winners[kBlock];
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = logits + r * row_stride;
    float peak, log_sum;
    row_pass_clones(row, columns, !normalized, maxima.data(), &peak, &log_sum);

    float threshold = kLowest;  // k blocks reach it, so no winner is below it
    if (k <= blocks) {
      ranked = maxima;
      std::nth_element(ranked.begin(), ranked.begin() + (k - 1), ranked.end(), std::greater<float>());
      threshold = ranked[static_cast<size_t>(k - 1)];
    }
    candidates.clear();
    for (int64_t block = 0; block < blocks; ++block) {
      if (maxima[static_cast<size_t>(block)] < threshold) continue;
      const int count = block_winners_clones(row, block * kBlock, columns, threshold, winners);
      for (int i = 0; i < count; ++i) {
        const int64_t column = block * kBlock + winners[i];
        if (column < columns) candidates.push_back({defined(load(row, column)), column});
      }
    }
    std::partial_sort(candidates.begin(), candidates.begin() + k, candidates.end(), better);
    for (int64_t j = 0; j < k; ++j) {
      const Scored& winner = candidates[static_cast<size_t>(j)];
      best[r * k + j] = winner.index;
      log_probs[r * k + j] =
          normalized || winner.value == kLowest ? winner.value : (winner.value - peak) - log_sum;
    }
  }
}

}  // namespace spec
