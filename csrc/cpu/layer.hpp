// One decoder layer over the rows of a tree, of blocks that most families have: what target and draft have in common.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/angles.hpp"
#include "cpu/block_convolution.hpp"
#include "cpu/experts.hpp"
#include "cpu/kernels.hpp"
#include "cpu/memory.hpp"
#include "cpu/packing.hpp"
#include "cpu/threads.hpp"

namespace cpu {

inline int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

struct Heads {
  int64_t queries, keys, size;  // query heads, key-value heads, channels of each
  int64_t groups() const { return queries / keys; }
  int64_t channels() const { return (queries + 2 * keys) * size; }
  bool operator==(const Heads& other) const {
    return queries == other.queries && keys == other.keys && size == other.size;
  }
};

// Sizes of latent attention (latent.hpp). rank: channels of a latent; plain, turned: of a head's query, of which the key
// has the second; value: of a head's value; query_rank: of what queries are made of, 0 where that is the rows.
struct LatentSizes {
  int64_t rank = 0, plain = 0, turned = 0, value = 0, query_rank = 0;
  float eps = 0.0f;  // of its norms

  int64_t query() const { return plain + turned; }
};

// Hold the parts of latent attention. Without panels of q_a, q_b reads the rows.
struct Latent {
  Matrix q_a, q_b, kv_a;
  std::vector<Matrix> keys, values;  // of each head: [rank][plain], [value][rank]
  const float *q_norm = nullptr, *norm = nullptr;  // [query rank], [rank]: of latents
};

// A norm of hidden states, [hidden] each: an RMS norm or, where it is centred, a layer norm. Without weights there is none.
struct Norm {
  Norm(const float* weight = nullptr, const float* bias = nullptr, bool centred = false)
      : weight(weight), bias(bias), centred(centred) {}

  const float *weight, *bias;  // the bias may be null
  bool centred;                // the mean of a row's channels is subtracted before
};

// Hold the parts of a layer but its mixer. A norm that is null is left out.
struct Layer {
  Heads heads;
  Matrix q, k, v, o;  // without v: values are what keys are made of; without k: another layer's are read
  Latent latent;      // where there is one: instead of q, k and v
  Network network;
  Experts experts;  // where there are any: instead of the network, or, where there is one too, beside it
  Matrix head_gate;  // of what attention gives, by the sigmoid of an output for each channel or head; or without panels
  Norm input_norm, post_norm;  // of what attention and the network read
  const float *attention_norm = nullptr, *network_norm = nullptr;  // [hidden]: RMS norms of what they add
  bool parallel = false;       // the network reads what attention reads
  const float *q_norm = nullptr, *k_norm = nullptr;  // [head size], or of all heads' channels where they are `whole`
  const float* v_norm = nullptr;                     // [head size]
  const float* sinks = nullptr;  // [query heads]: scores beside those of slots
  // [hidden]: of what experts beside a network and their router read, and of what the network and the experts give
  const float *experts_norm = nullptr, *router_norm = nullptr, *dense_norm = nullptr, *mixed_norm = nullptr;
  Matrix own_gate, own_out;         // of the layer's own inputs, or without panels
  const float* own_norm = nullptr;  // [hidden]: of what these add
  float scale = 1.0f;               // of all that the layer gives
  BlockConvolution attention_convolution, network_convolution;  // around these
  bool whole_norms = false;
  bool ahead = false;  // rows see those after them, of their lane
  int rope = 0;        // of the network's tables; none: positions do not count
  int64_t window = 0;  // of attention: places that a row sees, its own included, and those ahead beside; 0: all

  static constexpr int kNone = -1;

  bool attends() const { return q.panels || latent.q_b.panels; }
  bool feeds() const { return network.down.panels || experts.any(); }
};

// How all layers of a network compute.
struct Form {
  int64_t hidden;
  float eps;
  Activation activation = Activation::silu;
  float scale = 0.0f;     // of attention's scores; 0: one over the root of a head's size
  float residual = 1.0f;  // what attention and the network give is multiplied by before it is added
  Routing routing = {};   // of the layers that have experts
  float added_eps = -1.0f;  // of norms of what is added; below 0: eps

  float eps_of_added() const { return added_eps < 0.0f ? eps : added_eps; }
  float scale_of(const Heads& heads) const {
    return scale > 0.0f ? scale : 1.0f / std::sqrt(static_cast<float>(heads.size));
  }
};

// Factors on turned queries: the first one below position `every`, the next one below twice that, and so on; the last one
// holds for all positions behind. None: queries stay as they are.
struct QueryFactors {
  int64_t every = 0;
  std::vector<float> factors;

  float at(int64_t position) const {
    return factors[static_cast<size_t>(std::min(position / every, static_cast<int64_t>(factors.size()) - 1))];
  }
};

// Rotary positions: frequencies and a factor, as transformers' rope initialisation gives them. exact: with angles.hpp's
// cosines and sines, which no library chooses.
class Rope {
 public:
  Rope(std::vector<float> frequencies, float factor, bool exact = false, QueryFactors queries = {})
      : queries(std::move(queries)), frequencies_(std::move(frequencies)), factor_(factor), exact_(exact) {}

  QueryFactors queries;

  int64_t half() const { return static_cast<int64_t>(frequencies_.size()); }

  // Cosines, then sines, of a position: [2][half].
  const float* at(int64_t position) const { return table_.data() + position * 2 * half(); }

  void reach(int64_t positions) {
    const int64_t have = static_cast<int64_t>(table_.size()) / (2 * half());
    if (positions <= have) return;
    const int64_t wanted = rounded_up(positions, 256);
    table_.resize(static_cast<size_t>(wanted * 2 * half()));
    for (int64_t p = have; p < wanted; ++p)
      for (int64_t i = 0; i < half(); ++i) {
        const float angle = static_cast<float>(p) * frequencies_[static_cast<size_t>(i)];
        const Turn turn = exact_ ? turn_by(angle) : Turn{std::cos(angle), std::sin(angle)};
        table_[static_cast<size_t>(p * 2 * half() + i)] = turn.cosine * factor_;
        table_[static_cast<size_t>((p * 2 + 1) * half() + i)] = turn.sine * factor_;
      }
  }

 private:
  std::vector<float> frequencies_, table_;
  float factor_;
  bool exact_;
};

// The rows of one text in a forward: where they stand and what they see. A forward takes rows of several texts, of lanes,
// one lane's behind another's.
struct Rows {
  int64_t count = 0;
  int64_t first = 0;                   // its first row among those of the forward
  const int64_t* positions = nullptr;  // [count]
  int64_t prefix = 0;                  // cache slots that all rows see
  int64_t start = 0;                   // the slot of row 0; prefix <= start
  const uint64_t* seen = nullptr;      // [count][words]: bit j, slot prefix + j; null: every slot up to the row's own
  int64_t words = 0;

  // row: among those of the forward.
  bool sees(int64_t row, int64_t slot) const {
    if (slot < prefix) return true;
    if (!seen) return slot <= slot_of(row);
    const int64_t bit = slot - prefix;
    return bit / 64 < words && (seen[(row - first) * words + bit / 64] >> bit % 64 & 1);
  }

  // Has all rows see the prefix alone, not even themselves.
  void see_prefix() {
    static constexpr uint64_t kNone = 0;
    seen = &kNone, words = 0;
  }

  // The cache slot of a row of the forward.
  int64_t slot_of(int64_t row) const { return start + row - first; }
};

// Keys and values of one layer: [2][key-value heads][capacity][head size]; one of these where they are the same numbers.
struct Cache {
  void* data = nullptr;
  int64_t capacity = 0;
  bool half = false;    // bfloat16, else float
  bool shared = false;  // keys are values

  void* plane(int64_t which, int64_t head, const Heads& heads) const {
    const int64_t slots = ((shared ? 0 : which) * heads.keys + head) * capacity;
    return static_cast<char*>(data) + slots * heads.size * (half ? 2 : 4);
  }
};

struct ThreadScratch {
  Buffer<uint8_t> bytes;
  Buffer<uint16_t> chunks;
  Buffer<float> sums, floats;
};

// The cosines and sines of a forward's rows, [tiles][half][16], and the factors on queries, [tiles][16] where there are any.
struct Turns {
  int64_t half = 0;
  bool scales = false;
  Buffer<float> cosines, sines, factors;
};

// Queries of a key-value head side by side, row by row: up to 16 of one tile. Its slots are counted from `base` on.
struct Group {
  int64_t tile, first, count;  // queries first to first + count - 1 of the tile
  int64_t base;                // a multiple of kChunk; 0 where attention is full
  int64_t prefix, slots;
  int64_t step, steps;     // where its steps begin, and how many there are
  int32_t begins[kRows];   // the first slot that each lane sees
  int64_t lead;            // the largest of them
};

// The groups of one lane, and the slots that they read.
struct Part {
  int64_t first, count;
  int64_t base, reach;  // the first slot of all groups, and what is behind the last one's
};

// What layers with the same sight have in common.
struct View {
  int64_t window = 0;   // 0: all
  int64_t per_row = 1;  // query heads of a key-value head
  bool ahead = false;   // rows see those after them
  bool operator==(const View& other) const {
    return window == other.window && per_row == other.per_row && ahead == other.ahead;
  }
};

// Who sees what in the layers of one view.
struct Sight {
  View view;
  std::vector<Group> groups;
  std::vector<Part> parts;  // of each lane
  std::vector<Step> steps;
  int64_t most_slots = 0, most_steps = 0;  // of a group

  int64_t span() const {  // of the widest lane
    int64_t most = 0;
    for (const Part& part : parts) most = std::max(most, part.reach - part.base);
    return most;
  }
};

// What forwards of one network share: states by tile, inputs of products, and who sees what.
class Workspace {
 public:
  // views: of the network's layers with attention.
  Workspace(const Kernels& kernels, const std::vector<View>& views) : kernels(kernels) {
    for (const View& view : views)
      if (!find(view)) sights_.emplace_back().view = view;
  }

  const Kernels& kernels;
  int64_t tiles = 0, rows = 0;
  float* x = nullptr;       // [tiles][hidden][16], the residual stream
  float* qkv = nullptr;     // [tiles][channels][16]
  float* added = nullptr;   // [tiles][hidden][16]: what is normed before it is added
  float* gates = nullptr;   // [tiles][query channels][16], where attention is gated
  std::vector<ThreadScratch> threads;

  // lanes: each one's rows behind those of the one before; heads: all kinds of them.
  void prepare(const std::vector<Rows>& lanes, int64_t hidden, const std::vector<Heads>& heads, std::vector<Rope>& ropes,
               int team) {
    int64_t channels = 0, gated = 0;
    for (const Heads& kind : heads) {
      channels = std::max(channels, kind.channels());
      gated = std::max(gated, rounded_up(kind.queries * kind.size, kOutputs));
    }
    rows = lanes.back().first + lanes.back().count;
    tiles = (rows + kRows - 1) / kRows;
    x = states_.reserve(static_cast<size_t>(tiles * hidden * kRows));
    std::memset(x + (tiles - 1) * hidden * kRows, 0, static_cast<size_t>(hidden * kRows) * sizeof(float));
    // rows within a tile are read as vectors, which may reach behind the last one
    qkv = qkv_.reserve(static_cast<size_t>(tiles * channels * kRows + kRows));
    added = added_.reserve(static_cast<size_t>(tiles * hidden * kRows));
    gates = gates_.reserve(static_cast<size_t>(tiles * gated * kRows));
    turns_.resize(ropes.size());
    for (size_t i = 0; i < ropes.size(); ++i) place_rotations(lanes, ropes[i], turns_[i]);
    for (Sight& sight : sights_) group(lanes, sight);
    if (static_cast<int>(threads.size()) < team) threads.resize(static_cast<size_t>(team));
  }

  const Turns& turns(int rope) const { return turns_[static_cast<size_t>(rope)]; }
  const Sight& sight(const View& view) const { return *find(view); }

  // An input of so many channels for all tiles; what no row fills is zero.
  Input input(Buffer<uint32_t>& buffer, int64_t channels) const {
    Input in;
    in.stride = rounded_up(channels, kDepth) * kRows / (kernels.pairs ? 2 : 1);
    in.rows = rows;
    const size_t size = static_cast<size_t>(in.stride * tiles);
    in.data = buffer.reserve(size);
    std::memset(in.data, 0, size * sizeof(uint32_t));
    return in;
  }

  // Run on each thread before and after its kernels.
  Pool::Around around() const { return {kernels.begin, kernels.end}; }

  Buffer<uint32_t> first, second, third, rated;
  Buffer<float> beside;  // [tiles][hidden][16], of a network with experts beside it
  Buffer<float> plain, kernels_of_rows;  // [tiles][hidden][16], [tiles][outputs][16]: what a convolution reads
  ExpertSpace experts;

 private:
  const Sight* find(const View& view) const {
    for (const Sight& one : sights_)
      if (one.view == view) return &one;
    return nullptr;
  }

  void place_rotations(const std::vector<Rows>& lanes, Rope& rope, Turns& turns) const {
    int64_t last = 0;
    for (const Rows& given : lanes) last = std::max(last, *std::max_element(given.positions, given.positions + given.count));
    rope.reach(last + 1);
    const int64_t half = rope.half();
    turns.half = half;
    float* cosines = turns.cosines.reserve(static_cast<size_t>(tiles * half * kRows));
    float* sines = turns.sines.reserve(static_cast<size_t>(tiles * half * kRows));
    turns.scales = rope.queries.every > 0;
    float* factors = turns.factors.reserve(static_cast<size_t>(turns.scales ? tiles * kRows : 0));
    for (const Rows& given : lanes)
      for (int64_t r = given.first; r < given.first + given.count; ++r) {
        const int64_t position = given.positions[r - given.first];
        if (turns.scales) factors[r] = rope.queries.at(position);
        const float* from = rope.at(position);
        const int64_t to = r / kRows * half * kRows + r % kRows;
        for (int64_t i = 0; i < half; ++i) {
          cosines[to + i * kRows] = from[i];
          sines[to + i * kRows] = from[half + i];
        }
      }
  }

  void group(const std::vector<Rows>& lanes, Sight& sight) const {
    sight.groups.clear();
    sight.parts.clear();
    sight.steps.clear();
    sight.most_slots = sight.most_steps = 0;
    const int64_t per_row = sight.view.per_row;
    for (const Rows& given : lanes) {
      const int64_t end = given.first + given.count;
      sight.parts.push_back({static_cast<int64_t>(sight.groups.size()), 0, INT64_MAX, 0});
      for (int64_t tile = given.first / kRows; tile * kRows < end; ++tile) {
        const int64_t begin = tile * kRows, all = std::min<int64_t>(end - begin, kRows) * per_row;
        for (int64_t first = std::max<int64_t>(given.first - begin, 0) * per_row; first < all; first += kRows)
          add_group(given, per_row, tile, first, std::min<int64_t>(kRows, all - first), sight);
      }
      sight.parts.back().count = static_cast<int64_t>(sight.groups.size()) - sight.parts.back().first;
    }
  }

  // A slot's place on a row's path is the number of slots before it that the row sees, whatever its window; a window is the
  // last so many places.
  void add_group(const Rows& given, int64_t per_row, int64_t tile, int64_t first, int64_t count, Sight& sight) const {
    std::vector<Step>& steps = sight.steps;
    Group one{tile, first, count, 0, 0, 0, static_cast<int64_t>(steps.size()), 0, {}, 0};
    const int64_t first_row = tile * kRows + first / per_row, last_row = tile * kRows + (first + count - 1) / per_row;
    const bool ahead = sight.view.ahead;
    const int64_t end = ahead ? given.start + given.count : given.slot_of(last_row) + 1;
    int64_t places[kRows] = {}, begins[kRows] = {};  // by row: of the next slot that it sees, and of the first in its window
    bool common = true;  // all lanes have seen all slots so far
    one.prefix = ahead ? end : given.seen ? given.prefix : given.slot_of(first_row) + 1;
    std::fill(places, places + kRows, one.prefix);
    if (sight.view.window)
      for (int64_t row = first_row; row <= last_row; ++row) {
        int64_t path = ahead ? given.slot_of(row) + 1 : one.prefix;
        for (int64_t slot = one.prefix; slot < end; ++slot) path += given.sees(row, slot);
        begins[row - first_row] = std::max<int64_t>(path - sight.view.window, 0);
      }
    for (int64_t slot = one.prefix; slot < end; ++slot) {
      Step step{slot, 0, 0, 0};
      uint16_t members = 0;
      for (int64_t row = first_row; row <= last_row; ++row) {
        if (!given.sees(row, slot)) continue;
        int64_t& place = places[row - first_row];
        const int64_t before = (row - tile * kRows) * per_row - first;  // its first lane, if it stands in this group
        const int64_t from = std::max<int64_t>(before, 0), to = std::min(before + per_row, count);
        const auto lanes = static_cast<uint16_t>((1u << to) - (1u << from));
        members |= lanes;
        if (place >= begins[row - first_row]) {
          step.lanes |= lanes;
          if (place % 2 == 1) step.odd |= lanes;
          if (place % kChunk == kChunk - 1) step.last |= lanes;
        }
        ++place;
      }
      common = common && members == (1u << count) - 1;
      if (common) one.prefix = slot + 1;
      if (!common && step.lanes) steps.push_back(step);
    }
    one.steps = static_cast<int64_t>(steps.size()) - one.step;
    one.slots = one.steps ? steps.back().slot + 1 : one.prefix;
    if (sight.view.window) begin_at_window(one, per_row, begins, steps);
    Part& part = sight.parts.back();
    part.base = std::min(part.base, one.base);
    part.reach = std::max(part.reach, one.base + one.slots);
    sight.most_slots = std::max(sight.most_slots, one.slots);
    sight.most_steps = std::max(sight.most_steps, one.steps);
    sight.groups.push_back(one);
  }

  // Leaves out the chunks that no row sees. begins: the first place of each row's window.
  static void begin_at_window(Group& group, int64_t per_row, const int64_t* begins, std::vector<Step>& steps) {
    const int64_t first_row = group.first / per_row, last_row = (group.first + group.count - 1) / per_row;
    int64_t base = group.prefix;
    for (int64_t row = 0; row <= last_row - first_row; ++row) base = std::min(base, begins[row]);
    group.base = base / kChunk * kChunk;
    group.prefix -= group.base;
    group.slots -= group.base;
    for (int64_t i = 0; i < group.steps; ++i) steps[static_cast<size_t>(group.step + i)].slot -= group.base;
    for (int64_t lane = 0; lane < group.count; ++lane) {
      const int64_t begin = begins[(group.first + lane) / per_row - first_row] - group.base;
      group.begins[lane] = static_cast<int32_t>(std::min(begin, group.prefix));
      group.lead = std::max<int64_t>(group.lead, group.begins[lane]);
    }
  }

  std::vector<Sight> sights_;
  std::vector<Turns> turns_;
  Buffer<float> states_, qkv_, added_, gates_;
};

// Multiply numbers in place. One product for each, so that compilers cannot make other bits of it.
inline void multiply(float* values, int64_t count, float by) {
  for (int64_t i = 0; i < count; ++i) values[i] *= by;
}

inline void copy_tiles(const Team& team, const Workspace& space, const float* states, int64_t channels,
                       const Input& out) {
  team.each(space.tiles, 1, [&](Pieces& pieces) {
    while (pieces.next())
      for (int64_t t = pieces.first; t < pieces.last; ++t)
        space.kernels.copy(states + t * channels * kRows, channels, out, t, 0);
  });
}

// Subtracts from each row the mean of its channels, [channels][16]. Each sum is one of all channels in their order.
inline void centre(const float* states, int64_t channels, float* to) {
  float means[kRows] = {};
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t lane = 0; lane < kRows; ++lane) means[lane] += states[c * kRows + lane];
  for (float& mean : means) mean /= static_cast<float>(channels);
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t lane = 0; lane < kRows; ++lane) to[c * kRows + lane] = states[c * kRows + lane] - means[lane];
}

// A layer norm of a tile: an RMS norm of what is centred. room: [channels][16].
inline void norm_centred(const Kernels& kernels, const float* states, const Norm& norm, int64_t channels, float eps,
                         float* room, const Input& out, int64_t tile, float* plain) {
  centre(states, channels, room);
  if (!norm.bias) return kernels.norm(room, norm.weight, channels, eps, &out, tile, 0, plain);
  kernels.norm(room, norm.weight, channels, eps, nullptr, 0, 0, room);
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t lane = 0; lane < kRows; ++lane) room[c * kRows + lane] += norm.bias[c];
  kernels.copy(room, channels, out, tile, 0);
  if (plain) std::copy_n(room, channels * kRows, plain);
}

// The norm of states, [tiles][channels][16], into an input, and where wanted as float. Without weights they are copied.
inline void norm_tiles(const Team& team, Workspace& space, const float* states, const Norm& norm, int64_t channels,
                       float eps, const Input& out, float* plain = nullptr) {
  if (!norm.weight) return copy_tiles(team, space, states, channels, out);
  team.each(space.tiles, 1, [&](Pieces& pieces) {
    while (pieces.next())
      for (int64_t t = pieces.first; t < pieces.last; ++t) {
        const int64_t at = t * channels * kRows;
        float* wanted = plain ? plain + at : nullptr;
        if (!norm.centred) {
          space.kernels.norm(states + at, norm.weight, channels, eps, &out, t, 0, wanted);
          continue;
        }
        Buffer<float>& room = space.threads[static_cast<size_t>(pieces.index())].floats;
        norm_centred(space.kernels, states + at, norm, channels, eps, room.reserve(static_cast<size_t>(channels * kRows)),
                     out, t, wanted);
      }
  });
}

// Multiplies what the kernels gave of a panel by the matrix's factor.
inline void multiply_by_factor(const Matrix& m, float* sums, int64_t tiles) {
  if (m.factor != 1.0f) multiply(sums, tiles * kOutputs * kRows, m.factor);
}

// Runs `body(part, panel, sums, pieces)` for each panel of the parts, which read one input.
template <typename Body>
void products_of(const Team& team, Workspace& space, const std::vector<const Matrix*>& parts, const Input& in,
                 const Body& body) {
  int64_t total = 0;
  for (const Matrix* part : parts) total += part->panels;
  team.each(total, 2, [&](Pieces& pieces) {
    const int64_t size = space.tiles * kOutputs * kRows;
    ThreadScratch& mine = space.threads[static_cast<size_t>(pieces.index())];
    float* sums = mine.sums.reserve(static_cast<size_t>(2 * size));
    uint8_t* scratch = mine.bytes.reserve(static_cast<size_t>(scratch_bytes(parts[0]->blocks, space.tiles)));
    for (const Matrix* part : parts)
      if (part == parts[0] || part->kind != parts[0]->kind) space.kernels.prepare(*part, in, space.rows, scratch);
    while (pieces.next()) {
      size_t part = 0;
      int64_t before = 0;
      for (int64_t panel = pieces.first; panel < pieces.last;) {
        const Matrix* matrices[2];
        int64_t panels[2];
        size_t of[2];
        float* to[2] = {sums, sums + size};
        int count = 0;
        for (; count < 2 && panel < pieces.last; ++count, ++panel) {
          while (panel - before >= parts[part]->panels) before += parts[part++]->panels;
          matrices[count] = parts[part];
          panels[count] = panel - before;
          of[count] = part;
        }
        space.kernels.products(matrices, panels, count, in, space.tiles, space.rows, to, scratch);
        for (int i = 0; i < count; ++i) {
          multiply_by_factor(*matrices[i], to[i], space.tiles);
          body(of[i], panels[i], to[i], pieces);
        }
      }
    }
  });
}

// The layer behind its input norm: attention over the cache and the rows themselves, then its network; both add to
// the residual stream. `in` is what queries, keys and values are made of.
class LayerRun {
 public:
  LayerRun(const Team& team, Workspace& space, const Heads& heads, const std::vector<Rows>& lanes, const Form& form)
      : team_(team), space_(space), heads_(heads), lanes_(lanes), form_(form) {}

  // caches: of each lane those that the layer reads, and writes where it has keys of its own.
  void run(const Layer& layer, const Cache* caches, const Input& in, const Input& attended,
           const Input& normed, const Input& gated) {
    attend_rows(layer, caches, in, attended);
    add_rows(layer, layer.o, attended);
    feed_rows(layer, normed, gated);
  }

  // Attention's heads, side by side.
  void attend_rows(const Layer& layer, const Cache* caches, const Input& in, const Input& attended) {
    project(layer, in, 0);
    if (layer.whole_norms) norm_heads(layer);
    place(layer, caches, 0);
    if (layer.head_gate.panels) keep_gates(layer.head_gate, in);
    attend(layer, caches, attended);
    if (layer.head_gate.panels) gate_heads(gate_panels(), attended);
  }

  // Writes keys and values into the caches, whose norms are of single heads.
  void keep_rows(const Layer& layer, const Cache* caches, const Input& in) {
    project(layer, in, 1);
    place(layer, caches, heads_.queries);
  }

  // Adds attention, or what a mixer gives; out: the product behind it.
  void add_rows(const Layer& layer, const Matrix& out, const Input& given) {
    add(out, given, layer.attention_norm, layer.attention_convolution);
  }

  // The norm of all states into what a part of the layer reads, and their convolution where there is one.
  void norm_rows(const Norm& norm, const BlockConvolution& of, const Input& in) {
    const int64_t size = form_.hidden * kRows, outputs = of.projection.outputs;
    float* plain = of.any() ? space_.plain.reserve(static_cast<size_t>(space_.tiles * size)) : nullptr;
    norm_tiles(team_, space_, space_.x, norm, form_.hidden, form_.eps, in, plain);
    if (!of.any()) return;
    float* added = space_.kernels_of_rows.reserve(static_cast<size_t>(space_.tiles * outputs * kRows));
    products_of(team_, space_, {&of.projection}, in, [&](size_t, int64_t panel, const float* sums, const Pieces&) {
      const int64_t live = std::min<int64_t>(kOutputs, outputs - panel * kOutputs);
      for (int64_t t = 0; t < space_.tiles; ++t)
        std::copy_n(sums + t * kOutputs * kRows, live * kRows, added + (t * outputs + panel * kOutputs) * kRows);
    });
    convolve(of, 0, plain, [&](int64_t tile, int64_t first, int64_t count, float* sums) {
      space_.kernels.copy(sums, count, in, tile, first);
    });
  }

  // Adds the network, or the experts, if there are any. normed: room for what that reads; where it is parallel to
  // attention, it holds that already.
  void feed_rows(const Layer& layer, const Input& normed, const Input& gated) {
    if (!layer.feeds()) return;
    if (!layer.parallel) norm_rows(layer.post_norm, layer.network_convolution, normed);
    const bool mixed = layer.experts.any(), dense = layer.network.down.panels;
    if (dense) feed_forward(layer, normed, gated);
    if (mixed && dense) mix_beside(layer, normed, gated);
    else if (mixed) mix(layer, normed);
    else add(layer.network.down, gated, layer.network_norm, layer.network_convolution);
  }

  // Adds what the layer makes of its own inputs, [tiles][stride][16], and scales all that it gives. in, own: inputs of
  // products, of hidden and of the own inputs' channels.
  void add_own(const Layer& layer, const float* inputs, int64_t stride, const Input& in, const Input& own) {
    if (layer.own_gate.panels) {
      copy_tiles(team_, space_, space_.x, form_.hidden, in);
      products_of(team_, space_, {&layer.own_gate}, in, [&](size_t, int64_t panel, const float* sums, const Pieces&) {
        for (int64_t t = 0; t < space_.tiles; ++t)
          space_.kernels.gate(sums + t * kOutputs * kRows, inputs + (t * stride + panel * kOutputs) * kRows, own, t,
                              panel * kOutputs, form_.activation);
      });
      add(layer.own_out, own, layer.own_norm, {});
    }
    if (layer.scale == 1.0f) return;
    const int64_t size = form_.hidden * kRows;
    team_.each(space_.tiles, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t t = pieces.first; t < pieces.last; ++t) multiply(space_.x + t * size, size, layer.scale);
    });
  }

  void rotate(const Turns& turns, int64_t tile, float* states) {
    const int64_t at = tile * turns.half * kRows;
    space_.kernels.rotate(states, turns.cosines.data() + at, turns.sines.data() + at, 2 * turns.half);
  }

  // Writes a head of a tile's rows into the caches of their lanes.
  void write_all(const Cache* caches, bool value, int64_t head, int64_t tile, const float* states) {
    for (size_t lane = 0; lane < lanes_.size(); ++lane) write(lanes_[lane], caches[lane], value, head, tile, states);
  }

  // Tasks stand by lane and head, as what those of a head share is made once by each thread, and the longest of a head
  // first; within windows, which are about as long, those that begin first.
  void attend(const Layer& layer, const Cache* caches, const Input& attended) {
    const Sight& sight = space_.sight({layer.window, heads_.groups(), layer.ahead});
    team_.each(heads_.keys * static_cast<int64_t>(sight.groups.size()), 1, [&](Pieces& pieces) {
      ThreadScratch& mine = space_.threads[static_cast<size_t>(pieces.index())];
      const int64_t size = heads_.size;
      AttendTask task;
      task.per_row = heads_.groups();
      task.scale = form_.scale_of(heads_);
      task.half = caches[0].half;
      task.size = size;
      task.scratch = mine.floats.reserve(static_cast<size_t>(attend_floats(size, sight.most_slots, sight.most_steps)));
      uint16_t* chunks = mine.chunks.reserve(static_cast<size_t>(turned_halves(size, sight.span(), task.half)));
      task.out = &attended;
      int64_t begun = 0, turned = 0, of = -1;  // chunks [begun, turned) of head `of`, of all lanes' heads, stand in `chunks`
      size_t lane = 0;
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          if (i < heads_.keys * sight.parts[lane].first) lane = 0;  // another thread's share, from before one's own
          while (i >= heads_.keys * (sight.parts[lane].first + sight.parts[lane].count)) ++lane;
          const Part& part = sight.parts[lane];
          const int64_t own = i - heads_.keys * part.first, head = own / part.count, at = own % part.count;
          const Group& group = sight.groups[static_cast<size_t>(part.first + (layer.window ? at : part.count - 1 - at))];
          const int64_t base = (group.base - part.base) / kChunk, key = static_cast<int64_t>(lane) * heads_.keys + head;
          if (key != of || base < begun || base > turned) begun = turned = base;
          of = key;
          int64_t there = turned - base;
          task.turned = &there;
          task.chunks = chunks + base * kChunk * size * (task.half ? 1 : 2);
          task.shares = part.count > 1;
          task.step = sight.steps.data() + group.step;
          attend_group(task, caches[lane], head, group, layer.sinks);
          turned = std::max(turned, base + there);
        }
    });
  }

 private:
  int64_t gate_panels() const { return (heads_.queries * heads_.size + kOutputs - 1) / kOutputs; }

  // Of each head one for all channels, or one for each.
  void keep_gates(const Matrix& m, const Input& in) {
    const int64_t tile_floats = gate_panels() * kOutputs * kRows;
    const int64_t copies = m.outputs == heads_.queries ? heads_.size : 1;
    products_of(team_, space_, {&m}, in, [&](size_t, int64_t panel, const float* sums, const Pieces&) {
      const int64_t live = std::min<int64_t>(kOutputs, m.outputs - panel * kOutputs);
      for (int64_t t = 0; t < space_.tiles; ++t)
        for (int64_t o = 0; o < live; ++o)
          for (int64_t i = 0; i < copies; ++i)
            std::copy_n(sums + (t * kOutputs + o) * kRows, kRows,
                        space_.gates + t * tile_floats + ((panel * kOutputs + o) * copies + i) * kRows);
    });
  }

  // Multiplies what attention gave, as it stands in the input of the product behind it.
  void gate_heads(int64_t panels, const Input& attended) {
    team_.each(space_.tiles * panels, 1, [&](Pieces& pieces) {
      float values[kOutputs * kRows];
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          const int64_t tile = i / panels, channel = i % panels * kOutputs;
          unpacked(attended, tile, channel, values);
          space_.kernels.gate(space_.gates + i * kOutputs * kRows, values, attended, tile, channel, Activation::sigmoid);
        }
    });
  }

  // 16 channels of an input as floats.
  void unpacked(const Input& in, int64_t tile, int64_t channel, float* values) const {
    if (!space_.kernels.pairs) {
      std::copy_n(in.floats(tile) + channel * kRows, kOutputs * kRows, values);
      return;
    }
    const uint32_t* pairs = in.pairs(tile) + channel / 2 * kRows;
    for (int64_t c = 0; c < kOutputs; ++c)
      for (int64_t lane = 0; lane < kRows; ++lane) {
        const uint32_t pair = pairs[c / 2 * kRows + lane], bits = c % 2 ? pair & 0xFFFF0000u : pair << 16;
        std::memcpy(values + c * kRows + lane, &bits, 4);
      }
  }

  // Norms all heads' queries of a row as one, and all keys.
  void norm_heads(const Layer& layer) {
    team_.each(space_.tiles * 2, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          const bool query = i % 2 == 0;
          const int64_t from = (i / 2 * heads_.channels() + (query ? 0 : heads_.queries * heads_.size)) * kRows;
          const int64_t channels = (query ? heads_.queries : heads_.keys) * heads_.size;
          const float* weight = query ? layer.q_norm : layer.k_norm;
          float* states = space_.qkv + from;
          if (weight) space_.kernels.norm(states, weight, channels, form_.eps, nullptr, 0, 0, states);
        }
    });
  }

  // Makes queries, keys and values of rows; first: 0 of all, 1 of keys and values alone.
  void project(const Layer& layer, const Input& in, size_t first) {
    const int64_t tiles = space_.tiles, channels = heads_.channels();
    const int64_t offsets[3] = {0, heads_.queries * heads_.size, (heads_.queries + heads_.keys) * heads_.size};
    const Matrix* const all[3] = {&layer.q, &layer.k, &layer.v};
    std::vector<const Matrix*> parts;
    for (size_t i = first; i < 3; ++i)
      if (all[i]->panels) parts.push_back(all[i]);
    products_of(team_, space_, parts, in, [&](size_t part, int64_t panel, const float* sums, const Pieces&) {
      const int64_t live = std::min<int64_t>(kOutputs, parts[part]->outputs - panel * kOutputs);
      const size_t begin = part + first, end = begin + (begin == 1 && !layer.v.panels ? 2 : 1);
      for (int64_t t = 0; t < tiles; ++t)
        for (size_t to = begin; to < end; ++to)
          std::memcpy(space_.qkv + (t * channels + offsets[to] + panel * kOutputs) * kRows, sums + t * kOutputs * kRows,
                      static_cast<size_t>(live * kRows) * sizeof(float));
    });
  }

  // Norms and rotates queries and keys from head `first` on, and writes keys and values into the cache.
  void place(const Layer& layer, const Cache* caches, int64_t first) {
    const int64_t all = heads_.queries + (layer.k.panels ? 2 * heads_.keys : 0) - first;
    team_.each(space_.tiles * all, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) place_head(layer, caches, i / all, first + i % all);
    });
  }

  void place_head(const Layer& layer, const Cache* caches, int64_t tile, int64_t head) {
    const int64_t all = heads_.queries + 2 * heads_.keys;
    float* states = space_.qkv + (tile * all + head) * heads_.size * kRows;
    const bool query = head < heads_.queries, value = head >= heads_.queries + heads_.keys;
    const float* weight = value ? layer.v_norm : layer.whole_norms ? nullptr : query ? layer.q_norm : layer.k_norm;
    if (weight) space_.kernels.norm(states, weight, heads_.size, form_.eps, nullptr, 0, 0, states);
    if (!value && layer.rope != Layer::kNone) rotate(space_.turns(layer.rope), tile, states);
    if (!query) return write_all(caches, value, (head - heads_.queries) % heads_.keys, tile, states);
    if (layer.rope != Layer::kNone && space_.turns(layer.rope).scales) scale(space_.turns(layer.rope), tile, states);
  }

  void scale(const Turns& turns, int64_t tile, float* states) {
    const int64_t live = std::min<int64_t>(space_.rows - tile * kRows, kRows);
    const float* factors = turns.factors.data() + tile * kRows;
    for (int64_t c = 0; c < heads_.size; ++c)
      for (int64_t lane = 0; lane < live; ++lane) states[c * kRows + lane] *= factors[lane];
  }

  // The rows of one lane in a tile, if there are any.
  void write(const Rows& rows, const Cache& cache, bool value, int64_t head, int64_t tile, const float* states) {
    const int64_t begin = tile * kRows, bytes = heads_.size * (cache.half ? 2 : 4);
    const int64_t row = std::max(rows.first, begin), count = std::min<int64_t>(rows.first + rows.count, begin + kRows) - row;
    if (count <= 0) return;
    char* to = static_cast<char*>(cache.plane(value, head, heads_)) + rows.slot_of(row) * bytes;
    space_.kernels.write(states + (row - begin), heads_.size, count, to, heads_.size, cache.half);
  }

  void attend_group(AttendTask& task, const Cache& cache, int64_t head, const Group& group, const float* sinks) {
    const int64_t before = group.base * heads_.size * (cache.half ? 2 : 4);  // bytes
    task.keys = static_cast<const char*>(cache.plane(0, head, heads_)) + before;
    task.values = static_cast<const char*>(cache.plane(1, head, heads_)) + before;
    task.channel = head * task.per_row * heads_.size;
    task.sinks = sinks ? sinks + head * task.per_row : nullptr;
    task.queries = space_.qkv + (group.tile * heads_.channels() + task.channel) * kRows;
    task.tile = group.tile;
    task.first = group.first;
    task.count = group.count;
    task.prefix = group.prefix;
    task.begins = group.begins;
    task.lead = group.lead;
    task.slots = group.slots;
    task.steps = group.steps;
    space_.kernels.attend(task);
  }

  // Runs `body(tile, first channel, channels, sums)` for all channels that a convolution makes of rows, [tiles][hidden][16].
  template <typename Body>
  void convolve(const BlockConvolution& of, int64_t side, const float* rows, const Body& body) {
    constexpr int64_t kChannels = 64;  // at a time
    const int64_t chunks = (form_.hidden + kChannels - 1) / kChannels;
    team_.each(space_.tiles * chunks, 1, [&](Pieces& pieces) {
      ThreadScratch& mine = space_.threads[static_cast<size_t>(pieces.index())];
      float* sums = mine.sums.reserve(static_cast<size_t>((kChannels + 1) * kRows + of.taps));
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          const int64_t tile = i / chunks, first = i % chunks * kChannels, count = std::min(kChannels, form_.hidden - first);
          const float* added = space_.kernels_of_rows.data() + tile * of.projection.outputs * kRows;
          int32_t before[kRows];
          count_before(tile, before);
          of.run(side, rows, form_.hidden, added, before, tile, first, count, sums + kChannels * kRows, sums);
          body(tile, first, count, sums);
        }
    });
  }

  // By row of a tile, [16]: the number of earlier rows of its lane; -1 where there is no row.
  void count_before(int64_t tile, int32_t* before) const {
    const int64_t begin = tile * kRows;
    std::fill_n(before, kRows, -1);
    for (const Rows& lane : lanes_)
      for (int64_t row = std::max(lane.first, begin); row < std::min(lane.first + lane.count, begin + kRows); ++row)
        before[row - begin] = static_cast<int32_t>(row - lane.first);
  }

  // Adds the products to the residual stream, normed or convolved before where there is a norm or a convolution for it.
  void add(const Matrix& m, const Input& in, const float* norm, const BlockConvolution& convolution) {
    const bool scaled = form_.residual != 1.0f;
    products_of(team_, space_, {&m}, in, [&](size_t, int64_t panel, float* sums, const Pieces&) {
      const int64_t live = std::min<int64_t>(kOutputs, m.outputs - panel * kOutputs) * kRows;
      for (int64_t t = 0; t < space_.tiles; ++t) {
        const int64_t at = (t * form_.hidden + panel * kOutputs) * kRows;
        float* from = sums + t * kOutputs * kRows;
        if (norm || convolution.any()) {
          std::copy_n(from, live, space_.added + at);
          continue;
        }
        if (scaled) multiply(from, live, form_.residual);
        space_.kernels.add(space_.x + at, from, live);
      }
    });
    if (norm) add_normed(norm, scaled);
    if (!convolution.any()) return;
    convolve(convolution, 1, space_.added, [&](int64_t tile, int64_t first, int64_t count, float* sums) {
      if (scaled) multiply(sums, count * kRows, form_.residual);
      space_.kernels.add(space_.x + (tile * form_.hidden + first) * kRows, sums, count * kRows);
    });
  }

  void add_normed(const float* norm, bool scaled) {
    const int64_t size = form_.hidden * kRows;
    team_.each(space_.tiles, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t t = pieces.first; t < pieces.last; ++t) {
          float* added = space_.added + t * size;
          if (norm) space_.kernels.norm(added, norm, form_.hidden, form_.eps_of_added(), nullptr, 0, 0, added);
          if (scaled) multiply(added, size, form_.residual);
          space_.kernels.add(space_.x + t * size, added, size);
        }
    });
  }

  // Adds what the experts give to the residual stream, as `add` does.
  void mix(const Layer& layer, const Input& in) {
    const bool normed = layer.network_norm;
    run_experts(layer.experts, in, in, normed ? space_.added : space_.x, !normed, normed ? 1.0f : form_.residual);
    if (normed) add_normed(layer.network_norm, form_.residual != 1.0f);
  }

  // rated: what the router reads. Adds sums times `factor` to `to`, or puts them there.
  void run_experts(const Experts& experts, const Input& in, const Input& rated, float* to, bool adds, float factor) {
    ExpertsRun run(team_, space_.kernels, space_.experts, experts, form_.routing, form_.activation, space_.rows);
    run.begin();
    std::vector<const Matrix*> routers{&experts.router};
    if (experts.shared_gate.panels) routers.push_back(&experts.shared_gate);
    products_of(team_, space_, routers, rated,
                [&](size_t part, int64_t panel, const float* sums, const Pieces&) { run.rate(part == 1, panel, sums); });
    run.run(in, to, form_.hidden, adds, factor);
  }

  // Adds what a gated network and the experts beside it give, each normed before their sum is.
  void mix_beside(const Layer& layer, const Input& in, const Input& gated) {
    const int64_t size = form_.hidden * kRows;
    float* dense = space_.beside.reserve(static_cast<size_t>(space_.tiles * size));
    products_of(team_, space_, {&layer.network.down}, gated, [&](size_t, int64_t panel, const float* sums, const Pieces&) {
      const int64_t live = std::min<int64_t>(kOutputs, layer.network.down.outputs - panel * kOutputs) * kRows;
      for (int64_t t = 0; t < space_.tiles; ++t)
        std::copy_n(sums + t * kOutputs * kRows, live, dense + (t * form_.hidden + panel * kOutputs) * kRows);
    });
    const Input rated = space_.input(space_.rated, form_.hidden);
    norm_tiles(team_, space_, space_.x, layer.router_norm, form_.hidden, form_.eps, rated);
    norm_tiles(team_, space_, space_.x, layer.experts_norm, form_.hidden, form_.eps, in);
    run_experts(layer.experts, in, rated, space_.added, false, 1.0f);
    team_.each(space_.tiles, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t t = pieces.first; t < pieces.last; ++t) {
          float *one = dense + t * size, *other = space_.added + t * size;
          if (layer.dense_norm) space_.kernels.norm(one, layer.dense_norm, form_.hidden, form_.eps, nullptr, 0, 0, one);
          if (layer.mixed_norm) space_.kernels.norm(other, layer.mixed_norm, form_.hidden, form_.eps, nullptr, 0, 0, other);
          space_.kernels.add(other, one, size);
        }
    });
    add_normed(layer.network_norm, form_.residual != 1.0f);
  }

  void feed_forward(const Layer& layer, const Input& in, const Input& gated) {
    const Network& network = layer.network;
    team_.each(network.wide().panels, 1, [&](Pieces& pieces) {
      const int64_t size = space_.tiles * kOutputs * kRows;
      ThreadScratch& mine = space_.threads[static_cast<size_t>(pieces.index())];
      float* sums = mine.sums.reserve(static_cast<size_t>(2 * size));
      uint8_t* scratch = mine.bytes.reserve(static_cast<size_t>(scratch_bytes(network.wide().blocks, space_.tiles)));
      const int count = network.count();
      space_.kernels.prepare(network.wide(), in, space_.rows, scratch);
      if (count == 2 && network.up.kind != network.gate.kind) space_.kernels.prepare(network.up, in, space_.rows, scratch);
      const Matrix* matrices[2] = {&network.wide(), &network.up};
      float* to[2] = {sums, network.gate.panels ? sums + size : sums};
      if (network.gate.panels && count == 1) std::fill_n(to[1], size, 1.0f);
      while (pieces.next())
        for (int64_t panel = pieces.first; panel < pieces.last; ++panel) {
          const int64_t panels[2] = {panel, panel};
          space_.kernels.products(matrices, panels, count, in, space_.tiles, space_.rows, to, scratch);
          for (int i = 0; i < count; ++i) multiply_by_factor(*matrices[i], to[i], space_.tiles);
          for (int64_t t = 0; t < space_.tiles; ++t) {
            const int64_t at = t * kOutputs * kRows;
            space_.kernels.gate(to[0] + at, to[1] + at, gated, t, panel * kOutputs, form_.activation);
          }
        }
    });
  }

  const Team& team_;
  Workspace& space_;
  const Heads heads_;
  const std::vector<Rows>& lanes_;
  const Form form_;
};

// The largest finite logits among some outputs, largest first, the lowest output first of equals. A thread has two lists,
// one for what lies before its own share of the outputs, as the outputs of a list have to ascend.
struct Leaders {
  int64_t count = 0;      // of each row
  float* most = nullptr;  // [threads][2][tiles][count][16]
  int32_t* at = nullptr;  // their outputs, -1 where there are fewer

  static int64_t lists(int threads) { return 2 * static_cast<int64_t>(threads); }
  int64_t size(int64_t tiles) const { return tiles * count * kRows; }  // of a list

  void clear(int threads, int64_t tiles) const {
    std::fill_n(most, lists(threads) * size(tiles), -std::numeric_limits<float>::infinity());
    std::fill_n(at, lists(threads) * size(tiles), -1);
  }
};

// Numbers to cap * tanh(number / cap), in place. Of few operations, each of which compilers make of four lanes or more, and
// the same bits everywhere: tanh of libraries differs in the last.
inline void cap_all(float* values, int64_t count, float cap) {
  constexpr float kMost = 20.0f, kToWhole = 12582912.0f;  // 1.5 * 2^23, beside which a float has no fraction
  for (int64_t i = 0; i < count; ++i) {
    float x = 2.0f * (values[i] / cap);
    x = x > kMost ? kMost : x;
    x = x < -kMost ? -kMost : x;  // NaN stays
    const float shifted = x * 1.44269504f + kToWhole, n = shifted - kToWhole;
    const float r = (x - n * 0x1.62e4p-1f) - n * 1.42860677e-6f;  // x less n times the logarithm of 2
    // e^r - 1 by Taylor's polynomial, and from it e^x - 1
    float sum = 1.0f / 5040.0f;
    sum = sum * r + 1.0f / 720.0f;
    sum = sum * r + 1.0f / 120.0f;
    sum = sum * r + 1.0f / 24.0f;
    sum = sum * r + 1.0f / 6.0f;
    sum = sum * r + 0.5f;
    sum = sum * r * r + r;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4B400000u + 127u) << 23;  // of 2^n
    float power;
    std::memcpy(&power, &bits, 4);
    const float less = power * sum + (power - 1.0f);
    values[i] = less / (less + 2.0f) * cap;
  }
}

// A vocabulary head over the workspace's rows: logits [rows - first][outputs], or the largest finite ones of each row.
// divisor: of all logits; cap: of what tanh leaves of them, 0 for none.
class Readout {
 public:
  Readout(Workspace& space, const Matrix& head, int64_t first, float divisor = 1.0f, float cap = 0.0f)
      : space_(space), head_(head), first_(first), divisor_(divisor), cap_(cap) {}

  // logits may be null; leaders are empty.
  void run(const Team& team, const Input& in, float* logits, const Leaders& leaders = {}) const {
    products_of(team, space_, {&head_}, in, [&](size_t, int64_t panel, float* sums, const Pieces& pieces) {
      if (divisor_ != 1.0f)
        for (int64_t i = 0; i < space_.tiles * kOutputs * kRows; ++i) sums[i] /= divisor_;
      if (cap_ != 0.0f) cap_all(sums, space_.tiles * kOutputs * kRows, cap_);
      const int64_t output = panel * kOutputs, live = std::min<int64_t>(kOutputs, head_.outputs - output);
      for (int64_t t = 0; t < space_.tiles; ++t) {
        const float* from = sums + t * kOutputs * kRows;
        const int64_t count = std::min<int64_t>(kRows, space_.rows - t * kRows);
        if (logits) give(from, live, count, t * kRows - first_, logits + output);
        if (leaders.count) {
          const int64_t list = 2 * pieces.index() + pieces.is_before_own();
          const int64_t to = list * leaders.size(space_.tiles) + leaders.size(t);
          space_.kernels.best(from, static_cast<int32_t>(output), static_cast<int32_t>(live), leaders.count,
                              leaders.most + to, leaders.at + to);
        }
      }
    });
  }

 private:
  // Rows of a tile, of which the first is logits' row `row`, or before them where that is negative.
  void give(const float* from, int64_t live, int64_t count, int64_t row, float* logits) const {
    if (row >= 0) return space_.kernels.write(from, live, count, logits + row * head_.outputs, head_.outputs, false);
    for (int64_t lane = -row; lane < count; ++lane)
      for (int64_t o = 0; o < live; ++o) logits[(row + lane) * head_.outputs + o] = from[o * kRows + lane];
  }

  Workspace& space_;
  const Matrix& head_;
  const int64_t first_;
  const float divisor_, cap_;
};

}  // namespace cpu
