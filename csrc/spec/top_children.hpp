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

// exp for x <= 0, relative error below 2e-7; below -87 it stays at 1.6e-38. Polynomial: Cephes expf.
SPEC_INLINE float exp_nonpositive(float x) {
  x = x > -87.0f ? x : -87.0f;
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

// Sum of exp(value - peak) over a full block; peak is finite and no value is above it.
SPEC_INLINE float block_sum(const float* values, float peak) {
  float lanes[kLanes] = {};
  for (int i = 0; i < kBlock; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += exp_nonpositive(values[i + lane] - peak);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

// Writes each block's maximum; returns log(sum(exp(value - peak))) and the peak. Without `with_sum` the sum is 1.
template <typename T>
SPEC_INLINE void row_pass(const T* row, int64_t columns, bool with_sum, float* maxima, float* peak, float* log_sum) {
  double sum = 0.0;
  *peak = kLowest;
  float values[kBlock];
  for (int64_t first = 0, block = 0; first < columns; first += kBlock, ++block) {
    if (columns - first >= kBlock) {
      for (int i = 0; i < kBlock; ++i) values[i] = defined(load(row, first + i));
    } else {
      for (int i = 0; i < kBlock; ++i) values[i] = first + i < columns ? defined(load(row, first + i)) : kLowest;
    }
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

// The k best columns of each row by (value descending, column ascending), 1 <= k <= columns, and their values, or
// log-probabilities over the row unless `normalized`. T: float, or uint16_t for bfloat16; row_stride in elements.
// log_probs, best: [rows, k].
template <typename T>
void top_children(const T* logits, int64_t rows, int64_t columns, int64_t row_stride, int64_t k, bool normalized,
                  float* log_probs, int64_t* best) {
  const int64_t blocks = (columns + kBlock - 1) / kBlock;
  std::vector<float> maxima(static_cast<size_t>(blocks)), ranked;
  std::vector<Scored> candidates;
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
      const int64_t last = std::min(columns, (block + 1) * kBlock);
      for (int64_t i = block * kBlock; i < last; ++i) {
        const float value = defined(load(row, i));
        if (value >= threshold) candidates.push_back({value, i});
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
