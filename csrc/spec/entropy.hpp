// Entropy over the most likely columns of a row: three passes over it, and a bisection for where those columns end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "spec/scores.hpp"
#include "spec/top_children.hpp"

namespace spec {

constexpr float kFaintest = -87.0f;  // below the peak: what is fainter counts as this, as exp_nonpositive has it
constexpr float kPadding = -88.0f;   // fills the last block; never selected
constexpr int kGroup = 64;           // columns looked at together

// Of weights exp(x), x <= 0.
struct Moments {
  double sum = 0.0, weighted = 0.0;  // sums of exp(x) and of x * exp(x)
};

template <typename T>
SPEC_INLINE float row_peak(const T* row, int64_t columns) {
  float lanes[kLanes], peak = kLowest;
  for (float& lane : lanes) lane = kLowest;
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = defined(load(row, i + lane));
      lanes[lane] = value > lanes[lane] ? value : lanes[lane];
    }
  for (; i < columns; ++i) peak = std::max(peak, defined(load(row, i)));
  return std::max(peak, *std::max_element(lanes, lanes + kLanes));
}

// Sum of a block.
SPEC_INLINE float block_total(const float* values) {
  float lanes[kLanes] = {}, sum = 0.0f;
  for (int i = 0; i < kBlock; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane];
  for (const float lane : lanes) sum += lane;
  return sum;
}

// Moments of the whole row. Where kKept, writes x = value - peak and exp(x), both padded to full blocks.
template <bool kKept, typename T>
SPEC_INLINE Moments exponentials(const T* row, int64_t columns, float peak, float* below, float* weights) {
  Moments moments;
  float x[kBlock], weight[kBlock], products[kBlock];
  for (int64_t first = 0; first < columns; first += kBlock) {
    if (columns - first >= kBlock) {
      for (int i = 0; i < kBlock; ++i) x[i] = std::max(defined(load(row, first + i)) - peak, kFaintest);
    } else {
      for (int i = 0; i < kBlock; ++i)
        x[i] = first + i < columns ? std::max(defined(load(row, first + i)) - peak, kFaintest) : kPadding;
    }
    for (int i = 0; i < kBlock; ++i) {
      weight[i] = exp_nonpositive(x[i]);
      products[i] = weight[i] * x[i];
    }
    moments.sum += block_total(weight);
    moments.weighted += block_total(products);
    if (kKept) {
      std::copy_n(x, kBlock, below + first);
      std::copy_n(weight, kBlock, weights + first);
    }
  }
  return moments;
}

// How many are at `limit` or above; size: a multiple of kLanes.
SPEC_INLINE int64_t count_from(const float* below, int64_t size, float limit) {
  int32_t lanes[kLanes] = {};
  for (int64_t i = 0; i < size; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += below[i + lane] >= limit;
  int64_t count = 0;
  for (const int32_t lane : lanes) count += lane;
  return count;
}

// Moments of those at `limit` or above; size: a multiple of kBlock.
SPEC_INLINE Moments moments_from(const float* below, const float* weights, int64_t size, float limit) {
  Moments moments;
  float kept[kBlock], products[kBlock];
  for (int64_t first = 0; first < size; first += kBlock) {
    for (int i = 0; i < kBlock; ++i) {
      kept[i] = weights[first + i] * static_cast<float>(below[first + i] >= limit);
      products[i] = kept[i] * below[first + i];
    }
    moments.sum += block_total(kept);
    moments.weighted += block_total(products);
  }
  return moments;
}

// Copies those of [low, high) to out, which has room for `size`, a multiple of kGroup; returns how many. Few are
// expected, so whole groups are passed over.
SPEC_INLINE int64_t collect_within(const float* below, int64_t size, float low, float high, float* out) {
  int64_t count = 0;
  for (int64_t first = 0; first < size; first += kGroup) {
    const float* x = below + first;
    int32_t any = 0;
    for (int i = 0; i < kGroup; ++i) any |= (x[i] >= low) & (x[i] < high);
    if (!any) continue;
    for (int i = 0; i < kGroup; ++i) {
      out[count] = x[i];
      count += (x[i] >= low) & (x[i] < high);
    }
  }
  return count;
}

// Moments of the `top` largest of x = below[...], of which `columns` are no padding; 1 <= top < columns.
SPEC_INLINE Moments top_moments(const float* below, const float* weights, int64_t size, int64_t columns,
                                int64_t top, float* edge) {
  constexpr int64_t kFew = 64;       // then sorting them out costs less than another halving
  constexpr int kHalvings = 20;      // more do not help: what is still together there ties, or as good as
  float low = kFaintest, high = 1.0f;  // count(low) >= top > count(high)
  int64_t above = 0, within = columns;
  for (int halving = 0; halving < kHalvings && within > kFew; ++halving) {
    const float middle = 0.5f * (low + high);
    const int64_t count = count_from(below, size, middle);
    if (count >= top)
      within = count - above, low = middle;
    else
      within -= count - above, above = count, high = middle;
  }
  Moments moments = moments_from(below, weights, size, high);
  const int64_t found = collect_within(below, size, low, high, edge), wanted = top - above;
  std::nth_element(edge, edge + (wanted - 1), edge + found, std::greater<float>());
  for (int64_t i = 0; i < wanted; ++i) {
    const double weight = exp_nonpositive(edge[i]);
    moments.sum += weight;
    moments.weighted += weight * edge[i];
  }
  return moments;
}

struct EntropyScratch {
  std::vector<float> below, weights, edge;  // [columns, padded to full blocks] each
};

template <typename T>
SPEC_INLINE float row_entropy(const T* row, int64_t columns, int64_t top, bool normalized, EntropyScratch* scratch) {
  const float peak = row_peak(row, columns);
  if (peak == kLowest) return 0.0f;
  Moments all, best;
  if (top >= columns) {
    all = best = exponentials<false>(row, columns, peak, nullptr, nullptr);
  } else {
    const auto size = static_cast<int64_t>(scratch->below.size());
    all = exponentials<true>(row, columns, peak, scratch->below.data(), scratch->weights.data());
    best = top_moments(scratch->below.data(), scratch->weights.data(), size, columns, top, scratch->edge.data());
  }
  // p = exp(x - log_sum), so -sum p log p = -exp(-log_sum) * (sum exp(x) x - log_sum * sum exp(x))
  const double log_sum = normalized ? -static_cast<double>(peak) : std::log(all.sum);
  return static_cast<float>(std::exp(-log_sum) * (log_sum * best.sum - best.weighted));
}

SPEC_CLONES inline float row_entropy_clones(const float* row, int64_t columns, int64_t top, bool normalized,
                                            EntropyScratch* scratch) {
  return row_entropy(row, columns, top, normalized, scratch);
}

SPEC_CLONES inline float row_entropy_clones(const uint16_t* row, int64_t columns, int64_t top, bool normalized,
                                            EntropyScratch* scratch) {
  return row_entropy(row, columns, top, normalized, scratch);
}

// -sum p log p over the `top` most likely columns of each row, in nats; p over the whole row, or exp(value) where
// `normalized`. T, row_stride: as in top_children; top >= 1. out: [rows]; 0 for a row of -inf alone.
template <typename T>
void top_entropy(const T* logits, int64_t rows, int64_t columns, int64_t row_stride, int64_t top, bool normalized,
                 float* out) {
  EntropyScratch scratch;
  if (top < columns) {
    const auto padded = static_cast<size_t>((columns + kBlock - 1) / kBlock * kBlock);
    scratch.below.resize(padded);
    scratch.weights.resize(padded);
    scratch.edge.resize(padded);
  }
  for (int64_t r = 0; r < rows; ++r)
    out[r] = row_entropy_clones(logits + r * row_stride, columns, top, normalized, &scratch);
}

}  // namespace spec
