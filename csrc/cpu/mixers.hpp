// Recurrent mixers, which stand in the place of a layer's attention or beside it: what the files of the single ones have in common.
#pragma once

#include "cpu/recurrent.hpp"

namespace cpu {

// What the mixers of a network share: states by tile or by row, and the input of the product behind them.
struct MixerScratch {
  Buffer<float> rows, scalars;  // of a forward whose rows are committed as they come, [rows][...]
  Buffer<float> tiles;          // [tiles][channels][16]
  Buffer<float> gates;          // [rows][channels]
  Buffer<float> convolved;      // [items][width]
  Buffer<float> outs;           // [rows][channels]
  Buffer<uint32_t> mixed;
};

// The rows of a forward in one layer, of those that have a mixer.
class MixerRows {
 public:
  MixerRows(const Lineages& lanes, const Recurrence& of, int64_t layer, MixerScratch& scratch)
      : lanes_(lanes), of_(of), layer_(layer), apart_(lanes.size() > 1 || lanes[0].commits()),
        rows_(scratch.rows.reserve(static_cast<size_t>(apart_ ? lanes.rows() * of.width() : 0))),
        scalars_(scratch.scalars.reserve(static_cast<size_t>(apart_ ? lanes.rows() * of.scalars() : 0))) {}

  int64_t item_of(int64_t row) const { return lanes_.item_of(row); }
  bool is_own(int64_t item) const { return at(item).row != Lineage::kEarlier; }

  // Where the forward's rows are written, one behind the other.
  float* own() const { return apart_ ? rows_ : lanes_[0].own_rows(layer_); }
  float* own_scalars() const { return apart_ ? scalars_ : lanes_[0].own_scalars(layer_); }

  float* scalars(int64_t item) const {
    const size_t lane = lanes_.lane_of(item);
    const Lineage::Item& one = at(item);
    if (one.row == Lineage::kEarlier) return lanes_[lane].scalars_of(layer_, one);
    return own_scalars() + (lanes_.first_row(lane) + one.row) * of_.scalars();
  }

  // The inputs of an item's convolution, from `channel` on.
  void read(int64_t item, int64_t channel, const float** rows) const {
    const size_t lane = lanes_.lane_of(item);
    const int64_t* sources = lanes_[lane].sources(item - lanes_.first_item(lane));
    for (int64_t t = 0; t < of_.taps; ++t) rows[t] = row(lane, sources[t]) + channel;
  }

  // Writes the convolutions' last inputs behind what is committed.
  void move_tails() const {
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      if (!lanes_[lane].moves_tail()) continue;
      float* to = lanes_[lane].tail(layer_, true);
      for (int64_t t = 0; t + 1 < of_.taps; ++t)
        std::memcpy(to + t * of_.width(), row(lane, lanes_[lane].tail_source(t)), bytes(of_.width()));
    }
  }

  // Writes rows of trees, their scalars made, where their lanes keep them, if that is not where they are.
  void keep() const {
    if (!apart_) return;
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      if (lanes_[lane].commits()) continue;
      const int64_t first = lanes_.first_row(lane), count = lanes_.rows_of(lane);
      std::memcpy(lanes_[lane].own_rows(layer_), rows_ + first * of_.width(), bytes(count * of_.width()));
      if (of_.scalars())
        std::memcpy(lanes_[lane].own_scalars(layer_), scalars_ + first * of_.scalars(), bytes(count * of_.scalars()));
    }
  }

 private:
  static size_t bytes(int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); }

  const Lineage::Item& at(int64_t item) const {
    const size_t lane = lanes_.lane_of(item);
    return lanes_[lane].items()[static_cast<size_t>(item - lanes_.first_item(lane))];
  }

  const float* row(size_t lane, int64_t source) const {
    if (source < 0) return lanes_[lane].tail(layer_, false) + (of_.taps - 1 + source) * of_.width();
    const Lineage::Item& one = lanes_[lane].items()[static_cast<size_t>(source)];
    if (one.row == Lineage::kEarlier) return lanes_[lane].row_of(layer_, one);
    return own() + (lanes_.first_row(lane) + one.row) * of_.width();
  }

  const Lineages& lanes_;
  const Recurrence& of_;
  const int64_t layer_;
  const bool apart_;  // written apart from where they are kept
  float *rows_, *scalars_;
};

class Mixer {
 public:
  virtual ~Mixer() = default;

  // Of the rows behind a layer's norm, `in`, what the product `out()` reads. layer: among those that have a mixer.
  virtual void run(const Team& team, Workspace& space, const Lineages& lanes, int64_t layer, const Input& in,
                   MixerScratch& scratch, const Input& mixed) const = 0;

  const Matrix& out() const { return out_; }

 protected:
  explicit Mixer(const Matrix& out) : out_(out) {}

  // weights: [taps][channels]; returned with room up to `width` behind each.
  static std::vector<float> padded(const float* weights, int64_t taps, int64_t channels, int64_t width) {
    std::vector<float> found(static_cast<size_t>(taps * width), 0.0f);
    for (int64_t t = 0; t < taps; ++t) std::copy_n(weights + t * channels, channels, found.begin() + t * width);
    return found;
  }

 private:
  const Matrix out_;
};

// Where the queries, keys and values of a convolved row begin, and how its states take values up.
struct Update {
  int64_t query, key, value;
  bool delta;
};

// By head and 16 columns of its state: what is committed goes into the state, and each node of a tree from its parent's to
// one of its own, which is forgotten with the columns. outs: [rows][values], what the queries read.
inline void update_states(const Team& team, Workspace& space, const Lineages& lanes, const Recurrence& of,
                          const MixerRows& rows, int64_t layer, const float* convolved, const Update& from, float* outs) {
  const int64_t blocks = of.blocks(), size = of.block_floats(), shared = of.heads / of.key_heads, all = of.heads * blocks;
  team.each(static_cast<int64_t>(lanes.size()) * all + 1, 1, [&](Pieces& pieces) {
    ThreadScratch& mine = space.threads[static_cast<size_t>(pieces.index())];
    float* states = mine.floats.reserve(static_cast<size_t>((lanes.inner() + 1) * size));
    float* leaf = states + lanes.inner() * size;
    while (pieces.next())
      for (int64_t i = pieces.first; i < pieces.last; ++i) {
        const auto lane = static_cast<size_t>(i / all);
        if (lane == lanes.size()) {
          rows.keep();
          continue;
        }
        const Lineage& lineage = lanes[lane];
        const int64_t head = i % all / blocks, block = i % blocks, column = head * of.value_size + block * kRows;
        const int64_t key = head / shared * of.key_size, first = lanes.first_item(lane);
        float* state = lineage.state(layer, head, block);
        UpdateTask task{};
        task.delta = from.delta;
        task.size = of.key_size;
        for (int64_t at = 0; at < lineage.count(); ++at) {
          const Lineage::Item& item = lineage.items()[static_cast<size_t>(at)];
          const float *x = convolved + (first + at) * of.width(), *scalars = rows.scalars(first + at);
          task.before = task.after = state;
          if (at >= lineage.chain()) {
            if (item.parent >= lineage.chain())
              task.before = states + lineage.items()[static_cast<size_t>(item.parent)].inner * size;
            task.after = item.inner == Lineage::kLeaf ? leaf : states + item.inner * size;
          }
          task.query = x + from.query + key;
          task.key = x + from.key + key;
          task.value = x + from.value + column;
          task.decay = scalars[head];
          task.rate = scalars[of.heads + head];
          task.out = item.row == Lineage::kEarlier ? nullptr : outs + (lanes.first_row(lane) + item.row) * of.values() + column;
          space.kernels.update(task);
        }
      }
  });
}

// Rows [rows][stride] to a tile [channels][16]; what no row fills is zero.
inline void rows_to_tile(const float* rows, int64_t stride, int64_t count, int64_t channels, float* tile) {
  if (count < kRows) std::fill_n(tile, channels * kRows, 0.0f);
  for (int64_t lane = 0; lane < count; ++lane)
    for (int64_t c = 0; c < channels; ++c) tile[c * kRows + lane] = rows[lane * stride + c];
}

}  // namespace cpu
