// Attention whose result for a row depends on nothing but the keys and values that the row sees, in their order: not
// on the other rows, on hidden slots between them, or on where in the cache they stand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "spec/top_children.hpp"

namespace spec {

constexpr int kKeys = 64;      // keys whose scores are made side by side
constexpr int kChannels = 64;  // channels of the output that are summed side by side

struct AttentionShape {
  int64_t heads, groups, rows, size;  // key-value heads, query heads of each, rows, head size
  int64_t key_head, key_row, value_head, value_row;  // strides in elements
  float scale;
};

// The slots that rows see: those before `prefix` and, after them, the nodes of their paths.
struct RowPaths {
  int64_t columns, prefix, live;  // rows from `live` on are padding: they see nothing and give 0
  const int32_t* nodes;           // [rows, columns]: slots from `prefix` on, ascending
  const int32_t* counts;          // [rows]: how many of them a row sees
};

// scores[i] = query . key i, summed channel by channel; block: [size, kKeys].
SPEC_CLONES inline void block_scores(const float* query, const float* block, int64_t size, float* scores) {
  float lanes[kKeys] = {};
  for (int64_t d = 0; d < size; ++d) {
    const float q = query[d];
    for (int i = 0; i < kKeys; ++i) lanes[i] += q * block[d * kKeys + i];
  }
  for (int i = 0; i < kKeys; ++i) scores[i] = lanes[i];
}

// sums[d] += weights[j] * values[j][d] for j = 0, 1, ..., count - 1; values: rows of `stride`.
SPEC_CLONES inline void add_values(const float* weights, const float* values, int64_t count, int64_t stride,
                                   float* sums) {
  float lanes[kChannels];
  for (int d = 0; d < kChannels; ++d) lanes[d] = sums[d];
  for (int64_t j = 0; j < count; ++j) {
    const float weight = weights[j];
    for (int d = 0; d < kChannels; ++d) lanes[d] += weight * values[j * stride + d];
  }
  for (int d = 0; d < kChannels; ++d) sums[d] = lanes[d];
}

// weights[i] = exp(scores[i] - peak) for i < count, 0 behind, a multiple of kLanes long; returns their sum.
SPEC_CLONES inline float softmax_weights(float* scores, int64_t count, float peak) {
  float lanes[kLanes] = {};
  const int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t first = 0; first < whole; first += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float weight = first + lane < count ? exp_nonpositive(scores[first + lane] - peak) : 0.0f;
      scores[first + lane] = weight;
      lanes[lane] += weight;
    }
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

// One key-value head's keys and values in float32, made once for all rows.
class StrictHead {
 public:
  StrictHead(int64_t slots, int64_t size)
      : slots_(slots), size_(size), wide_((size + kChannels - 1) / kChannels * kChannels),
        keys_(static_cast<size_t>((slots + kKeys - 1) / kKeys * kKeys * size)),
        values_(static_cast<size_t>(slots * wide_)), scores_(static_cast<size_t>(slots + 2 * kKeys)),
        query_(static_cast<size_t>(size)), sums_(static_cast<size_t>(wide_)) {}

  template <typename T>
  void read(const T* keys, int64_t key_row, const T* values, int64_t value_row) {
    for (int64_t slot = 0; slot < slots_; ++slot) {
      float* block = keys_.data() + slot / kKeys * kKeys * size_ + slot % kKeys;
      for (int64_t d = 0; d < size_; ++d) {
        block[d * kKeys] = load(keys + slot * key_row, d);
        values_[static_cast<size_t>(slot * wide_ + d)] = load(values + slot * value_row, d);
      }
    }
  }

  // The row that is attended next: it sees `prefix` slots and `count` nodes behind them.
  void look(int64_t prefix, const int32_t* nodes, int64_t count) {
    prefix_ = prefix, nodes_ = nodes, count_ = prefix + count;
    own_keys_.assign(static_cast<size_t>((count + kKeys - 1) / kKeys * kKeys * size_), 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = prefix + nodes[i];
      const float* from = keys_.data() + slot / kKeys * kKeys * size_ + slot % kKeys;
      float* to = own_keys_.data() + i / kKeys * kKeys * size_ + i % kKeys;
      for (int64_t d = 0; d < size_; ++d) to[d * kKeys] = from[d * kKeys];
    }
  }

  // One query of that row.
  template <typename T>
  void attend(const T* query, float scale, T* out) {
    if (count_ == 0) {
      for (int64_t d = 0; d < size_; ++d) store(out + d, 0.0f);
      return;
    }
    for (int64_t d = 0; d < size_; ++d) query_[static_cast<size_t>(d)] = load(query, d) * scale;
    float* scores = scores_.data();
    // A block may end in slots that the row does not see: the scores of its own keys take their places.
    for (int64_t first = 0; first < prefix_; first += kKeys)
      block_scores(query_.data(), keys_.data() + first * size_, size_, scores + first);
    for (int64_t first = 0; first < count_ - prefix_; first += kKeys)
      block_scores(query_.data(), own_keys_.data() + first * size_, size_, scores + prefix_ + first);
    const float peak = *std::max_element(scores, scores + count_);
    const float sum = softmax_weights(scores, count_, peak);
    for (int64_t first = 0; first < wide_; first += kChannels) sum_values(first);
    for (int64_t d = 0; d < size_; ++d) store(out + d, sums_[static_cast<size_t>(d)] / sum);
  }

 private:
  void sum_values(int64_t first) {
    float* sums = sums_.data() + first;
    std::fill(sums, sums + kChannels, 0.0f);
    add_values(scores_.data(), values_.data() + first, prefix_, wide_, sums);
    for (int64_t j = prefix_; j < count_; ++j)
      add_values(scores_.data() + j, values_.data() + (prefix_ + nodes_[j - prefix_]) * wide_ + first, 1, wide_, sums);
  }

  const int32_t* nodes_ = nullptr;
  int64_t prefix_ = 0, count_ = 0;
  int64_t slots_, size_, wide_;
  std::vector<float> keys_, values_, own_keys_, scores_, query_, sums_;
};

// query, out: [heads * groups, rows, size]. Slots behind the last that a row sees are not read.
template <typename T>
void strict_attention(const AttentionShape& shape, const T* query, const T* keys, const T* values,
                      const RowPaths& paths, T* out) {
  const int64_t live = std::min(shape.rows, paths.live);
  int64_t slots = live > 0 ? paths.prefix : 0;
  for (int64_t row = 0; row < live; ++row)
    if (const int64_t count = paths.counts[row])
      slots = std::max(slots, paths.prefix + paths.nodes[row * paths.columns + count - 1] + 1);
  StrictHead head(slots, shape.size);
  for (int64_t h = 0; h < shape.heads; ++h) {
    head.read(keys + h * shape.key_head, shape.key_row, values + h * shape.value_head, shape.value_row);
    for (int64_t row = 0; row < shape.rows; ++row) {
      if (row < live)
        head.look(paths.prefix, paths.nodes + row * paths.columns, paths.counts[row]);
      else
        head.look(0, nullptr, 0);
      for (int64_t g = 0; g < shape.groups; ++g) {
        const int64_t place = ((h * shape.groups + g) * shape.rows + row) * shape.size;
        head.attend(query + place, shape.scale, out + place);
      }
    }
  }
}

}  // namespace spec
