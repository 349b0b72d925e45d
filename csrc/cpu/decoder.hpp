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

namespace cpu {

// Named tensors, packed as they come.
class Weights {
 public:
  explicit Weights(int threads) : threads_(threads) {}

  // A matrix of so many outputs and inputs, kept as `kind`; `pack` fills it.
  void add_matrix(const std::string& name, Kind kind, int64_t outputs, int64_t inputs) {
    const Stored& format = stored_as(kind);
    if (inputs > format.most_inputs)
      throw std::invalid_argument(name + ": integer sums hold " + std::to_string(format.most_inputs) + " inputs");
    Matrix m;
    m.kind = kind;
    m.outputs = outputs;
    m.inputs = inputs;
    m.panels = (outputs + kOutputs - 1) / kOutputs;
    m.blocks = (inputs + kDepth - 1) / kDepth;
    m.data = arena_.take(static_cast<size_t>(m.panels * format.layout.panel_bytes(m.blocks)));
    if (format.quantize)
      m.scales = reinterpret_cast<float*>(arena_.take(static_cast<size_t>(m.panels * kOutputs) * sizeof(float)));
    matrices_[name] = m;
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

  // Return the matrix of this many outputs and inputs (0: any), with its bias if there is one.
  Matrix matrix(const std::string& name, int64_t outputs = 0, int64_t inputs = 0) const {
    Matrix m = stored(name + ".weight");
    if ((outputs && m.outputs != outputs) || (inputs && m.inputs != inputs))
      throw std::invalid_argument(name + ": got [" + std::to_string(m.outputs) + ", " + std::to_string(m.inputs) +
                                  "], accepted [" + std::to_string(outputs ? outputs : m.outputs) + ", " +
                                  std::to_string(inputs ? inputs : m.inputs) + "]");
    m.bias = vector(name + ".bias", m.outputs);
    return m;
  }
  bool has(const std::string& name) const { return matrices_.count(name + ".weight") != 0; }

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

  // inputs: of queries, keys and values; mixes: whether a mixer stands in the place of attention; of: sizes of latents, if
  // attention is over such. A layer has attention, a mixer or a network, or a network behind one of the others.
  Layer layer(const std::string& prefix, const Heads& heads, int64_t hidden, int64_t inputs, bool mixes = false,
              const LatentSizes& of = {}) const {
    Layer one;
    const bool feeds = has(prefix + "mlp.router") || has(prefix + "mlp.up_proj") || has(prefix + "mlp.gate_proj");
    if (of.rank) {
      one.latent = latent(prefix + "self_attn.", heads, of, hidden);
      one.o = matrix(prefix + "self_attn.o_proj", hidden, heads.queries * of.value);
    } else if (!mixes && (!feeds || has(prefix + "self_attn.q_proj"))) {
      one.q = matrix(prefix + "self_attn.q_proj", heads.queries * heads.size, inputs);
      one.k = matrix(prefix + "self_attn.k_proj", heads.keys * heads.size, inputs);
      one.v = matrix(prefix + "self_attn.v_proj", heads.keys * heads.size, inputs);
      one.o = matrix(prefix + "self_attn.o_proj", hidden, heads.queries * heads.size);
      const std::string gate = prefix + "self_attn.gate_proj";
      const bool by_head = has(gate) && stored(gate + ".weight").outputs == heads.queries;
      if (has(gate)) one.head_gate = matrix(gate, heads.queries * (by_head ? 1 : heads.size), inputs);
    }
    one.experts = experts(prefix + "mlp.", hidden);
    if (feeds && !one.experts.any()) one.network = network(prefix + "mlp.", hidden);
    one.input_norm = norm(prefix + "input_layernorm", hidden);
    one.post_norm = norm(prefix + "post_attention_layernorm", hidden);
    one.attention_norm = vector(prefix + "attention_output_norm.weight", hidden);
    one.network_norm = vector(prefix + "mlp_output_norm.weight", hidden);
    one.sinks = vector(prefix + "self_attn.sinks", heads.queries);
    one.whole_norms = count(prefix + "self_attn.q_norm.weight") > heads.size;
    one.q_norm = vector(prefix + "self_attn.q_norm.weight", one.whole_norms ? heads.queries * heads.size : heads.size);
    one.k_norm = vector(prefix + "self_attn.k_norm.weight", one.whole_norms ? heads.keys * heads.size : heads.size);
    return one;
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
    if (!of.heads || !of.norms) throw std::invalid_argument(prefix + "in_proj_xbc: the recurrence has no heads or norms");
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
    parts.norm = needed(prefix + "norm.weight", of.values());
    return std::make_unique<Mamba2>(of, parts, eps);
  }

  size_t bytes() const { return arena_.taken(); }

  // Throws where these numerics do not multiply a matrix as it is packed.
  void require_numerics(const std::string& numerics) const {
    for (const auto& [name, m] : matrices_)
      if (m.kind != Kind::f32 && m.kind != Kind::bf16 && has_integers(m.kind) != (numerics == kInteger))
        throw std::invalid_argument(name + ": " + numerics + " numerics do not multiply " + stored_as(m.kind).name);
  }

 private:
  struct Vector {
    const float* data;
    int64_t count;
  };

  const int threads_;
  Arena arena_;
  std::map<std::string, Matrix> matrices_;
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
  Recurrence recurrence = {};  // of the layers without attention; their number is found
  bool centred = false;        // norms of what attention, networks and the head read are layer norms
  bool parallel = false;       // networks read what attention reads
  LatentSizes latent = {};     // of all layers, or of none; heads are one of keys then, of a latent and what is turned
};

// Where the layers of a network differ.
struct Place {
  int rope;        // of the network's tables, or Layer::kNone
  int64_t window;  // or 0
};

class Decoder {
 public:
  // places: of all layers.
  Decoder(const Kernels& kernels, const Shape& shape, const Weights& weights, std::vector<Rope> ropes,
          const std::vector<Place>& places)
      : shape_(shape), ropes_(std::move(ropes)), space_(kernels, windows_of(places)),
        embedding_(weights.matrix("model.embed_tokens", shape.vocabulary, shape.hidden)),
        head_(weights.has("lm_head") ? weights.matrix("lm_head", shape.vocabulary, shape.hidden) : embedding_),
        norm_(weights.norm("model.norm", shape.hidden, shape.centred)) {
    weights.needed("model.norm.weight", shape.hidden);
    for (int64_t i = 0; i < shape.layers; ++i) {
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      mixers_.push_back(shape.recurrence.taps ? weights.mixer(prefix, shape.recurrence, shape.hidden, shape.form.eps) : nullptr);
      const Mixer* mixer = mixers_.back().get();
      layers_.push_back(weights.layer(prefix, shape.heads, shape.hidden, shape.hidden, mixer, shape.latent));
      if (mixer) layers_.back().o = mixer->out(), ++shape_.recurrence.layers;
      layers_.back().input_norm.centred = layers_.back().post_norm.centred = shape.centred;
      layers_.back().parallel = shape.parallel;
      layers_.back().rope = places[static_cast<size_t>(i)].rope;
      layers_.back().window = places[static_cast<size_t>(i)].window;
      require_routing(layers_.back().experts, shape.form.routing);
      widest_ = std::max(widest_, layers_.back().network.wide().panels);
    }
  }

  // Keys and values of one lane.
  struct Slab {
    void* data;  // [layers with attention][2][key-value heads][capacity][head size]; of latents [layers][capacity][size]
    int64_t capacity;
  };

  struct Call {
    std::vector<Rows> lanes;  // one, where there is a memory
    const int64_t* tokens;    // [rows of all lanes]
    std::vector<Slab> slabs;  // of each lane
    bool half;                // the slabs hold bfloat16
    std::vector<int64_t> features;  // of which layers' inputs; `layers`: behind the final norm
    float* states;                  // [rows][features * hidden]
    float* logits;                  // [rows - first_logits][vocabulary] or null
    int64_t first_logits;
    int64_t count;         // of the largest finite logits of each row that are wanted
    int64_t* chosen;       // [rows][count]: their tokens, largest first, the lowest first of equals; -1 where there are fewer
    float* chosen_logits;  // [rows][count], -inf where there are fewer
    int64_t layers;        // that are run
    Memory* memory = nullptr;  // of layers without attention
    int64_t committed = 0;     // slots that hold tokens for good, where there is a memory
    ExpertReads* reads = nullptr;  // is filled, where there is one
  };

  // On so many threads, or on fewer where those are faster.
  void forward(const Call& call, int threads) {
    if (call.layers < shape_.layers) return run(call, threads);
    int64_t slots = 0;
    for (const Rows& rows : call.lanes) slots = std::max(slots, rows.start + rows.count);
    paces_.run(threads, call.lanes.back().first + call.lanes.back().count, slots, call.logits || call.count,
               [&](int fewer) { run(call, fewer); });
  }

  // Logits [rows][vocabulary] of states [rows][hidden] behind the final norm.
  void read(const float* states, int64_t rows, float* logits, int threads) {
    begin_rows(states, rows, threads);
    const Input in = space_.input(space_.first, shape_.hidden);
    const auto run_all = [&](const Team& team) {
      copy_tiles(team, space_, space_.x, shape_.hidden, in);
      Readout(space_, head_, 0, shape_.divisor).run(team, in, logits);
    };
    Pool::shared().run(threads, run_all, space_.around());
  }

  // A token's embedding as it is stored: float [hidden].
  void embedding(int64_t token, float* out) const {
    std::vector<float> row(static_cast<size_t>(embedding_.blocks * kDepth));
    space_.kernels.weights(embedding_, token, row.data());
    std::copy(row.begin(), row.begin() + shape_.hidden, out);
  }

  const Shape& shape() const { return shape_; }

  // Return how many of the first so many layers have experts.
  int64_t routed(int64_t layers) const {
    return std::count_if(layers_.begin(), layers_.begin() + layers, [](const Layer& layer) { return layer.experts.any(); });
  }

  // Return how many of the first so many layers have keys and values.
  int64_t attending(int64_t layers) const {
    return std::count_if(layers_.begin(), layers_.begin() + layers, [](const Layer& layer) { return layer.attends(); });
  }
  // Return how many layers of keys and values that is: two layers' latents stand in the place of one layer's.
  int64_t kept(int64_t layers) const {
    return shape_.latent.rank ? (attending(layers) + 1) / 2 : attending(layers);
  }
  const Kernels& kernels() const { return space_.kernels; }

 private:
  static std::vector<int64_t> windows_of(const std::vector<Place>& places) {
    std::vector<int64_t> found;
    for (const Place& place : places) found.push_back(place.window);
    return found;
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
    space_.prepare(call.lanes, hidden, shape_.heads, ropes_, threads);
    const Input in = space_.input(space_.first, hidden);
    const bool latent = shape_.latent.rank;
    const Input attended =
        space_.input(space_.second, shape_.heads.queries * (latent ? shape_.latent.value : shape_.heads.size));
    const Input gated = space_.input(space_.third, widest_ * kOutputs);
    Leaders leaders{call.count};
    leaders.most = most_.reserve(static_cast<size_t>(leaders.lists(threads) * leaders.size(space_.tiles)));
    leaders.at = at_.reserve(static_cast<size_t>(leaders.lists(threads) * leaders.size(space_.tiles)));
    if (call.count) leaders.clear(threads, space_.tiles);
    float* normed = normed_.reserve(static_cast<size_t>(space_.tiles * hidden * kRows));
    Input mixed{};
    space_.experts.reads = call.reads;
    if (call.reads) call.reads->begin(space_.rows);
    if (call.memory) {
      lineage_.begin(*call.memory, call.lanes[0], call.committed);
      mixed = space_.input(scratch_.mixed, mixers_width());
    }
    const auto run_all = [&](const Team& team) {
      embed(team, call.tokens);
      std::vector<Cache> caches(call.lanes.size());
      LayerRun run(team, space_, shape_.heads, call.lanes, shape_.form);
      std::unique_ptr<LatentRun> latents;
      if (latent) latents = std::make_unique<LatentRun>(team, space_, run, shape_.heads, shape_.latent, latent_);
      int64_t attending = 0, mixing = 0;  // layers so far
      for (int64_t i = 0; i < call.layers; ++i) {
        take_features(team, call, i, space_.x);
        const Layer& layer = layers_[static_cast<size_t>(i)];
        const Mixer* mixer = mixers_[static_cast<size_t>(i)].get();
        if (mixer || layer.attends()) norm_tiles(team, space_, space_.x, layer.input_norm, hidden, shape_.form.eps, in);
        if (mixer) {
          mixer->run(team, space_, lineage_, mixing++, in, scratch_, mixed);
          run.add_rows(layer, mixed);
          run.feed_rows(layer, in, gated);
        } else if (layer.attends()) {
          for (size_t lane = 0; lane < caches.size(); ++lane)
            caches[lane] = cache_of(call.slabs[lane], attending, call.half);
          ++attending;
          if (latents)
            latents->attend_rows(layer, caches.data(), in, attended);
          else
            run.attend_rows(layer, caches.data(), in, attended);
          run.add_rows(layer, attended);
          run.feed_rows(layer, in, gated);
        } else {
          run.feed_rows(layer, in, gated);
        }
      }
      norm_tiles(team, space_, space_.x, norm_, hidden, shape_.form.eps, in, normed);
      take_features(team, call, shape_.layers, normed);
      if (call.logits || call.count)
        Readout(space_, head_, call.first_logits, shape_.divisor).run(team, in, call.logits, leaders);
    };
    Pool::shared().run(threads, run_all, space_.around());
    if (call.memory && call.layers == shape_.layers) lineage_.end();  // else it is of no further use
    if (call.count) choose(threads, leaders, call);
  }

  // Keys and values of the `place`-th layer that has them.
  Cache cache_of(const Slab& slab, int64_t place, bool half) const {
    const bool shared = shape_.latent.rank;
    const int64_t bytes = (shared ? 1 : 2) * shape_.heads.keys * slab.capacity * shape_.heads.size * (half ? 2 : 4);
    return {static_cast<char*>(slab.data) + place * bytes, slab.capacity, half, shared};
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
    space_.prepare({given}, shape_.hidden, shape_.heads, ropes_, threads);
    rows_to_tiles(states, shape_.hidden, rows, space_.x);
  }

  void embed(const Team& team, const int64_t* tokens) {
    team.each(space_.rows, 1, [&](Pieces& pieces) {
      std::vector<float> row(static_cast<size_t>(embedding_.blocks * kDepth));
      while (pieces.next())
        for (int64_t r = pieces.first; r < pieces.last; ++r) {
          space_.kernels.weights(embedding_, tokens[r], row.data());
          if (shape_.embedding != 1.0f) multiply(row.data(), shape_.hidden, shape_.embedding);
          float* to = space_.x + r / kRows * shape_.hidden * kRows + r % kRows;
          for (int64_t c = 0; c < shape_.hidden; ++c) to[c * kRows] = row[static_cast<size_t>(c)];
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
  const Matrix embedding_, head_;
  const Norm norm_;
  std::vector<Layer> layers_;
  int64_t widest_ = 1;  // panels of gates
  std::vector<std::unique_ptr<Mixer>> mixers_;  // of each layer, null where it has attention
  Lineage lineage_;
  MixerScratch scratch_;
  LatentScratch latent_;
  Buffer<float> most_, normed_;
  Buffer<int32_t> at_;
};

}  // namespace cpu
