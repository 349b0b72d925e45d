// What recurrent mixers keep of a text, and how the rows of a tree go on from it.
//
// A mixer's state stands behind the first `folded` tokens. The rows of later forwards are kept by slot, as keys are, with
// what they add to a state: the next forward first folds those that were committed meanwhile, then runs its own rows, each
// from its parent. So a rejected branch costs nothing, and a row goes through the same operations in a tree, in a chain and
// in a prompt.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/layer.hpp"

namespace cpu {

// The sizes of a network's recurrent mixers, all alike: causal convolutions, and states of heads where there are any.
struct Recurrence {
  int64_t layers = 0;    // that have such a mixer
  int64_t channels = 0;  // of the convolution
  int64_t taps = 0;      // tokens that it reads, the row's own included
  int64_t key_heads = 0, heads = 0;           // of keys and queries, and of values and states
  int64_t key_size = 0, value_size = 0;       // channels of each
  int64_t norms = 0;     // of Mamba-2: groups of channels of what its heads give, each normed by itself; 0: none is
  bool gated_last = false;  // of Mamba-2: the gates multiply what was normed

  int64_t keys() const { return key_heads * key_size; }  // channels of all keys
  int64_t values() const { return heads * value_size; }
  int64_t width() const { return rounded_up(channels, kRows); }  // of a kept row
  int64_t blocks() const { return value_size / kRows; }          // of 16 columns of a state
  int64_t block_floats() const { return key_size * kRows; }
  int64_t state_floats() const { return heads * blocks() * block_floats(); }  // of a layer
  int64_t scalars() const { return 2 * heads; }                               // of a kept row: decays, then rates

  bool operator==(const Recurrence& other) const {
    return layers == other.layers && channels == other.channels && taps == other.taps && key_heads == other.key_heads &&
           heads == other.heads && key_size == other.key_size && value_size == other.value_size && norms == other.norms &&
           gated_last == other.gated_last;
  }
};

// The memory of one sequence. Slots are those of the cache beside it.
class Memory {
 public:
  explicit Memory(const Recurrence& of)
      : of_(of), states_(static_cast<size_t>(of.layers * of.state_floats())),
        tails_(static_cast<size_t>(2 * of.layers * tail_floats())) {}

  const Recurrence& of() const { return of_; }
  int64_t folded() const { return folded_; }
  int64_t marked() const { return mark_.folded; }

  int64_t bytes() const {
    const size_t floats = states_.size() + tails_.size() + rows_.size() + scalars_.size() + mark_.states.size() + mark_.tails.size();
    return static_cast<int64_t>(floats * sizeof(float));
  }

  // Return the most slots, up to `length`, that `crop` can keep.
  int64_t reach(int64_t length) const {
    if (folded_ >= 0 && length >= folded_) return length;
    return length >= mark_.folded ? mark_.folded : 0;
  }

  // Forget all from slot reach(length) on.
  void crop(int64_t length) {
    const int64_t kept = reach(length);
    if (kept < mark_.folded) mark_ = Mark();
    if (folded_ >= 0 && length >= folded_) return;
    slots_.clear();
    folded_ = kept;
    if (kept) {
      states_ = mark_.states;
      std::copy(mark_.tails.begin(), mark_.tails.end(), tails_.begin() + parity_ * of_.layers * tail_floats());
      return;
    }
    std::fill(states_.begin(), states_.end(), 0.0f);
    std::fill(tails_.begin(), tails_.end(), 0.0f);
  }

  // Keep a copy of the states, to which `crop` can go back.
  void mark() {
    if (folded_ <= 0) return;
    const auto from = tails_.begin() + parity_ * of_.layers * tail_floats();
    mark_ = {folded_, states_, {from, from + of_.layers * tail_floats()}};
  }

  // Slot length + path[j] becomes slot length + j. path: ascending from 0.
  void keep(int64_t length, const int64_t* path, int64_t count) {
    const int64_t first = length - folded_, rows = static_cast<int64_t>(slots_.size());
    for (int64_t j = 0; j < count; ++j)
      if (folded_ < 0 || first < 0 || path[j] < j || first + path[j] >= rows)
        throw std::invalid_argument("path: slot " + std::to_string(length + path[j]) + " was not run");
    for (int64_t j = 0; j < count; ++j)
      slots_[static_cast<size_t>(first + j)] = slots_[static_cast<size_t>(first + path[j])];
  }

 private:
  friend class Lineage;

  struct Mark {
    int64_t folded = 0;
    std::vector<float> states, tails;
  };
  // Where the row of a slot behind the folded ones is kept, and the slot of its parent.
  struct Slot {
    int64_t place, parent;
  };

  int64_t tail_floats() const { return (of_.taps - 1) * of_.width(); }

  const Recurrence of_;
  int64_t folded_ = 0;  // tokens; negative where a forward was broken off
  int parity_ = 0, half_ = 0;  // which of the tails, and which half of the rows, is in use
  int64_t capacity_ = 0;       // rows of a half
  std::vector<float> states_;  // [layers][heads][blocks][key size][16]
  std::vector<float> tails_;   // [2][layers][taps - 1][width]: the convolutions' last inputs, the newest last
  std::vector<float> rows_;    // [2][layers][capacity][width]: inputs of the convolutions
  std::vector<float> scalars_;  // [2][layers][capacity][scalars]
  std::vector<Slot> slots_;    // those behind the folded ones
  Mark mark_;
};

// The rows that a forward runs through the mixers: those to fold, those of earlier forwards that its own descend from, and
// its own.
class Lineage {
 public:
  struct Item {
    int64_t parent;  // an item before it, or kFolded
    int64_t row;     // of the forward, or kEarlier
    int64_t place;   // of a kept row
    int64_t inner;   // its number among the items of a tree that are parents, or kLeaf
  };
  static constexpr int64_t kFolded = -1, kEarlier = -1, kLeaf = -1;

  // committed: slots of the cache that hold tokens for good; without words, the forward's rows are committed as well.
  void begin(Memory& memory, const Rows& rows, int64_t committed) {
    memory_ = &memory;
    const int64_t folded = memory.folded_, kept = static_cast<int64_t>(memory.slots_.size());
    if (folded < 0) throw std::invalid_argument("memory: a forward was broken off; crop it");
    if (committed < folded || committed > folded + kept || rows.start < committed || rows.start > folded + kept)
      throw std::invalid_argument("memory: holds slots " + std::to_string(folded) + " to " + std::to_string(folded + kept) +
                                  ", got " + std::to_string(committed) + " committed and rows from " +
                                  std::to_string(rows.start));
    commits_ = !rows.seen;
    chain_ = committed - folded;
    if ((commits_ || chain_) && rows.start != committed)
      throw std::invalid_argument("memory: rows from " + std::to_string(rows.start) + ", accepted " + std::to_string(committed));
    items_.clear();
    slots_.clear();
    from_ = to_ = memory.half_;
    for (int64_t i = 0; i < chain_; ++i)
      items_.push_back({i - 1, kEarlier, memory.slots_[static_cast<size_t>(i)].place, kLeaf});
    first_place_ = rows.start - committed;
    if (commits_)
      for (int64_t r = 0; r < rows.count; ++r) items_.push_back({chain_ + r - 1, r, 0, kLeaf});
    else
      add_tree(rows, committed);
    folded_ = folded;
    memory.folded_ = -1;  // until the end
    if (chain_) to_ = 1 - from_;
    if (!commits_) make_room(first_place_ + rows.count);
    next_ = commits_ ? committed + rows.count : committed;
    number_inner();
    find_sources();
  }

  // The states are those behind what was committed; the rows of a tree are kept.
  void end() {
    Memory& memory = *memory_;
    if (moves_tail()) memory.parity_ = 1 - memory.parity_;
    memory.half_ = to_;
    memory.slots_ = std::move(slots_);
    memory.folded_ = next_;
  }

  // Nothing was run: the memory stays as it was.
  void leave() { memory_->folded_ = folded_; }

  const std::vector<Item>& items() const { return items_; }
  int64_t count() const { return static_cast<int64_t>(items_.size()); }
  int64_t chain() const { return commits_ ? count() : chain_; }  // the first items, each the next one's parent, are folded
  bool commits() const { return commits_; }
  int64_t inner() const { return inner_; }  // items of a tree that are parents
  bool moves_tail() const { return chain() > 0; }

  // The places of the items that a row reads, the oldest first: an item, or -1 - t for the t-th newest of the tail.
  const int64_t* sources(int64_t item) const { return sources_.data() + item * memory_->of_.taps; }
  int64_t tail_source(int64_t place) const { return tail_[static_cast<size_t>(place)]; }  // of the next tail, [taps - 1]

  float* state(int64_t layer, int64_t head, int64_t block) const {
    const Recurrence& of = memory_->of_;
    return memory_->states_.data() + layer * of.state_floats() + (head * of.blocks() + block) * of.block_floats();
  }
  float* tail(int64_t layer, bool next) const {
    const int parity = next ? 1 - memory_->parity_ : memory_->parity_;
    return memory_->tails_.data() + (parity * memory_->of_.layers + layer) * memory_->tail_floats();
  }
  // Where the forward's own rows of a tree are kept, one behind the other.
  float* own_rows(int64_t layer) const { return kept_row(layer, to_, first_place_); }
  float* own_scalars(int64_t layer) const { return kept_scalars(layer, to_, first_place_); }
  float* row_of(int64_t layer, const Item& item) const { return kept_row(layer, half_of(item), item.place); }
  float* scalars_of(int64_t layer, const Item& item) const { return kept_scalars(layer, half_of(item), item.place); }

 private:
  int half_of(const Item& item) const { return item.row == kEarlier ? from_ : to_; }
  float* kept_row(int64_t layer, int half, int64_t place) const {
    const Recurrence& of = memory_->of_;
    return memory_->rows_.data() + ((half * of.layers + layer) * memory_->capacity_ + place) * of.width();
  }
  float* kept_scalars(int64_t layer, int half, int64_t place) const {
    const Recurrence& of = memory_->of_;
    return memory_->scalars_.data() + ((half * of.layers + layer) * memory_->capacity_ + place) * of.scalars();
  }

  // The forward's rows, and the earlier ones behind the committed slots that they descend from.
  void add_tree(const Rows& rows, int64_t committed) {
    Memory& memory = *memory_;
    const int64_t earlier = rows.start - committed, behind = committed - memory.folded_;
    slots_.assign(memory.slots_.begin() + behind, memory.slots_.begin() + behind + earlier);
    for (int64_t r = 0; r < rows.count; ++r) {
      int64_t parent = rows.start + r - 1;
      while (parent >= committed && !rows.sees(rows.first + r, parent)) --parent;
      slots_.push_back({earlier + r, parent});
    }
    std::vector<char> needed(slots_.size(), 0);
    for (int64_t i = static_cast<int64_t>(slots_.size()) - 1; i >= 0; --i) {
      const auto at = static_cast<size_t>(i);
      needed[at] |= i >= earlier;
      const int64_t parent = slots_[at].parent - committed;
      if (needed[at] && parent >= 0) needed[static_cast<size_t>(parent)] = 1;
    }
    std::vector<int64_t> item(slots_.size(), kFolded);
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!needed[i]) continue;
      item[i] = count();
      const int64_t parent = slots_[i].parent - committed, row = static_cast<int64_t>(i) - earlier;
      const int64_t above = parent >= 0 ? item[static_cast<size_t>(parent)] : chain_ - 1;
      items_.push_back({above, row >= 0 ? row : kEarlier, slots_[i].place, kLeaf});
    }
  }

  // Rows are kept in two halves, so that those to fold stay while others are written.
  void make_room(int64_t wanted) {
    Memory& memory = *memory_;
    const Recurrence& of = memory.of_;
    if (wanted <= memory.capacity_) return;
    const int64_t capacity = rounded_up(wanted, kRows);
    memory.rows_ = grown(memory.rows_, of.width(), capacity);
    memory.scalars_ = grown(memory.scalars_, of.scalars(), capacity);
    memory.capacity_ = capacity;
  }
  std::vector<float> grown(const std::vector<float>& rows, int64_t width, int64_t capacity) const {
    const int64_t have = memory_->capacity_, planes = 2 * memory_->of_.layers;
    std::vector<float> found(static_cast<size_t>(planes * capacity * width));
    for (int64_t p = 0; p < planes && have; ++p)
      std::copy_n(rows.begin() + p * have * width, have * width, found.begin() + p * capacity * width);
    return found;
  }

  void number_inner() {
    inner_ = 0;
    for (const Item& item : items_) {
      if (item.parent < chain()) continue;
      Item& parent = items_[static_cast<size_t>(item.parent)];
      if (parent.inner == kLeaf) parent.inner = inner_++;
    }
  }

  void find_sources() {
    const int64_t taps = memory_->of_.taps;
    sources_.resize(static_cast<size_t>(count() * taps));
    for (int64_t i = 0; i < count(); ++i) {
      int64_t at = i;
      for (int64_t t = taps - 1; t >= 0; --t) {
        sources_[static_cast<size_t>(i * taps + t)] = at;
        at = at >= 0 ? items_[static_cast<size_t>(at)].parent : at - 1;
      }
    }
    tail_.resize(static_cast<size_t>(taps - 1));
    for (int64_t t = 0; t < taps - 1; ++t) tail_[static_cast<size_t>(t)] = chain() - (taps - 1) + t;
  }

  Memory* memory_ = nullptr;
  std::vector<Item> items_;
  std::vector<Memory::Slot> slots_;
  std::vector<int64_t> sources_, tail_;
  int64_t chain_ = 0, inner_ = 0, next_ = 0, first_place_ = 0, folded_ = 0;
  int from_ = 0, to_ = 0;
  bool commits_ = false;
};

// The lineages of all lanes of a forward. Their items stand one lane's behind another's, as their rows do.
class Lineages {
 public:
  // Of each lane its memory, and the slots that hold tokens for good.
  void begin(const std::vector<Memory*>& memories, const std::vector<Rows>& lanes, const std::vector<int64_t>& committed) {
    lanes_.resize(lanes.size());
    first_items_.clear();
    items_.clear();
    of_item_.clear();
    inner_ = 0;
    for (size_t i = 0; i < lanes.size(); ++i) {
      try {
        lanes_[i].begin(*memories[i], lanes[i], committed[i]);
      } catch (...) {
        for (size_t j = 0; j < i; ++j) lanes_[j].leave();
        throw;
      }
      const int64_t first = count(), own = lanes_[i].count() - lanes[i].count;
      first_items_.push_back(first);
      of_item_.insert(of_item_.end(), static_cast<size_t>(lanes_[i].count()), i);
      for (int64_t row = 0; row < lanes[i].count; ++row) items_.push_back(first + own + row);
      inner_ = std::max(inner_, lanes_[i].inner());
    }
    rows_ = lanes;
  }

  void end() {
    for (Lineage& lane : lanes_) lane.end();
  }

  size_t size() const { return lanes_.size(); }
  const Lineage& operator[](size_t lane) const { return lanes_[lane]; }
  int64_t count() const { return static_cast<int64_t>(of_item_.size()); }
  int64_t rows() const { return static_cast<int64_t>(items_.size()); }
  int64_t inner() const { return inner_; }  // the most items of a tree that are parents

  size_t lane_of(int64_t item) const { return of_item_[static_cast<size_t>(item)]; }
  int64_t first_item(size_t lane) const { return first_items_[lane]; }
  int64_t first_row(size_t lane) const { return rows_[lane].first; }
  int64_t rows_of(size_t lane) const { return rows_[lane].count; }
  int64_t item_of(int64_t row) const { return items_[static_cast<size_t>(row)]; }

 private:
  std::vector<Lineage> lanes_;
  std::vector<Rows> rows_;
  std::vector<int64_t> first_items_, items_;  // of each lane, of each row
  std::vector<size_t> of_item_;
  int64_t inner_ = 0;
};

}  // namespace cpu
