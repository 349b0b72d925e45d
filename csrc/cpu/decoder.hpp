// A causal language model of layer.hpp's blocks: all layers over the rows of a tree in one call.
#pragma once

#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/gated_delta.hpp"
#include "cpu/latent.hpp"
#include "cpu/layer.hpp"
#include "cpu/mamba2.hpp"
#include "cpu/pace.hpp"
#include "cpu/short_convolution.hpp"
#include "cpu/table.hpp"

namespace cpu {

// Named tensors, packed as they come.
class Weights {
 public:
  explicit Weights(int threads) : threads_(threads) {}

  // A matrix of so many outputs and inputs, kept as `kind`; `pack` fills it. beside: the name of a matrix of the same kind
  // and size, or none; panels of both stand in turn, as they are read, so that memory is read in one stream.
  void add_matrix(const std::string& name, Kind kind, int64_t outputs, int64_t inputs, const std::string& beside = {}) {
    Matrix m = empty(name, kind, outputs, inputs);
    if (const auto room = rooms_.find(name); room != rooms_.end()) {
      if (room->second.kind != kind || room->second.outputs != outputs || room->second.inputs != inputs)
        throw std::invalid_argument(name + ": differs from the matrix that it stands beside");
      m.data = room->second.data;
      m.step = room->second.step;
      rooms_.erase(room);
    } else {
      const int64_t bytes = panel_bytes(kind, m.blocks);
      m.step = beside.empty() ? bytes : 2 * bytes;
      m.data = arena_.take(static_cast<size_t>(m.panels * m.step));
      if (!beside.empty()) {
        rooms_[beside] = m;
        rooms_[beside].data += bytes;
      }
    }
    if (stored_as(kind).quantize)
      m.scales = reinterpret_cast<float*>(arena_.take(static_cast<size_t>(m.panels * kOutputs) * sizeof(float)));
    matrices_[name] = m;
  }

  // A matrix whose rows stay in a file, as `kind`: it is no factor of products, and only `table` gives it.
  void add_rows(const std::string& name, Kind kind, int64_t outputs, int64_t inputs, int descriptor, int64_t offset,
                const std::string& path) {
    const int64_t row_bytes = stored_as(kind).row_bytes(inputs);
    tables_[name] = Table(empty(name, kind, outputs, inputs),
                          std::make_shared<FileRows>(descriptor, offset, row_bytes, path));
  }

  // Outputs [first, first + count), in Kind `from`; first is a multiple of 16. rows: those of a file, beginning with the
  // first; or all of them, where order, int32 [outputs], says which row each output is.
  void pack(const std::string& name, Kind from, int64_t first, int64_t count, const uint8_t* rows,
            const int32_t* order) {
    const Matrix m = stored(name);
    const int64_t row_bytes = stored_as(from).row_bytes(m.inputs);
    if (!order) rows -= first * row_bytes;
    const int64_t panels = (count + kOutputs - 1) / kOutputs;
    Pool::shared().run(threads_, [&](const Team& team) {
      team.each(panels, 1, [&](Pieces& pieces) {
        while (pieces.next())
          for (int64_t panel = pieces.first; panel < pieces.last; ++panel)
            pack_panel(m, from, rows, order, first / kOutputs + panel, const_cast<uint8_t*>(m.data),
                       const_cast<float*>(m.scales));
      });
    });
  }

  // values: float [count], padded with zeros to whole panels.
  void add_vector(const std::string& name, const float* values, int64_t count) {
    float* data = reinterpret_cast<float*>(arena_.take(static_cast<size_t>(rounded_up(count, kDepth)) * sizeof(float)));
    std::memcpy(data, values, static_cast<size_t>(count) * sizeof(float));
    vectors_[name] = {data, count};
  }

  // Return the matrix as `add_matrix` made it. Throws if there is none.
  Matrix stored(const std::string& name) const {
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) throw std::invalid_argument("no weights " + name);
    return found->second;
  }

  // Return the matrix of this many outputs and inputs (0: any), with its bias and its factor if there are such.
  Matrix matrix(const std::string& name, int64_t outputs = 0, int64_t inputs = 0) const {
    Matrix m = stored(name + ".weight");
    require_size(name, m, outputs, inputs);
    m.bias = vector(name + ".bias", m.outputs);
    if (const float* factor = vector(name + ".factor", 1)) m.factor = *factor;
    return m;
  }
  bool has(const std::string& name) const { return matrices_.count(name + ".weight") != 0; }

  // Return the matrix of this many outputs and inputs, of which single outputs are read.
  Table table(const std::string& name, int64_t outputs, int64_t inputs) const {
    const auto entry = tables_.find(name + ".weight");
    if (entry == tables_.end()) return Table(matrix(name, outputs, inputs));
    require_size(name, entry->second.matrix(), outputs, inputs);
    return entry->second;
  }

  // Return the vector of `count` numbers; null if there is none.
  const float* vector(const std::string& name, int64_t count) const {
    const auto found = vectors_.find(name);
    if (found == vectors_.end()) return nullptr;
    if (found->second.count != count)
      throw std::invalid_argument(name + ": got [" + std::to_string(found->second.count) + "], accepted [" +
                                  std::to_string(count) + "]");
    return found->second.data;
  }

  // Return how many numbers the vector has; 0 if there is none.
  int64_t count(const std::string& name) const {
    const auto found = vectors_.find(name);
    return found == vectors_.end() ? 0 : found->second.count;
  }

  // Return the vector of `count` numbers. Throws if there is none.
  const float* needed(const std::string& name, int64_t count) const {
    const float* found = vector(name, count);
    if (!found) throw std::invalid_argument("no weights " + name);
    return found;
  }

  // Return the norm of a width, a layer norm where it is centred; without weights if there is none.
  Norm norm(const std::string& name, int64_t width, bool centred = false) const {
    return {vector(name + ".weight", width), vector(name + ".bias", width), centred};
  }

  // Return the latent attention of a layer, without what is behind it.
  Latent latent(const std::string& prefix, const Heads& heads, const LatentSizes& sizes, int64_t hidden) const {
    Latent found;
    if (sizes.query_rank) {
      found.q_a = matrix(prefix + "q_a_proj", sizes.query_rank, hidden);
      found.q_norm = needed(prefix + "q_a_norm.weight", sizes.query_rank);
    }
    found.q_b = matrix(prefix + "q_proj", heads.queries * sizes.query(), sizes.query_rank ? sizes.query_rank : hidden);
    found.kv_a = matrix(prefix + "kv_a_proj", sizes.rank + sizes.turned, hidden);
    found.norm = needed(prefix + "kv_a_norm.weight", sizes.rank);
    for (int64_t head = 0; head < heads.queries; ++head) {
      found.keys.push_back(matrix(prefix + "k_b." + std::to_string(head), sizes.rank, sizes.plain));
      found.values.push_back(matrix(prefix + "v_b." + std::to_string(head), sizes.value, sizes.rank));
      if (found.keys.back().kind != found.keys[0].kind || found.values.back().kind != found.values[0].kind)
        throw std::invalid_argument(prefix + "k_b: heads are stored as different kinds");
    }
    return found;
  }

  // inputs: of queries, keys and values; mixes: whether there is a mixer; of: sizes of latents, if attention is over such. A
  // layer has attention or a mixer, or both side by side, or a network, or a network behind the others. own_keys: else
  // another layer's are read; own_values: else they are what keys are made of.
  Layer layer(const std::string& prefix, const Heads& heads, int64_t hidden, int64_t inputs, bool mixes = false,
              const LatentSizes& of = {}, bool own_keys = true, bool own_values = true) const {
    Layer one;
    one.heads = heads;
    const bool dense = has(prefix + "mlp.up_proj") || has(prefix + "mlp.gate_proj");
    const bool feeds = dense || has(prefix + "mlp.router");
    if (of.rank) {
      one.latent = latent(prefix + "self_attn.", heads, of, hidden);
      one.o = matrix(prefix + "self_attn.o_proj", hidden, heads.queries * of.value);
    } else if (!(mixes || feeds) || has(prefix + "self_attn.q_proj")) {
      one.q = matrix(prefix + "self_attn.q_proj", heads.queries * heads.size, inputs);
      if (own_keys) one.k = matrix(prefix + "self_attn.k_proj", heads.keys * heads.size, inputs);
      if (own_keys && own_values) one.v = matrix(prefix + "self_attn.v_proj", heads.keys * heads.size, inputs);
      one.o = matrix(prefix + "self_attn.o_proj", hidden, heads.queries * heads.size);
      const std::string gate = prefix + "self_attn.gate_proj";
      const bool by_head = has(gate) && stored(gate + ".weight").outputs == heads.queries;
      if (has(gate)) one.head_gate = matrix(gate, heads.queries * (by_head ? 1 : heads.size), inputs);
    }
    one.experts = experts(prefix + "mlp.", hidden);
    if (dense) one.network = network(prefix + "mlp.", hidden);
    one.input_norm = norm(prefix + "input_layernorm", hidden);
    one.post_norm = norm(prefix + "post_attention_layernorm", hidden);
    one.attention_norm = vector(prefix + "attention_output_norm.weight", hidden);
    one.network_norm = vector(prefix + "mlp_output_norm.weight", hidden);
    one.sinks = vector(prefix + "self_attn.sinks", heads.queries);
    one.whole_norms = count(prefix + "self_attn.q_norm.weight") > heads.size;
    one.q_norm = vector(prefix + "self_attn.q_norm.weight", one.whole_norms ? heads.queries * heads.size : heads.size);
    one.k_norm = vector(prefix + "self_attn.k_norm.weight", one.whole_norms ? heads.keys * heads.size : heads.size);
    one.v_norm = vector(prefix + "self_attn.v_norm.weight", heads.size);
    one.experts_norm = vector(prefix + "experts_norm.weight", hidden);
    one.router_norm = vector(prefix + "router_norm", hidden);
    one.dense_norm = vector(prefix + "dense_norm.weight", hidden);
    one.mixed_norm = vector(prefix + "mixed_norm.weight", hidden);
    if (const float* scale = vector(prefix + "scale", 1)) one.scale = *scale;
    return one;
  }

  // Return the convolution of a block's rows; without panels if there is none.
  BlockConvolution convolution(const std::string& prefix, int64_t hidden) const {
    BlockConvolution found;
    const std::string projection = prefix + "kernel_projection", base = prefix + "base_kernel";
    if (!has(projection)) return found;
    found.projection = matrix(projection, 0, hidden);
    found.taps = std::max<int64_t>(count(base) / (2 * hidden), 1);
    found.base = needed(base, 2 * found.taps * hidden);
    const int64_t groups = found.projection.outputs / (2 * found.taps);
    if (!groups || hidden % groups) throw std::invalid_argument(base + ": channels that groups do not divide");
    require_size(projection, found.projection, 2 * found.taps * groups, hidden);
    found.size = hidden / groups;
    return found;
  }

  // Either of the matrices that read the rows may be missing.
  Network network(const std::string& prefix, int64_t hidden) const {
    Network found;
    if (has(prefix + "gate_proj")) found.gate = matrix(prefix + "gate_proj", 0, hidden);
    if (has(prefix + "up_proj") || !found.gate.panels) found.up = matrix(prefix + "up_proj", found.gate.outputs, hidden);
    found.down = matrix(prefix + "down_proj", hidden, found.wide().outputs);
    return found;
  }

  // Return the experts of a network that has a router.
  Experts experts(const std::string& prefix, int64_t hidden) const {
    Experts found;
    if (!has(prefix + "router")) return found;
    found.router = matrix(prefix + "router", 0, hidden);
    found.choice = vector(prefix + "router.choice", found.router.outputs);
    found.scales = vector(prefix + "router.scales", found.router.outputs);
    for (int64_t e = 0; e < found.router.outputs; ++e)
      found.each.push_back(network(prefix + "experts." + std::to_string(e) + ".", hidden));
    found.shared = has(prefix + "shared.up_proj");
    if (found.shared) found.each.push_back(network(prefix + "shared.", hidden));
    if (found.shared && has(prefix + "shared.gate")) found.shared_gate = matrix(prefix + "shared.gate", 1, hidden);
    return found;
  }

  // The recurrent mixer of a layer; null where it has none.
  std::unique_ptr<Mixer> mixer(const std::string& prefix, const Recurrence& of, int64_t hidden, float eps) const {
    const std::string convolution = prefix + "short_conv.", delta = prefix + "linear_attn.";
    if (has(convolution + "x_proj")) {
      const auto in = [&](const char* name) { return matrix(convolution + name, of.channels, hidden); };
      return std::make_unique<ShortConvolution>(
          of, in("b_proj"), in("c_proj"), in("x_proj"), matrix(convolution + "out_proj", hidden, of.channels),
          needed(convolution + "conv.weight", of.taps * of.channels), vector(convolution + "conv.bias", of.channels));
    }
    if (has(prefix + "mamba.in_proj_xbc")) return mamba(prefix + "mamba.", of, hidden, eps);
    if (!has(delta + "in_proj_qkv")) return nullptr;
    if (!of.heads) throw std::invalid_argument(delta + "in_proj_qkv: the recurrence has no heads");
    if (of.key_size % kRows)
      throw std::invalid_argument(delta + "in_proj_qkv: keys of " + std::to_string(of.key_size) +
                                  " channels, accepted multiples of 16");
    GatedDelta::Parts parts;
    const int64_t values = of.values();
    parts.qkv = matrix(delta + "in_proj_qkv", of.channels, hidden);
    parts.z = matrix(delta + "in_proj_z", values, hidden);
    parts.b = matrix(delta + "in_proj_b", of.heads, hidden);
    parts.a = matrix(delta + "in_proj_a", of.heads, hidden);
    parts.out = matrix(delta + "out_proj", hidden, values);
    parts.taps = needed(delta + "conv1d.weight", of.taps * of.channels);
    parts.a_log = needed(delta + "A_log", of.heads);
    parts.dt_bias = needed(delta + "dt_bias", of.heads);
    parts.norm = needed(delta + "norm.weight", of.value_size);
    return std::make_unique<GatedDelta>(of, parts, eps);
  }

  std::unique_ptr<Mixer> mamba(const std::string& prefix, const Recurrence& of, int64_t hidden, float eps) const {
    if (!of.heads) throw std::invalid_argument(prefix + "in_proj_xbc: the recurrence has no heads");
    Mamba2::Parts parts;
    parts.gates = matrix(prefix + "in_proj_z", of.values(), hidden);
    parts.xbc = matrix(prefix + "in_proj_xbc", of.channels, hidden);
    parts.dt = matrix(prefix + "in_proj_dt", of.heads, hidden);
    parts.out = matrix(prefix + "out_proj", hidden, of.values());
    parts.taps = needed(prefix + "conv1d.weight", of.taps * of.channels);
    parts.bias = vector(prefix + "conv1d.bias", of.channels);
    parts.a_log = needed(prefix + "A_log", of.heads);
    parts.dt_bias = needed(prefix + "dt_bias", of.heads);
    parts.skip = needed(prefix + "D", of.heads);
    parts.norm = of.norms ? needed(prefix + "norm.weight", of.values()) : nullptr;
    return std::make_unique<Mamba2>(of, parts, eps);
  }

  size_t bytes() const { return arena_.taken(); }

  // Throws where these numerics do not multiply a matrix as it is packed.
  void require_numerics(const std::string& numerics) const {
    const auto require = [&](const std::string& name, Kind kind) {
      if (kind != Kind::f32 && kind != Kind::bf16 && has_integers(kind) != (numerics == kInteger))
        throw std::invalid_argument(name + ": " + numerics + " numerics do not multiply " + stored_as(kind).name);
    };
    for (const auto& [name, m] : matrices_) require(name, m.kind);
    for (const auto& [name, table] : tables_) require(name, table.matrix().kind);
  }

 private:
  struct Vector {
    const float* data;
    int64_t count;
  };

  static Matrix empty(const std::string& name, Kind kind, int64_t outputs, int64_t inputs) {
    const int64_t most = stored_as(kind).most_inputs;
    if (inputs > most) throw std::invalid_argument(name + ": integer sums hold " + std::to_string(most) + " inputs");
    Matrix m;
    m.kind = kind;
    m.outputs = outputs;
    m.inputs = inputs;
    m.panels = (outputs + kOutputs - 1) / kOutputs;
    m.blocks = (inputs + kDepth - 1) / kDepth;
    return m;
  }

  static void require_size(const std::string& name, const Matrix& m, int64_t outputs, int64_t inputs) {
    if ((outputs && m.outputs != outputs) || (inputs && m.inputs != inputs))
      throw std::invalid_argument(name + ": got [" + std::to_string(m.outputs) + ", " + std::to_string(m.inputs) +
                                  "], accepted [" + std::to_string(outputs ? outputs : m.outputs) + ", " +
                                  std::to_string(inputs ? inputs : m.inputs) + "]");
  }

  const int threads_;
  Arena arena_;
  std::map<std::string, Matrix> matrices_;
  std::map<std::string, Matrix> rooms_;  // of matrices to come, by name
  std::map<std::string, Table> tables_;  // whose rows stay in a file
  std::map<std::string, Vector> vectors_;
};

// Rows [first, rows.count) of states, [rows][width], into tiles.
inline void rows_to_tiles(const float* states, int64_t width, int64_t rows, float* tiles) {
  for (int64_t r = 0; r < rows; ++r) {
    float* to = tiles + r / kRows * width * kRows + r % kRows;
    for (int64_t c = 0; c < width; ++c) to[c * kRows] = states[r * width + c];
  }
}

// Of tiles, [tiles][width][16], rows to where each stands `stride` values behind the one before.
inline void rows_of_tiles(const Team& team, const float* tiles, int64_t width, int64_t rows, float* states,
                          int64_t stride) {
  team.each(rows, 1, [&](Pieces& pieces) {
    while (pieces.next())
      for (int64_t r = pieces.first; r < pieces.last; ++r) {
        const float* from = tiles + r / kRows * width * kRows + r % kRows;
        for (int64_t c = 0; c < width; ++c) states[r * stride + c] = from[c * kRows];
      }
  });
}

struct Shape {
  int64_t layers, hidden, vocabulary;
  Heads heads;
  Form form;
  float embedding = 1.0f;  // what embeddings are multiplied by
  float divisor = 1.0f;    // of logits
  Recurrence recurrence = {};  // of the layers that have a mixer; their number is found
  float cap = 0.0f;         // of what tanh leaves of logits; 0: all
  float own_inputs = 1.0f;  // what the embeddings are multiplied by that are inputs of single layers
  bool centred = false;        // norms of what attention, networks and the head read are layer norms
  bool parallel = false;       // networks read what attention reads
  LatentSizes latent = {};     // of all layers, or of none; heads are one of keys then, of a latent and what is turned
};

// Where the layers of a network differ.
struct Place {
  static constexpr int64_t kOwn = -1, kPassed = -2;

  int rope;        // of the network's tables, or Layer::kNone
  int64_t window;  // or 0
  int64_t keys = 0, size = 0;  // key-value heads, and channels of a head; 0: those of the shape
  // The layer before whose keys and values it reads, or its own. Or kPassed - i: it reads the one layer of the i-th slab of
  // a lane, which holds another model's and is not written.
  int64_t reads = kOwn;
  bool ahead = false;  // rows see those after them, of their lane
};

// Inputs of single layers: of each token as many numbers for each layer, made of an embedding and of the first states.
struct OwnInputs {
  Table embedding;                // [vocabulary][layers * size], or without outputs
  Matrix projection;              // [layers * size][hidden], or without panels
  const float* norm = nullptr;    // [size], of what the projection gives
  int64_t size = 0;               // of one layer's
};

class Decoder {
 public:
  // places: of all layers.
  Decoder(const Kernels& kernels, const Shape& shape, const Weights& weights, std::vector<Rope> ropes,
          const std::vector<Place>& places)
      : shape_(shape), ropes_(std::move(ropes)), space_(kernels, views_of(shape, places)),
        embedding_(weights.table("model.embed_tokens", shape.vocabulary, shape.hidden)),
        head_(weights.matrix(weights.has("lm_head") ? "lm_head" : "model.embed_tokens", shape.vocabulary, shape.hidden)),
        norm_(weights.norm("model.norm", shape.hidden, shape.centred)),
        embedding_norm_(weights.vector("model.embed_norm.weight", shape.hidden)) {
    weights.needed("model.norm.weight", shape.hidden);
    add_own_inputs(weights);
    if (weights.has("model.fc")) {
      fusion_ = weights.matrix("model.fc", shape.hidden);
      fusion_norm_ = weights.norm("model.hidden_norm", shape.hidden);
    }
    for (int64_t i = 0; i < shape.layers; ++i) {
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      const Place& place = places[static_cast<size_t>(i)];
      mixers_.push_back(shape.recurrence.taps ? weights.mixer(prefix, shape.recurrence, shape.hidden, shape.form.eps) : nullptr);
      const Mixer* mixer = mixers_.back().get();
      layers_.push_back(weights.layer(prefix, heads_of(shape, place), shape.hidden, shape.hidden, mixer, shape.latent,
                                      place.reads == Place::kOwn, weights.has(prefix + "self_attn.v_proj")));
      if (mixer) ++shape_.recurrence.layers;
      layers_.back().input_norm.centred = layers_.back().post_norm.centred = shape.centred;
      layers_.back().parallel = shape.parallel;
      add_convolutions(weights, prefix, mixer);
      add_place(place, layers_.back().attends());
      add_own_parts(weights, prefix);
      require_routing(layers_.back().experts, shape.form.routing);
      gated_.try_emplace(layers_.back().network.wide().panels);
      if (fusion_.panels && !(layers_.back().k.panels && !layers_.back().whole_norms))
        throw std::invalid_argument("model.fc: accepted where all layers have keys of their own, normed by head");
    }
    if (kinds_.empty()) kinds_.push_back({shape.heads, 0});
    for (const Kind& kind : kinds_)
      if (passed_ && (!kind.heads.size || kind.layers))
        throw std::invalid_argument("keys: got a slab that no layer reads, or layers that write one beside those that do "
                                    "not, accepted passed slabs for all layers");
  }

  // Heads of the layers whose keys and values stand in one slab.
  struct Kind {
    Heads heads;
    int64_t layers;  // that have keys and values of their own
  };
  const std::vector<Kind>& kinds() const { return kinds_; }

  // Keys and values of one lane, of the layers of one kind.
  struct Slab {
    void* data;  // [layers with their own][2][key-value heads][capacity][head size]; of latents [layers][capacity][size]
    int64_t capacity;
  };

  struct Call {
    std::vector<Rows> lanes;
    const int64_t* tokens;    // [rows of all lanes]; null where there are inputs
    std::vector<Slab> slabs;  // of each lane, one for each kind
    bool half;                // the slabs hold bfloat16
    std::vector<int64_t> features;  // of which layers' inputs; `layers`: behind the final norm
    float* states;                  // [rows][features * hidden]
    float* logits;                  // [rows - first_logits][vocabulary] or null
    int64_t first_logits;
    int64_t count;         // of the largest finite logits of each row that are wanted
    int64_t* chosen;       // [rows][count]: their tokens, largest first, the lowest first of equals; -1 where there are fewer
    float* chosen_logits;  // [rows][count], -inf where there are fewer
    int64_t layers;        // that are run
    std::vector<Memory*> memories;   // of each lane, of the layers with a mixer; none where there are no such layers
    std::vector<int64_t> committed;  // of each lane that has a memory, slots that hold tokens for good
    ExpertReads* reads = nullptr;  // is filled, where there is one
    const float* inputs = nullptr;  // [rows][hidden]: what the first layer reads, or the embeddings of tokens
  };

  // On so many threads, or on fewer where those are faster. Throws FileChanged where embeddings stand in a file that is not
  // what it was.
  void forward(const Call& call, int threads) {
    if (call.layers < shape_.layers) {
      run(call, threads);
    } else {
      int64_t slots = 0;
      for (const Rows& rows : call.lanes) slots = std::max(slots, rows.start + rows.count);
      paces_.run(threads, call.lanes.back().first + call.lanes.back().count, slots, call.logits || call.count,
                 [&](int fewer) { run(call, fewer); });
    }
    require_same();
  }

  // Fills the slabs of lanes with keys and values of features, [rows][inputs of the fusion], that are fused and normed, and
  // that all layers read as they are. The other results of the call are left out.
  void remember(const Call& call, const float* features, int threads) {
    const int64_t width = fusion_.inputs;
    space_.prepare(call.lanes, shape_.hidden, heads(), ropes_, threads);
    const Input wide = space_.input(space_.second, width), in = space_.input(space_.first, shape_.hidden);
    float* tiled = normed_.reserve(static_cast<size_t>(space_.tiles * width * kRows));
    rows_to_tiles(features, width, space_.rows, tiled);
    const auto run_all = [&](const Team& team) {
      copy_tiles(team, space_, tiled, width, wide);
      products_of(team, space_, {&fusion_}, wide, [&](size_t, int64_t panel, const float* sums, const Pieces&) {
        const int64_t live = std::min<int64_t>(kOutputs, fusion_.outputs - panel * kOutputs) * kRows;
        for (int64_t t = 0; t < space_.tiles; ++t)
          std::copy_n(sums + t * kOutputs * kRows, live, space_.x + (t * shape_.hidden + panel * kOutputs) * kRows);
      });
      norm_tiles(team, space_, space_.x, fusion_norm_, shape_.hidden, shape_.form.eps, in);
      std::vector<Cache> caches(call.lanes.size());
      for (int64_t i = 0; i < shape_.layers; ++i) {
        const Layer& layer = layers_[static_cast<size_t>(i)];
        for (size_t lane = 0; lane < caches.size(); ++lane) caches[lane] = cache_of(call, lane, i);
        LayerRun(team, space_, layer.heads, call.lanes, shape_.form).keep_rows(layer, caches.data(), in);
      }
    };
    Pool::shared().run(threads, run_all, space_.around());
  }
  int64_t fused_inputs() const { return fusion_.inputs; }  // of `remember`; 0: there is none

  // Logits [rows][vocabulary] of states [rows][hidden] behind the final norm.
  void read(const float* states, int64_t rows, float* logits, int threads) {
    begin_rows(states, rows, threads);
    const Input in = space_.input(space_.first, shape_.hidden);
    const auto run_all = [&](const Team& team) {
      copy_tiles(team, space_, space_.x, shape_.hidden, in);
      Readout(space_, head_, 0, shape_.divisor, shape_.cap).run(team, in, logits);
    };
    Pool::shared().run(threads, run_all, space_.around());
  }

  // A token's embedding as it is stored: float [hidden].
  void embedding(int64_t token, float* out) const { row_of(embedding_, token, out); }

  // The same of the inputs of single layers, float [layers * size]; there may be none.
  void own_embedding(int64_t token, float* out) const { row_of(own_.embedding, token, out); }
  int64_t own_channels() const { return own_.embedding.outputs() ? own_.embedding.inputs() : 0; }

  // Throws FileChanged where embeddings stand in a file that is not what it was.
  void require_same() const {
    embedding_.require_same();
    own_.embedding.require_same();
  }

  const Shape& shape() const { return shape_; }

  // Return how many of the first so many layers have experts.
  int64_t routed(int64_t layers) const {
    return std::count_if(layers_.begin(), layers_.begin() + layers, [](const Layer& layer) { return layer.experts.any(); });
  }

  // Return how many of the first so many layers have keys and values of a kind.
  int64_t attending(int64_t layers, size_t kind) const {
    return std::count_if(kept_.begin(), kept_.begin() + layers,
                         [&](const Kept& kept) { return kept.attends && kept.own && kept.kind == kind; });
  }
  // Return how many layers of keys and values that is: two layers' latents stand in the place of one layer's.
  int64_t kept(int64_t layers, size_t kind) const {
    const int64_t own = passed_ ? 1 : attending(layers, kind);
    return shape_.latent.rank ? (own + 1) / 2 : own;
  }
  // Return whether rows of a layer see those after them: words do not say what they see.
  bool looks_ahead() const {
    return std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.ahead; });
  }
  // Return whether all slabs are another model's: rows see their prefix alone.
  bool passed() const { return passed_; }
  const Kernels& kernels() const { return space_.kernels; }

 private:
  // Where the keys and values are that a layer reads: which of their kind's slab. own: it writes them, too.
  struct Kept {
    size_t kind;
    int64_t place;
    bool attends, own;
  };

  static Heads heads_of(const Shape& shape, const Place& place) {
    return {shape.heads.queries, place.keys ? place.keys : shape.heads.keys, place.size ? place.size : shape.heads.size};
  }

  static std::vector<View> views_of(const Shape& shape, const std::vector<Place>& places) {
    std::vector<View> found;
    for (const Place& place : places) found.push_back({place.window, heads_of(shape, place).groups(), place.ahead});
    return found;
  }

  // Reads the convolutions around the last layer's attention and network.
  void add_convolutions(const Weights& weights, const std::string& prefix, bool mixes) {
    Layer& layer = layers_.back();
    layer.attention_convolution = weights.convolution(prefix + "attention_conv.", shape_.hidden);
    layer.network_convolution = weights.convolution(prefix + "mlp_conv.", shape_.hidden);
    const bool plain = !mixes && layer.q.panels && layer.network.down.panels && !layer.experts.any() && !layer.parallel;
    if ((layer.attention_convolution.any() || layer.network_convolution.any()) &&
        !(plain && !layer.attention_norm && !layer.network_norm))
      throw std::invalid_argument(prefix + "attention_conv, mlp_conv: accepted in layers of attention and a network alone");
  }

  // Says where the last layer stands, and whose keys and values it reads.
  void add_place(const Place& place, bool attends) {
    Layer& layer = layers_.back();
    layer.rope = place.rope;
    layer.window = place.window;
    layer.ahead = place.ahead;
    if (!attends) return kept_.push_back({0, 0, false, false});
    const int64_t size = layer.heads.size;
    if (layer.rope != Layer::kNone && 2 * ropes_[static_cast<size_t>(layer.rope)].half() > size)
      throw std::invalid_argument("frequencies: got " + std::to_string(ropes_[static_cast<size_t>(layer.rope)].half()) +
                                  ", accepted up to " + std::to_string(size / 2) + " for heads of " + std::to_string(size));
    if (place.reads <= Place::kPassed) return add_passed(static_cast<size_t>(Place::kPassed - place.reads));
    if (place.reads != Place::kOwn) {
      const bool known = place.reads >= 0 && place.reads < static_cast<int64_t>(kept_.size());
      const Kept* source = known ? &kept_[static_cast<size_t>(place.reads)] : nullptr;
      if (!source || !source->own || !(kinds_[source->kind].heads == layer.heads))
        throw std::invalid_argument("keys: got those of layer " + std::to_string(place.reads) +
                                    ", accepted a layer before with its own, of the same heads");
      return kept_.push_back({source->kind, source->place, true, false});
    }
    size_t kind = 0;
    while (kind < kinds_.size() && !(kinds_[kind].heads == layer.heads)) ++kind;
    if (kind == kinds_.size()) kinds_.push_back({layer.heads, 0});
    kept_.push_back({kind, kinds_[kind].layers++, true, true});
  }

  // Says that the last layer reads a slab that is passed.
  void add_passed(size_t slab) {
    const Heads& heads = layers_.back().heads;
    if (layers_.back().ahead) throw std::invalid_argument("ahead: got a layer that reads another model's keys");
    passed_ = true;
    if (slab >= kinds_.size()) kinds_.resize(slab + 1, {{0, 0, 0}, 0});
    Kind& kind = kinds_[slab];
    if (!kind.heads.size) kind.heads = heads;
    if (!(kind.heads == heads))
      throw std::invalid_argument("keys: got layers of other heads for slab " + std::to_string(slab) +
                                  ", accepted one of the same heads for all that read it");
    kept_.push_back({slab, 0, true, false});
  }

  void add_own_inputs(const Weights& weights) {
    const std::string embedding = "model.own_embedding", projection = "model.own_projection";
    if (!weights.has(projection)) return;
    own_.projection = weights.matrix(projection, 0, shape_.hidden);
    own_.embedding = weights.table(embedding, shape_.vocabulary, own_.projection.outputs);
    own_.size = weights.count("model.own_norm.weight");
    own_.norm = weights.needed("model.own_norm.weight", own_.size);
    if (own_.projection.outputs != shape_.layers * own_.size)
      throw std::invalid_argument(projection + ": got " + std::to_string(own_.projection.outputs) + " outputs, accepted " +
                                  std::to_string(shape_.layers * own_.size));
  }

  // Reads the matrices of the last layer's own inputs.
  void add_own_parts(const Weights& weights, const std::string& prefix) {
    if (!own_.size) return;
    Layer& layer = layers_.back();
    layer.own_gate = weights.matrix(prefix + "own_gate", own_.size, shape_.hidden);
    layer.own_out = weights.matrix(prefix + "own_out", shape_.hidden, own_.size);
    layer.own_norm = weights.vector(prefix + "own_norm.weight", shape_.hidden);
  }

  static void require_routing(const Experts& experts, const Routing& routing) {
    if (!experts.any()) return;
    const int64_t count = experts.count(), groups = routing.groups, kept = routing.kept;
    if (groups < 1 || groups > 64 || count % groups || kept < 1 || kept > groups)
      throw std::invalid_argument("groups of experts: got " + std::to_string(kept) + " of " + std::to_string(groups) +
                                  " for " + std::to_string(count) + " experts, accepted up to 64 of one size");
    if (routing.chosen < 1 || routing.chosen > count / groups * kept)
      throw std::invalid_argument("chosen experts: got " + std::to_string(routing.chosen) + ", accepted 1 to " +
                                  std::to_string(count / groups * kept));
  }

  void run(const Call& call, int threads) {
    const int64_t hidden = shape_.hidden;
    space_.prepare(call.lanes, hidden, heads(), ropes_, threads);
    const Input in = space_.input(space_.first, hidden);
    // one for each size: behind the channels of one layer stands nothing of another
    std::map<int64_t, Input> attended, gated;
    for (const Kind& kind : kinds_) {
      const int64_t channels = attended_channels(kind.heads);
      attended[channels] = space_.input(attended_[channels], channels);
    }
    for (auto& [panels, buffer] : gated_) gated[panels] = space_.input(buffer, std::max<int64_t>(panels, 1) * kOutputs);
    Input own{};
    float* inputs = nullptr;
    if (own_.size) {
      own = space_.input(own_gated_, own_.size);
      inputs = own_inputs_.reserve(static_cast<size_t>((space_.tiles * shape_.layers * own_.size + kOutputs) * kRows));
    }
    Leaders leaders{call.count};
    leaders.most = most_.reserve(static_cast<size_t>(leaders.lists(threads) * leaders.size(space_.tiles)));
    leaders.at = at_.reserve(static_cast<size_t>(leaders.lists(threads) * leaders.size(space_.tiles)));
    if (call.count) leaders.clear(threads, space_.tiles);
    float* normed = normed_.reserve(static_cast<size_t>(space_.tiles * hidden * kRows));
    Input mixed{};
    space_.experts.reads = call.reads;
    if (call.reads) call.reads->begin(space_.rows);
    if (!call.memories.empty()) {
      lineages_.begin(call.memories, call.lanes, call.committed);
      mixed = space_.input(scratch_.mixed, mixers_width());
    }
    if (call.inputs) rows_to_tiles(call.inputs, hidden, space_.rows, space_.x);
    const auto run_all = [&](const Team& team) {
      if (!call.inputs) embed(team, call.tokens);
      if (own_.size) make_own_inputs(team, call.tokens, in, inputs);
      std::vector<Cache> caches(call.lanes.size());
      LayerRun of_latents(team, space_, shape_.heads, call.lanes, shape_.form);
      std::unique_ptr<LatentRun> latents;
      if (shape_.latent.rank)
        latents = std::make_unique<LatentRun>(team, space_, of_latents, shape_.heads, shape_.latent, latent_);
      int64_t mixing = 0;  // layers so far
      for (int64_t i = 0; i < call.layers; ++i) {
        take_features(team, call, i, space_.x);
        const Layer& layer = layers_[static_cast<size_t>(i)];
        const Mixer* mixer = mixers_[static_cast<size_t>(i)].get();
        LayerRun run(team, space_, layer.heads, call.lanes, shape_.form);
        const Input& network = gated[layer.network.wide().panels];
        if (mixer || layer.attends()) run.norm_rows(layer.input_norm, layer.attention_convolution, in);
        if (mixer) {
          mixer->run(team, space_, lineages_, mixing++, in, scratch_, mixed);
          run.add_rows(layer, mixer->out(), mixed);
        }
        if (layer.attends()) {  // also beside a mixer, of the same norm
          for (size_t lane = 0; lane < caches.size(); ++lane) caches[lane] = cache_of(call, lane, i);
          const Input& heads = attended[attended_channels(layer.heads)];
          if (latents)
            latents->attend_rows(layer, caches.data(), in, heads);
          else
            run.attend_rows(layer, caches.data(), in, heads);
          run.add_rows(layer, layer.o, heads);
        }
        run.feed_rows(layer, in, network);
        run.add_own(layer, inputs + i * own_.size * kRows, shape_.layers * own_.size, in, own);
      }
      norm_tiles(team, space_, space_.x, norm_, hidden, shape_.form.eps, in, normed);
      take_features(team, call, shape_.layers, normed);
      if (call.logits || call.count)
        Readout(space_, head_, call.first_logits, shape_.divisor, shape_.cap).run(team, in, call.logits, leaders);
    };
    Pool::shared().run(threads, run_all, space_.around());
    if (!call.memories.empty() && call.layers == shape_.layers) lineages_.end();  // else it is of no further use
    if (call.count) choose(threads, leaders, call);
  }

  // Keys and values that a layer reads.
  Cache cache_of(const Call& call, size_t lane, int64_t layer) const {
    const Kept& kept = kept_[static_cast<size_t>(layer)];
    const Slab& slab = call.slabs[lane * kinds_.size() + kept.kind];
    const Heads& heads = kinds_[kept.kind].heads;
    const bool shared = shape_.latent.rank;
    const int64_t bytes = (shared ? 1 : 2) * heads.keys * slab.capacity * heads.size * (call.half ? 2 : 4);
    return {static_cast<char*>(slab.data) + kept.place * bytes, slab.capacity, call.half, shared};
  }

  // Channels of what a layer's attention gives.
  int64_t attended_channels(const Heads& heads) const {
    return heads.queries * (shape_.latent.rank ? shape_.latent.value : heads.size);
  }

  std::vector<Heads> heads() const {
    std::vector<Heads> found;
    for (const Kind& kind : kinds_) found.push_back(kind.heads);
    return found;
  }

  void row_of(const Table& table, int64_t output, float* out) const {
    std::vector<float> row(static_cast<size_t>(table.width()));
    table.read(space_.kernels, output, row.data());
    std::copy(row.begin(), row.begin() + table.inputs(), out);
  }

  // All layers' own inputs, [tiles][layers * size][16]: norm(projection(x)) and a token's embedding, of both the sum times
  // the root of a half.
  void make_own_inputs(const Team& team, const int64_t* tokens, const Input& in, float* inputs) {
    const int64_t width = own_.projection.outputs, size = own_.size * kRows;
    copy_tiles(team, space_, space_.x, shape_.hidden, in);
    products_of(team, space_, {&own_.projection}, in, [&](size_t, int64_t panel, const float* sums, const Pieces&) {
      const int64_t live = std::min<int64_t>(kOutputs, width - panel * kOutputs);
      for (int64_t t = 0; t < space_.tiles; ++t)
        std::copy_n(sums + t * kOutputs * kRows, live * kRows, inputs + (t * width + panel * kOutputs) * kRows);
    });
    const float root = 1.0f / std::sqrt(static_cast<float>(shape_.hidden)), half = std::sqrt(0.5f);
    team.each(space_.tiles * shape_.layers, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          float* one = inputs + i * size;
          multiply(one, size, root);
          space_.kernels.norm(one, own_.norm, own_.size, shape_.form.eps, nullptr, 0, 0, one);
        }
    });
    team.each(space_.rows, 1, [&](Pieces& pieces) {
      std::vector<float> row(static_cast<size_t>(width));
      while (pieces.next())
        for (int64_t r = pieces.first; r < pieces.last; ++r) {
          row_of(own_.embedding, tokens[r], row.data());
          multiply(row.data(), width, shape_.own_inputs);
          float* to = inputs + r / kRows * width * kRows + r % kRows;
          for (int64_t c = 0; c < width; ++c) to[c * kRows] = (to[c * kRows] + row[static_cast<size_t>(c)]) * half;
        }
    });
  }

  int64_t mixers_width() const {
    int64_t width = 0;
    for (const auto& mixer : mixers_)
      if (mixer) width = std::max(width, mixer->out().inputs);
    return width;
  }

  void begin_rows(const float* states, int64_t rows, int threads) {
    const std::vector<int64_t> positions(static_cast<size_t>(rows), 0);
    Rows given;
    given.count = rows;
    given.positions = positions.data();
    space_.prepare({given}, shape_.hidden, heads(), ropes_, threads);
    rows_to_tiles(states, shape_.hidden, rows, space_.x);
  }

  void embed(const Team& team, const int64_t* tokens) {
    team.each(space_.rows, 1, [&](Pieces& pieces) {
      std::vector<float> row(static_cast<size_t>(embedding_.width()));
      while (pieces.next())
        for (int64_t r = pieces.first; r < pieces.last; ++r) {
          embedding_.read(space_.kernels, tokens[r], row.data());
          if (shape_.embedding != 1.0f) multiply(row.data(), shape_.hidden, shape_.embedding);
          float* to = space_.x + r / kRows * shape_.hidden * kRows + r % kRows;
          for (int64_t c = 0; c < shape_.hidden; ++c) to[c * kRows] = row[static_cast<size_t>(c)];
        }
    });
    if (!embedding_norm_) return;
    team.each(space_.tiles, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t t = pieces.first; t < pieces.last; ++t) {
          float* x = space_.x + t * shape_.hidden * kRows;
          space_.kernels.norm(x, embedding_norm_, shape_.hidden, shape_.form.eps, nullptr, 0, 0, x);
        }
    });
  }

  void take_features(const Team& team, const Call& call, int64_t layer, const float* x) const {
    const int64_t width = static_cast<int64_t>(call.features.size()) * shape_.hidden;
    for (size_t f = 0; f < call.features.size(); ++f)
      if (call.features[f] == layer)
        rows_of_tiles(team, x, shape_.hidden, space_.rows, call.states + static_cast<int64_t>(f) * shape_.hidden, width);
  }

  // Merges what the threads found, the lowest output first of equals.
  void choose(int threads, const Leaders& leaders, const Call& call) const {
    const int64_t size = leaders.size(space_.tiles), count = leaders.count, lists = leaders.lists(threads);
    std::vector<int64_t> next(static_cast<size_t>(lists));  // of each list
    const auto comes_before = [&](int64_t one, int64_t other) {
      const float most = leaders.most[one], least = leaders.most[other];
      return most > least || (most == least && leaders.at[one] < leaders.at[other]);
    };
    for (int64_t r = 0; r < space_.rows; ++r) {
      const int64_t row = leaders.size(r / kRows) + r % kRows;
      for (int64_t i = 0; i < lists; ++i) next[static_cast<size_t>(i)] = i * size + row;
      for (int64_t rank = 0; rank < count; ++rank) {  // a list that is through has given all
        int64_t* best = &next[0];
        for (int64_t& other : next)
          if (comes_before(other, *best)) best = &other;
        call.chosen[r * count + rank] = leaders.at[*best];
        call.chosen_logits[r * count + rank] = leaders.most[*best];
        *best += kRows;
      }
    }
  }

  Shape shape_;
  std::vector<Rope> ropes_;
  mutable Workspace space_;
  Paces paces_;
  const Table embedding_;
  const Matrix head_;
  const Norm norm_;
  const float* embedding_norm_;  // [hidden], or null
  std::vector<Layer> layers_;
  std::vector<Kept> kept_;  // of each layer
  std::vector<Kind> kinds_;
  bool passed_ = false;  // whether all slabs are another model's
  OwnInputs own_;
  Matrix fusion_;     // [hidden][features], of `remember`, or without panels
  Norm fusion_norm_;  // of what it gives
  std::map<int64_t, Buffer<uint32_t>> attended_, gated_;  // by channels, and by panels of gates
  Buffer<uint32_t> own_gated_;
  Buffer<float> own_inputs_;
  std::vector<std::unique_ptr<Mixer>> mixers_;  // of each layer, null where it has none
  Lineages lineages_;
  MixerScratch scratch_;
  LatentScratch latent_;
  Buffer<float> most_, normed_;
  Buffer<int32_t> at_;
};

}  // namespace cpu
