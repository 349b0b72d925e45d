// A network of experts: a router chooses some of them for each row, and what they give is added up by weights.
//
// Rows are grouped by expert, so that an expert's weights are read once for all rows that use it. A row's experts are added
// in the order of their numbers, each sum in an order of its own: its bits hang neither on the other rows nor on threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/kernels.hpp"
#include "cpu/memory.hpp"
#include "cpu/threads.hpp"

namespace cpu {

// How a router chooses a row's experts, and their weights.
struct Routing {
  int64_t chosen = 0;            // of each row
  bool sigmoid = false;          // scores are sigmoids of the router's logits, else their softmax
  bool normalised = false;       // weights are divided by their sum, and that is `least` or more
  float least = 0.0f, factor = 1.0f;  // weights are multiplied by the factor
  int64_t groups = 1, kept = 1;  // experts of the `kept` groups alone are chosen whose `rated` best are the best
  int64_t rated = 2;             // 1 or 2
};

// A feed-forward network: down(activation(gate(x)) * up(x)). Without panels of `up` it is down(activation(gate(x))), without
// those of `gate` down(activation(up(x)) * up(x)).
struct Network {
  Matrix gate, up, down;

  const Matrix& wide() const { return gate.panels ? gate : up; }
  int count() const { return gate.panels && up.panels ? 2 : 1; }  // of matrices that read the input
};

struct Experts {
  Matrix router;
  const float* choice = nullptr;    // [experts], added to scores where experts are chosen, not to their weights
  const float* scales = nullptr;    // [experts], of the weights of those that were chosen
  std::vector<Network> each;   // and, where it is `shared`, one more that all rows use
  bool shared = false;
  Matrix shared_gate;               // [1][hidden]: whose sigmoid is its weight; no panels: that is 1

  bool any() const { return !each.empty(); }
  int64_t count() const { return router.outputs; }
};

// Return e to the power x, the same bits everywhere: those of libraries differ in the last. Built without contraction.
inline double power_of_e(double x) {
  if (x != x) return x;
  x = std::min(std::max(x, -700.0), 700.0);
  const double n = std::floor(x * 0x1.71547652b82fep+0 + 0.5);
  const double r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
  double sum = 1.0;
  for (int i = 13; i > 0; --i) sum = sum * r / i + 1.0;
  return std::ldexp(sum, static_cast<int>(n));
}

// Tells which experts a forward used. The shared one does not count.
struct ExpertReads {
  int64_t distinct = 0;         // experts that some row used, over all layers
  int32_t* added = nullptr;     // [rows], or null: experts that no row before used, over all layers
  int32_t* routing = nullptr;   // [layers with experts][rows][chosen], ascending, or null

  void begin(int64_t rows) {
    distinct = 0;
    if (added) std::fill_n(added, rows, 0);
  }
};

// What forwards share: which rows use which expert, and what these give.
struct ExpertSpace {
  // An expert that some rows use.
  struct Slot {
    int64_t expert, start, rows;  // rows members[start] and on
    bool whole;                   // these are all rows, in their order
    int64_t gates, downs;         // panels of the slots before
    Input gated;                  // what its gated network gives, row after row

    int64_t tiles() const { return (rows + kRows - 1) / kRows; }
  };
  struct Scratch {
    Buffer<uint8_t> bytes;
    Buffer<float> sums;
    Buffer<uint32_t> rows;
  };

  int64_t stride = 0;              // of logits: experts and, behind them, the shared one
  Buffer<float> logits;            // [rows][stride]
  std::vector<int32_t> chosen;     // [rows][chosen], ascending
  std::vector<float> weights;      // [members], and before they are grouped [rows][chosen]
  std::vector<float> of_members;
  std::vector<int32_t> members;    // rows, by slot
  std::vector<int32_t> places;     // [rows][chosen, and the shared one]: members that a row is, ascending
  std::vector<Slot> slots;
  std::vector<int32_t> slot_of;    // [experts] while members are placed
  Buffer<uint32_t> gated;
  Buffer<float> given;             // [members][hidden, in whole panels]
  std::vector<Scratch> threads;
  ExpertReads* reads = nullptr;    // of the forward under way; those of some layer go behind those before
};

// Run the experts of one layer. `rate` has filled the logits.
class ExpertsRun {
 public:
  ExpertsRun(const Team& team, const Kernels& kernels, ExpertSpace& space, const Experts& experts, const Routing& routing,
             Activation activation, int64_t rows)
      : team_(team), kernels_(kernels), space_(space), experts_(experts), routing_(routing), activation_(activation),
        rows_(rows) {}

  // Make room for logits.
  void begin() {
    space_.stride = experts_.router.panels * kOutputs + kOutputs;
    space_.logits.reserve(static_cast<size_t>(rows_ * space_.stride));
    if (static_cast<int>(space_.threads.size()) < team_.count()) space_.threads.resize(static_cast<size_t>(team_.count()));
  }

  // Keep the products of the router's panel, or of the shared expert's gate.
  void rate(bool shared, int64_t panel, const float* sums) {
    const int64_t first = shared ? experts_.router.panels * kOutputs : panel * kOutputs;
    for (int64_t row = 0; row < rows_; row += kRows)
      kernels_.write(sums + row * kOutputs, kOutputs, std::min<int64_t>(kRows, rows_ - row),
                     space_.logits.data() + row * space_.stride + first, space_.stride, false);
  }

  // Gives sums to `to`, [tiles][hidden][16], times `factor`: adds them, or puts them there.
  void run(const Input& in, float* to, int64_t hidden, bool adds, float factor) {
    choose();
    group();
    if (space_.reads) tell(*space_.reads);
    gate(in);
    give(hidden);
    add_up(to, hidden, adds, factor);
  }

 private:
  int64_t per_row() const { return routing_.chosen + experts_.shared; }

  void choose() {
    space_.chosen.resize(static_cast<size_t>(rows_ * routing_.chosen));
    space_.weights.resize(static_cast<size_t>(rows_ * per_row()));
    team_.each(rows_, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t row = pieces.first; row < pieces.last; ++row)
          choose_of(space_.logits.data() + row * space_.stride, space_.chosen.data() + row * routing_.chosen,
                    space_.weights.data() + row * per_row());
    });
  }

  // Experts ascending, and their weights. logits become scores.
  void choose_of(float* logits, int32_t* chosen, float* weights) const {
    const int64_t count = experts_.count();
    if (experts_.shared)
      weights[routing_.chosen] =
          experts_.shared_gate.panels ? sigmoid(logits[experts_.router.panels * kOutputs]) : 1.0f;
    double total = 1.0, peak = 0.0;
    if (!routing_.sigmoid) {
      peak = static_cast<double>(*std::max_element(logits, logits + count));
      total = 0.0;
      for (int64_t e = 0; e < count; ++e) total += power_of_e(static_cast<double>(logits[e]) - peak);
    }
    const auto score = [&](int64_t e) {
      if (routing_.sigmoid) return sigmoid(logits[e]);
      return static_cast<float>(power_of_e(static_cast<double>(logits[e]) - peak) / total);
    };
    for (int64_t e = 0; e < count; ++e) logits[e] = score(e);
    pick(logits, chosen);
    float sum = 0.0f;
    for (int64_t i = 0; i < routing_.chosen; ++i) sum += weights[i] = logits[chosen[i]];
    if (sum < routing_.least) sum = routing_.least;
    for (int64_t i = 0; i < routing_.chosen; ++i) {
      if (routing_.normalised) weights[i] /= sum;
      weights[i] *= routing_.factor;
      if (experts_.scales) weights[i] *= experts_.scales[chosen[i]];
    }
  }

  static float sigmoid(float logit) { return static_cast<float>(1.0 / (1.0 + power_of_e(-static_cast<double>(logit)))); }

  // The experts of the highest scores, the lowest of equals, ascending; where scores are no numbers, the first ones.
  void pick(const float* scores, int32_t* chosen) const {
    const int64_t count = experts_.count(), size = count / routing_.groups;
    const auto rank = [&](int64_t e) { return scores[e] + (experts_.choice ? experts_.choice[e] : 0.0f); };
    // A group, or an expert, is left out whose bit is set.
    uint64_t groups = 0;
    for (int64_t left = routing_.groups; left > routing_.kept; --left) {
      int64_t worst = -1;
      float least = 0.0f;
      for (int64_t g = 0; g < routing_.groups; ++g) {
        if (groups >> g & 1) continue;
        float first = -std::numeric_limits<float>::infinity(), second = first;
        for (int64_t e = g * size; e < (g + 1) * size; ++e) {
          const float one = rank(e);
          if (one > first)
            second = first, first = one;
          else if (one > second)
            second = one;
        }
        const float sum = size > 1 && routing_.rated > 1 ? first + second : first;
        if (worst < 0 || sum <= least) worst = g, least = sum;
      }
      groups |= uint64_t{1} << worst;
    }
    for (int64_t i = 0; i < routing_.chosen; ++i) {
      int64_t best = -1;
      for (int64_t e = 0; e < count; ++e) {
        if (groups >> e / size & 1) continue;
        if (best >= 0 && !(rank(e) > rank(best))) continue;
        if (std::find(chosen, chosen + i, static_cast<int32_t>(e)) == chosen + i) best = e;
      }
      chosen[i] = static_cast<int32_t>(best);
    }
    std::sort(chosen, chosen + routing_.chosen);
  }

  // Makes a slot of each expert that is used, in the order of their numbers.
  void group() {
    const int64_t all = rows_ * per_row();
    std::vector<int32_t>& slot_of = space_.slot_of;
    slot_of.assign(static_cast<size_t>(experts_.count()), 0);
    for (const int32_t e : space_.chosen) ++slot_of[static_cast<size_t>(e)];
    space_.slots.clear();
    space_.members.resize(static_cast<size_t>(all));
    space_.of_members.resize(static_cast<size_t>(all));
    space_.places.resize(static_cast<size_t>(all));
    int64_t start = 0, gates = 0, downs = 0, words = 0;
    const auto add = [&](int64_t e, int64_t rows) {
      const Network& network = experts_.each[static_cast<size_t>(e)];
      Input gated;
      gated.stride = (network.wide().panels + network.wide().panels % 2) * kOutputs * kRows / (kernels_.pairs ? 2 : 1);
      gated.rows = rows;
      space_.slots.push_back({e, start, rows, rows == rows_, gates, downs, gated});
      start += rows, gates += network.wide().panels, downs += network.down.panels;
      words += gated.stride * space_.slots.back().tiles();
    };
    for (int64_t e = 0; e < experts_.count(); ++e) {
      int32_t& slot = slot_of[static_cast<size_t>(e)];
      const int64_t rows = slot;
      slot = static_cast<int32_t>(space_.slots.size());
      if (rows) add(e, rows);
    }
    if (experts_.shared) add(experts_.count(), rows_);
    uint32_t* gated = space_.gated.reserve(static_cast<size_t>(words));
    for (Slot& slot : space_.slots) {
      slot.gated.data = gated;
      gated += slot.gated.stride * slot.tiles();
      slot.rows = 0;  // until they are placed
    }
    for (int64_t row = 0; row < rows_; ++row)
      for (int64_t i = 0; i < per_row(); ++i) {
        const bool own = i < routing_.chosen;
        const int32_t expert = own ? space_.chosen[static_cast<size_t>(row * routing_.chosen + i)] : 0;
        Slot& slot = own ? space_.slots[static_cast<size_t>(slot_of[static_cast<size_t>(expert)])] : space_.slots.back();
        const auto place = static_cast<size_t>(slot.start + slot.rows++), from = static_cast<size_t>(row * per_row() + i);
        space_.members[place] = static_cast<int32_t>(row);
        space_.of_members[place] = space_.weights[from];
        space_.places[from] = static_cast<int32_t>(place);
      }
    gates_ = gates, downs_ = downs, members_ = all;
  }

  // A slot's first member is the first row that uses the expert, as rows are placed in their order.
  void tell(ExpertReads& reads) const {
    for (const Slot& slot : space_.slots) {
      if (slot.expert == experts_.count()) continue;  // the shared one
      ++reads.distinct;
      if (reads.added) ++reads.added[space_.members[static_cast<size_t>(slot.start)]];
    }
    if (reads.routing) reads.routing = std::copy(space_.chosen.begin(), space_.chosen.end(), reads.routing);
  }

  using Slot = ExpertSpace::Slot;
  using Scratch = ExpertSpace::Scratch;

  // The slot of a panel, counted through all of them as `before` says.
  const Slot& slot_at(int64_t panel, int64_t Slot::*before) const {
    const auto behind = std::upper_bound(space_.slots.begin(), space_.slots.end(), panel,
                                         [&](int64_t at, const Slot& slot) { return at < slot.*before; });
    return *(behind - 1);
  }

  const Network& network(const Slot& slot) const { return experts_.each[static_cast<size_t>(slot.expert)]; }

  // The rows of a slot, side by side.
  Input input_of(const Slot& slot, const Input& in, Scratch& mine) const {
    if (slot.whole) return in;
    Input some;
    some.stride = in.stride, some.rows = slot.rows;
    some.data = mine.rows.reserve(static_cast<size_t>(in.stride * slot.tiles()));
    for (int64_t i = 0; i < slot.rows; ++i) {
      const int64_t row = space_.members[static_cast<size_t>(slot.start + i)];
      const uint32_t* from = in.data + row / kRows * in.stride + row % kRows;
      uint32_t* to = some.data + i / kRows * in.stride + i % kRows;
      for (int64_t word = 0; word < in.stride; word += kRows) to[word] = from[word];
    }
    return some;
  }

  uint8_t* prepare(const Slot& slot, const Matrix& one, const Matrix& other, const Input& in, Scratch& mine) const {
    uint8_t* scratch = mine.bytes.reserve(static_cast<size_t>(scratch_bytes(one.blocks, slot.tiles())));
    kernels_.prepare(one, in, slot.rows, scratch);
    if (other.kind != one.kind) kernels_.prepare(other, in, slot.rows, scratch);
    return scratch;
  }

  void gate(const Input& in) {
    team_.each(gates_, 1, [&](Pieces& pieces) {
      Scratch& mine = space_.threads[static_cast<size_t>(pieces.index())];
      const Slot* slot = nullptr;
      Input rows;
      uint8_t* scratch = nullptr;
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          const Slot& of = slot_at(i, &Slot::gates);
          const Network& matrices = network(of);
          if (&of != slot) {
            rows = input_of(of, in, mine);
            scratch = prepare(of, matrices.wide(), matrices.up, rows, mine);
          }
          slot = &of;
          gate_panel(of, matrices, i - of.gates, rows, scratch, mine);
        }
    });
  }

  void gate_panel(const Slot& slot, const Network& network, int64_t panel, const Input& in, uint8_t* scratch,
                  Scratch& mine) const {
    const int64_t tiles = slot.tiles(), size = tiles * kOutputs * kRows;
    float* sums = mine.sums.reserve(static_cast<size_t>(2 * size));
    const int count = network.count();
    float* const to[2] = {sums, count == 2 ? sums + size : sums};
    const Matrix* matrices[2] = {&network.wide(), &network.up};
    const int64_t panels[2] = {panel, panel};
    kernels_.products(matrices, panels, count, in, tiles, slot.rows, to, scratch);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t at = t * kOutputs * kRows;
      kernels_.gate(to[0] + at, to[1] + at, slot.gated, t, panel * kOutputs, activation_);
      if (panel + 1 < network.wide().panels || network.wide().panels % 2 == 0) continue;
      const int64_t words = kOutputs * kRows / (kernels_.pairs ? 2 : 1);  // half a block that no output fills
      std::fill_n(slot.gated.data + (t + 1) * slot.gated.stride - words, words, 0u);
    }
  }

  void give(int64_t hidden) {
    const int64_t width = (hidden + kOutputs - 1) / kOutputs * kOutputs;
    float* const given = space_.given.reserve(static_cast<size_t>(members_ * width));
    team_.each(downs_, 2, [&](Pieces& pieces) {
      Scratch& mine = space_.threads[static_cast<size_t>(pieces.index())];
      const Slot* slot = nullptr;
      uint8_t* scratch = nullptr;
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last;) {
          const Slot& of = slot_at(i, &Slot::downs);
          const Matrix& down = network(of).down;
          if (&of != slot) scratch = prepare(of, down, down, of.gated, mine);
          slot = &of;
          const int64_t panel = i - of.downs;
          const int count = i + 1 < pieces.last && panel + 1 < down.panels ? 2 : 1;
          give_panels(of, down, panel, count, scratch, mine, given + of.start * width, width);
          i += count;
        }
    });
  }

  void give_panels(const Slot& slot, const Matrix& down, int64_t panel, int count, uint8_t* scratch, Scratch& mine, float* to,
                   int64_t width) const {
    const int64_t tiles = slot.tiles(), size = tiles * kOutputs * kRows;
    float* sums = mine.sums.reserve(static_cast<size_t>(2 * size));
    float* const found[2] = {sums, sums + size};
    const Matrix* matrices[2] = {&down, &down};
    const int64_t panels[2] = {panel, panel + 1};
    kernels_.products(matrices, panels, count, slot.gated, tiles, slot.rows, found, scratch);
    for (int i = 0; i < count; ++i)
      for (int64_t row = 0; row < slot.rows; row += kRows)
        kernels_.write(found[i] + row * kOutputs, kOutputs, std::min<int64_t>(kRows, slot.rows - row),
                       to + row * width + panels[i] * kOutputs, width, false);
  }

  void add_up(float* to, int64_t hidden, bool adds, float factor) {
    constexpr int64_t kChannels = 128;
    const int64_t width = (hidden + kOutputs - 1) / kOutputs * kOutputs, chunks = (hidden + kChannels - 1) / kChannels;
    const float* const given = space_.given.data();
    team_.each((rows_ + kRows - 1) / kRows * chunks, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          const int64_t tile = i / chunks, first = i % chunks * kChannels, count = std::min(kChannels, hidden - first);
          for (int64_t row = tile * kRows; row < std::min((tile + 1) * kRows, rows_); ++row) {
            float sums[kChannels];
            add_up_row(row, given + first, width, count, sums);
            float* at = to + (tile * hidden + first) * kRows + row % kRows;
            for (int64_t c = 0; c < count; ++c) {
              const float sum = sums[c] * factor;
              at[c * kRows] = adds ? at[c * kRows] + sum : sum;
            }
          }
        }
    });
  }

  void add_up_row(int64_t row, const float* given, int64_t width, int64_t count, float* sums) const {
    for (int64_t i = 0; i < per_row(); ++i) {
      const int64_t place = space_.places[static_cast<size_t>(row * per_row() + i)];
      const float weight = space_.of_members[static_cast<size_t>(place)], *from = given + place * width;
      for (int64_t c = 0; c < count; ++c) {
        const float part = weight * from[c];
        sums[c] = i == 0 ? part : sums[c] + part;
      }
    }
  }

  const Team& team_;
  const Kernels& kernels_;
  ExpertSpace& space_;
  const Experts& experts_;
  const Routing& routing_;
  const Activation activation_;
  const int64_t rows_;
  int64_t gates_ = 0, downs_ = 0, members_ = 0;
};

}  // namespace cpu
