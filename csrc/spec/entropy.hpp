// Entropy over the most likely columns of a row: two passes over it, and a search for where those columns end that a
// sample of them starts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>

#include "spec/scores.hpp"
#include "spec/top_children.hpp"

namespace spec {


// Moments of weights exp(x), x <= 0.
struct Moments {
  double sum = 0.0, weighted = 0.0;  // sums of exp(x) and of x * exp(x)
};

// A running sum of blocks, lane by lane: adding up the lanes of each block would take longer than the block.
struct BlockSums {
  double lanes[kLanes] = {};

  SPEC_INLINE void add(const float* values) {
    float partial[kLanes] = {};
    for (int i = 0; i < kBlock; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) partial[lane] += values[i + lane];
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += partial[lane];
  }

  SPEC_INLINE double total() const {
    double sum = 0.0;
    for (const double lane : lanes) sum += lane;
    return sum;
  }
};

template <typename T>
SPEC_INLINE float row_peak(const T* row, int64_t columns) {
  T room[kBlock];
  float peak = kLowest;
  for (int64_t first = 0; first < columns; first += kBlock)
    peak = std::max(peak, block_max<kBlock>(full_block(row, first, columns, room)));
  return peak;
}

// Moments of the whole row. Where kKept, writes x = value - peak and exp(x), to full blocks: of -inf where the row ends.
template <bool kKept, typename T>
SPEC_INLINE Moments exponentials(const T* row, int64_t columns, float peak, float* below, float* weights) {
  BlockSums sum, weighted;
  T room[kBlock];
  float x[kBlock], weight[kBlock], products[kBlock];
  for (int64_t first = 0; first < columns; first += kBlock) {
    const T* values = full_block(row, first, columns, room);
    for (int i = 0; i < kBlock; ++i) {
      x[i] = below_peak(load(values, i), peak);
      weight[i] = exp_nonpositive(x[i]);
      products[i] = weight[i] * x[i];
    }
    sum.add(weight);
    weighted.add(products);
    if (kKept) {
      std::copy_n(x, kBlock, below + first);
      std::copy_n(weight, kBlock, weights + first);
    }
  }
  return {sum.total(), weighted.total()};
}

// Count the values at `limit` or above. size: a multiple of kBlock.
SPEC_INLINE int64_t count_from(const float* below, int64_t size, float limit) {
  int64_t count = 0;
  for (const float* x = below; x < below + size; x += kBlock) {
    int32_t reached = 0;
    for (int i = 0; i < kBlock; ++i) reached += x[i] >= limit;
    count += reached;
  }
  return count;
}

// Moments of those at `limit` or above; size: a multiple of kBlock.
SPEC_INLINE Moments moments_from(const float* below, const float* weights, int64_t size, float limit) {
  BlockSums sum, weighted;
  float kept[kBlock], products[kBlock];
  for (int64_t first = 0; first < size; first += kBlock) {
    for (int i = 0; i < kBlock; ++i) kept[i] = below[first + i] >= limit ? weights[first + i] : 0.0f;
    for (int i = 0; i < kBlock; ++i) products[i] = kept[i] * below[first + i];
    sum.add(kept);
    weighted.add(products);
  }
  return {sum.total(), weighted.total()};
}

// Copies those of [low, high) to out; returns how many. size: a multiple of kBlock.
SPEC_INLINE int64_t collect_within(const float* below, int64_t size, float low, float high, float* out) {
  int64_t count = 0;
  int32_t reached[kBlock];
  int16_t hits[kBlock];
  for (const float* x = below; x < below + size; x += kBlock) {
    for (int i = 0; i < kBlock; ++i) reached[i] = (x[i] >= low) & (x[i] < high);
    const int hit_count = list_hits(reached, hits);
    for (int hit = 0; hit < hit_count; ++hit) out[count++] = x[hits[hit]];
  }
  return count;
}

// Where the rank-th largest of x = below[...] lies: low <= it < high.
struct Window {
  float low = kFaintest, high = 1.0f;  // all of them are within
  int64_t above = 0, within;           // how many are at `high` or above; how many are inside
};

// Narrows the window to one side of `limit`, where that is inside.
SPEC_INLINE void split(const float* below, int64_t size, int64_t rank, float limit, Window* window) {
  if (limit <= window->low || limit >= window->high) return;
  const int64_t count = count_from(below, size, limit);
  if (count >= rank)
    window->within = count - window->above, window->low = limit;
  else
    window->within -= count - window->above, window->above = count, window->high = limit;
}

// Halves the window until at most `few` are inside.
SPEC_INLINE void narrow(const float* below, int64_t size, int64_t rank, int64_t few, Window* window) {
  constexpr int kHalvings = 20;  // more do not help: what is still together there ties, or as good as
  for (int halving = 0; halving < kHalvings && window->within > few; ++halving)
    split(below, size, rank, 0.5f * (window->low + window->high), window);
}

// Narrows the window to where a sample, the first columns of each block, expects the rank-th largest: within about two
// standard deviations. Where it is mistaken the window is still right, and wider.
SPEC_INLINE void guess(const float* below, int64_t size, int64_t rank, float* sample, Window* window) {
  const int64_t sampled = size / kBlock * kLanes, padded = (sampled + kBlock - 1) / kBlock * kBlock;
  for (int64_t i = 0; i < sampled; i += kLanes) std::copy_n(below + i / kLanes * kBlock, kLanes, sample + i);
  std::fill(sample + sampled, sample + padded, kFaintest);
  const int64_t sample_rank = 1 + (rank - 1) * kLanes / kBlock;
  const auto deviation = static_cast<int64_t>(std::sqrt(static_cast<double>(sample_rank)));
  Window found;
  found.within = padded;
  narrow(sample, padded, sample_rank, 2 + 2 * deviation, &found);
  const float margin = 0.5f * (found.high - found.low);
  split(below, size, rank, found.high + margin, window);
  split(below, size, rank, found.low - margin, window);
}

// Moments of the `top` largest of x = below[...]; 1 <= top < size.
SPEC_INLINE Moments top_moments(const float* below, const float* weights, int64_t size, int64_t top, float* edge) {
  constexpr int64_t kFew = 128;  // then sorting them out costs less than another halving
  Window window;
  window.within = size;
  guess(below, size, top, edge, &window);
  narrow(below, size, top, kFew, &window);
  Moments moments = moments_from(below, weights, size, window.high);
  const int64_t found = collect_within(below, size, window.low, window.high, edge), wanted = top - window.above;
  std::nth_element(edge, edge + (wanted - 1), edge + found, std::greater<float>());
  for (int64_t i = 0; i < wanted; ++i) {
    const float weight = exp_nonpositive(edge[i]);
    moments.sum += weight;
    moments.weighted += weight * edge[i];
  }
  return moments;
}

// Left as allocated: for one row, filling it would take as long as a pass over the row.
struct EntropyScratch {
  explicit EntropyScratch(int64_t columns)
      : size((columns + kBlock - 1) / kBlock * kBlock),
        below(new float[static_cast<size_t>(size)]),
        weights(new float[static_cast<size_t>(size)]),
        edge(new float[static_cast<size_t>(size)]) {}

  int64_t size;  // of each: the columns, to full blocks
  std::unique_ptr<float[]> below, weights, edge;
};

template <typename T>
SPEC_INLINE float row_entropy(const T* row, int64_t columns, int64_t top, bool normalized, EntropyScratch* scratch) {
  const float peak = row_peak(row, columns);
  if (peak == kLowest) return 0.0f;
  Moments all, best;
  if (top >= columns) {
    all = best = exponentials<false>(row, columns, peak, nullptr, nullptr);
  } else {
    all = exponentials<true>(row, columns, peak, scratch->below.get(), scratch->weights.get());
    best = top_moments(scratch->below.get(), scratch->weights.get(), scratch->size, top, scratch->edge.get());
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
  EntropyScratch scratch(top < columns ? columns : 0);
  for (int64_t r = 0; r < rows; ++r)
    out[r] = row_entropy_clones(logits + r * row_stride, columns, top, normalized, &scratch);
}

}  // namespace spec
