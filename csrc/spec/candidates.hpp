// The best continuations of a whole layer by path log-probability, in one pass over its logits; only blocks that can
// hold a winner are read again.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "spec/scores.hpp"
#include "spec/top_children.hpp"

namespace spec {

struct Candidate {
  float score, log_prob;  // of the path, of the edge
  float value;            // the logit: it orders columns whose log-probabilities round to the same
  int64_t row, column;
};

inline bool better_candidate(const Candidate& a, const Candidate& b) {
  if (a.score != b.score) return a.score > b.score;
  if (a.row != b.row) return a.row < b.row;
  return a.value > b.value || (a.value == b.value && a.column < b.column);
}

// Turns a row's values into scores. Monotone in the value, so a block's best score is that of its maximum.
struct RowScore {
  float path, peak, log_sum;

  SPEC_INLINE float log_prob(float value) const { return (value - peak) - log_sum; }
  SPEC_INLINE float of(float value) const { return path + log_prob(value); }
};

// Columns of the block at `first` whose score reaches the limit, ascending; returns how many.
template <typename T>
SPEC_INLINE int block_hits(const T* row, int64_t first, int64_t columns, const RowScore& score, float limit,
                           int16_t* hits) {
  const int size = static_cast<int>(std::min<int64_t>(kBlock, columns - first));
  int32_t reached[kBlock];
  if (size == kBlock) {
    for (int i = 0; i < kBlock; ++i) reached[i] = score.of(defined(load(row, first + i))) >= limit;
  } else {
    for (int i = 0; i < kBlock; ++i) reached[i] = i < size && score.of(defined(load(row, first + i))) >= limit;
  }
  return list_hits(reached, hits);
}

SPEC_CLONES inline int block_hits_clones(const float* row, int64_t first, int64_t columns, const RowScore& score,
                                         float limit, int16_t* hits) {
  return block_hits(row, first, columns, score, limit, hits);
}

SPEC_CLONES inline int block_hits_clones(const uint16_t* row, int64_t first, int64_t columns, const RowScore& score,
                                         float limit, int16_t* hits) {
  return block_hits(row, first, columns, score, limit, hits);
}

// Best scores of kLanes groups of the block at `first`: the columns kLanes apart.
template <typename T>
SPEC_INLINE void group_scores(const T* row, int64_t first, int64_t columns, const RowScore& score, float* out) {
  float values[kBlock];
  if (columns - first >= kBlock) {
    for (int i = 0; i < kBlock; ++i) values[i] = defined(load(row, first + i));
  } else {
    for (int i = 0; i < kBlock; ++i) values[i] = first + i < columns ? defined(load(row, first + i)) : kLowest;
  }
  float best[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) best[lane] = values[lane];
  for (int i = kLanes; i < kBlock; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = values[i + lane];
      best[lane] = value > best[lane] ? value : best[lane];
    }
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = score.of(best[lane]);
}

SPEC_CLONES inline void group_scores_clones(const float* row, int64_t first, int64_t columns, const RowScore& score,
                                            float* out) {
  group_scores(row, first, columns, score, out);
}

SPEC_CLONES inline void group_scores_clones(const uint16_t* row, int64_t first, int64_t columns, const RowScore& score,
                                            float* out) {
  group_scores(row, first, columns, score, out);
}

// The best of what is added, at most `count`. `limit` rises: what is below it can no longer win.
class BoundedBest {
 public:
  BoundedBest(int64_t count, float limit) : count_(static_cast<size_t>(count)), limit_(limit) {}

  float limit() const { return limit_; }

  void add(const Candidate& candidate) { found_.push_back(candidate); }

  // To be called between blocks: bounds the memory, and the work where many tie.
  void trim() {
    if (found_.size() < 2 * count_ + 2 * kBlock) return;
    keep_best();
    limit_ = std::max(limit_, found_.back().score);
  }

  std::vector<Candidate> sorted() {
    keep_best();
    std::sort(found_.begin(), found_.end(), better_candidate);
    return std::move(found_);
  }

 private:
  // The worst of those kept comes last.
  void keep_best() {
    if (found_.size() <= count_) return;
    const auto last = found_.begin() + static_cast<int64_t>(count_ - 1);
    std::nth_element(found_.begin(), last, found_.end(), better_candidate);
    found_.resize(count_);
  }

  size_t count_;
  float limit_;
  std::vector<Candidate> found_;
};

// The least score that passes: at gate or above, above the bound and above -inf.
inline float passing_limit(float anchor, float log_gate, float bound) {
  const float above = std::nextafter(std::max(bound, kLowest), std::numeric_limits<float>::infinity());
  return log_gate > kLowest ? std::max(above, anchor + log_gate) : above;
}

// The count-th largest of values, or `limit` where fewer reach that: as many reach what is returned.
inline float raised_limit(std::vector<float>& values, int64_t count, float limit) {
  const auto below = std::partition(values.begin(), values.end(), [&](float value) { return value >= limit; });
  if (count > below - values.begin()) return limit;
  std::nth_element(values.begin(), values.begin() + (count - 1), below, std::greater<float>());
  return values[static_cast<size_t>(count - 1)];
}

// The logits of a layer and, after `score_rows`, what scores them. T: float, or uint16_t for bfloat16.
template <typename T>
struct Layer {
  const T* logits;
  int64_t rows, columns, row_stride;  // the stride in elements
  std::vector<RowScore> row_scores;   // [rows]
  std::vector<float> block_scores;    // [rows, blocks]: the best score of each block

  int64_t blocks() const { return (columns + kBlock - 1) / kBlock; }
  const T* row(int64_t r) const { return logits + r * row_stride; }
};

// The one pass over all logits; returns the best score of the layer.
template <typename T>
float score_rows(Layer<T>& layer, const float* scores, bool normalized) {
  const int64_t blocks = layer.blocks();
  layer.row_scores.resize(static_cast<size_t>(layer.rows));
  layer.block_scores.assign(static_cast<size_t>(layer.rows * blocks), kLowest);
  float anchor = kLowest;
  for (int64_t r = 0; r < layer.rows; ++r) {
    RowScore& score = layer.row_scores[static_cast<size_t>(r)];
    score = {defined(scores[r]), 0.0f, 0.0f};
    if (score.path == kLowest) continue;  // padding
    float* best = layer.block_scores.data() + r * blocks;
    float peak, log_sum;
    row_pass_clones(layer.row(r), layer.columns, !normalized, best, &peak, &log_sum);
    if (peak > kLowest && !normalized) score.peak = peak, score.log_sum = log_sum;
    for (int64_t block = 0; block < blocks; ++block) best[block] = score.of(best[block]);
    anchor = std::max(anchor, score.of(peak));
  }
  return anchor;
}

// A limit that at least `count` candidates reach; `limit` itself where the blocks' best scores do not tell.
template <typename T>
float limit_by_blocks(const Layer<T>& layer, int64_t count, float limit) {
  std::vector<float> maxima = layer.block_scores;
  return raised_limit(maxima, count, limit);
}

// The same, looking closer: kLanes groups per block.
template <typename T>
float limit_by_groups(const Layer<T>& layer, int64_t count, float limit) {
  std::vector<float> maxima(layer.block_scores.size() * kLanes, kLowest);
  float* out = maxima.data();
  for (int64_t r = 0, i = 0; r < layer.rows; ++r)
    for (int64_t block = 0; block < layer.blocks(); ++block, ++i, out += kLanes)
      if (layer.block_scores[static_cast<size_t>(i)] >= limit)
        group_scores_clones(layer.row(r), block * kBlock, layer.columns, layer.row_scores[static_cast<size_t>(r)], out);
  return raised_limit(maxima, count, limit);
}

template <typename T>
void collect(const Layer<T>& layer, BoundedBest& found) {
  int16_t hits[kBlock];
  for (int64_t r = 0, i = 0; r < layer.rows; ++r) {
    const T* row = layer.row(r);
    const RowScore& score = layer.row_scores[static_cast<size_t>(r)];
    for (int64_t block = 0; block < layer.blocks(); ++block, ++i) {
      if (!(layer.block_scores[static_cast<size_t>(i)] >= found.limit())) continue;
      const int hit_count = block_hits_clones(row, block * kBlock, layer.columns, score, found.limit(), hits);
      for (int hit = 0; hit < hit_count; ++hit) {
        const int64_t column = block * kBlock + hits[hit];
        const float value = defined(load(row, column));
        found.add({score.of(value), score.log_prob(value), value, r, column});
      }
      found.trim();
    }
  }
}

// The `count` best candidates by (score descending, row ascending, value descending, column ascending), where a score
// is scores[row] plus the log-probability of the column. With m the best score of the layer, only scores of
// m + log_gate and above and above `bound` pass; -inf never does. count >= 1; scores: [rows]; `normalized`: the values
// are log-probabilities already.
template <typename T>
std::vector<Candidate> best_candidates(const T* logits, int64_t rows, int64_t columns, int64_t row_stride,
                                       const float* scores, int64_t count, float log_gate, float bound,
                                       bool normalized) {
  Layer<T> layer{logits, rows, columns, row_stride, {}, {}};
  const float anchor = score_rows(layer, scores, normalized);
  if (anchor == kLowest || bound == std::numeric_limits<float>::infinity()) return {};
  const float passing = passing_limit(anchor, log_gate, bound);
  const bool closer = count > rows * layer.blocks() && log_gate == kLowest;  // a gate leaves few anyway
  BoundedBest found(count, closer ? limit_by_groups(layer, count, passing) : limit_by_blocks(layer, count, passing));
  collect(layer, found);
  return found.sorted();
}

}  // namespace spec
