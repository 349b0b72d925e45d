// An EAGLE-3 head: one decoder layer over the target's hidden states, on the kernels of the target.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cpu/decoder.hpp"

namespace cpu {

struct EagleShape {
  int64_t hidden, vocabulary;  // the draft's own
  Heads heads;
  float eps;
  bool norm_before_residual, norm_logits, norm_recurrent;
  int64_t window = 0;  // places that a row sees, its own included; 0: all
};

class Eagle {
 public:
  Eagle(const Kernels& kernels, const EagleShape& shape, const Weights& weights, Rope rope)
      : shape_(shape), ropes_{std::move(rope)}, space_(kernels, {{shape.window, shape.heads.groups()}}),
        layer_(windowed(weights.layer("layers.0.", shape.heads, shape.hidden, 2 * shape.hidden), shape.window)),
        fusion_(weights.matrix("fc", shape.hidden)), head_(weights.matrix("lm_head", shape.vocabulary, shape.hidden)),
        input_norm_(weights.needed("layers.0.input_layernorm.weight", shape.hidden)),
        hidden_norm_(weights.needed("layers.0.hidden_norm.weight", shape.hidden)),
        norm_(weights.needed("norm.weight", shape.hidden)) {
    weights.needed("layers.0.post_attention_layernorm.weight", shape.hidden);
  }

  struct Call {
    std::vector<Rows> lanes;
    const float* hidden;               // [rows of all lanes][hidden]
    const float* embeddings;           // [rows][hidden]
    std::vector<Decoder::Slab> slabs;  // of each lane, of one layer
    bool half;                         // the slabs hold bfloat16
    float* states;          // [rows][hidden], recurrent
    float* logits;          // [rows - first_logits][vocabulary] or null
    int64_t first_logits;

    int64_t rows() const { return lanes.back().first + lanes.back().count; }
  };

  // Says what a lane's hidden states come from: features of the target, which are fused, or else earlier states.
  struct Source {
    const float* features;    // [rows][inputs of the fusion layer] or null
    const float* states;      // [any][hidden]
    const int64_t* sources;   // [rows]: the rows of `states`
  };

  struct Inputs {
    const Decoder* target;        // whose embeddings are read
    const int64_t* tokens;        // [rows of all lanes]
    std::vector<Source> sources;  // of each lane
  };

  // call: without hidden states and embeddings.
  void forward(const Inputs& inputs, Call call, int threads) {
    const int64_t hidden = shape_.hidden, rows = call.rows(), width = fusion_.inputs;
    float* states = given_.reserve(static_cast<size_t>(rows * hidden));
    float* embeddings = read_.reserve(static_cast<size_t>(rows * hidden));
    for (int64_t r = 0; r < rows; ++r) inputs.target->embedding(inputs.tokens[r], embeddings + r * hidden);
    inputs.target->require_same();
    float* features = features_.reserve(static_cast<size_t>(rows * width));
    float* fused = states_.reserve(static_cast<size_t>(rows * hidden));
    int64_t read = 0;  // rows with features
    for (size_t lane = 0; lane < call.lanes.size(); ++lane) {
      const Rows& own = call.lanes[lane];
      const Source& from = inputs.sources[lane];
      if (from.features) {
        std::copy_n(from.features, own.count * width, features + read * width);
        read += own.count;
      } else {
        for (int64_t r = 0; r < own.count; ++r)
          std::copy_n(from.states + from.sources[r] * hidden, hidden, states + (own.first + r) * hidden);
      }
    }
    if (read) fuse(features, read, fused, threads);
    for (size_t lane = 0; lane < call.lanes.size(); ++lane) {
      const Rows& own = call.lanes[lane];
      if (!inputs.sources[lane].features) continue;
      std::copy_n(fused, own.count * hidden, states + own.first * hidden);
      fused += own.count * hidden;
    }
    call.hidden = states;
    call.embeddings = embeddings;
    forward(call, threads);
  }

  // On so many threads, or on fewer where those are faster.
  void forward(const Call& call, int threads) {
    int64_t slots = 0;
    for (const Rows& rows : call.lanes) slots = std::max(slots, rows.start + rows.count);
    paces_.run(threads, call.rows(), slots, call.logits, [&](int fewer) { run(call, fewer); });
  }

  // The target's features, [rows][inputs of the fusion layer], as hidden states [rows][hidden].
  void fuse(const float* features, int64_t rows, float* out, int threads) {
    const int64_t width = fusion_.inputs;
    const std::vector<int64_t> positions(static_cast<size_t>(rows), 0);
    Rows given;
    given.count = rows;
    given.positions = positions.data();
    space_.prepare({given}, shape_.hidden, {shape_.heads}, ropes_, threads);
    const Input in = space_.input(fused_, width);
    float* tiled = wide_.reserve(static_cast<size_t>(space_.tiles * width * kRows));
    rows_to_tiles(features, width, rows, tiled);
    const auto run_all = [&](const Team& team) {
      copy_tiles(team, space_, tiled, width, in);
      products_of(team, space_, {&fusion_}, in, [&](size_t, int64_t panel, const float* sums, const Pieces&) {
        const int64_t live = std::min<int64_t>(kOutputs, fusion_.outputs - panel * kOutputs);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t o = 0; o < live; ++o)
            out[r * shape_.hidden + panel * kOutputs + o] =
                sums[(r / kRows * kOutputs + o) * kRows + r % kRows];
      });
    };
    Pool::shared().run(threads, run_all, space_.around());
  }

  const EagleShape& shape() const { return shape_; }
  int64_t fused_inputs() const { return fusion_.inputs; }

 private:
  void run(const Call& call, int threads) {
    const int64_t hidden = shape_.hidden, rows = call.rows();
    space_.prepare(call.lanes, hidden, {shape_.heads}, ropes_, threads);
    const int64_t tiles = space_.tiles, size = hidden * kRows;
    const Input both = space_.input(space_.first, 2 * hidden), normed = space_.input(normed_, hidden);
    const Input attended = space_.input(space_.second, shape_.heads.queries * shape_.heads.size);
    const Input gated = space_.input(space_.third, layer_.network.wide().panels * kOutputs);
    float* embedded = embedded_.reserve(static_cast<size_t>(tiles * size));
    float* plain = plain_.reserve(static_cast<size_t>(tiles * size));
    rows_to_tiles(call.hidden, hidden, rows, space_.x);
    rows_to_tiles(call.embeddings, hidden, rows, embedded);
    const auto run_all = [&](const Team& team) {
      const Kernels& kernels = space_.kernels;
      team.each(tiles, 1, [&](Pieces& pieces) {
        while (pieces.next())
          for (int64_t t = pieces.first; t < pieces.last; ++t) {
            kernels.norm(embedded + t * size, input_norm_, hidden, shape_.eps, &both, t, 0, nullptr);
            float* x = space_.x + t * size;
            kernels.norm(x, hidden_norm_, hidden, shape_.eps, &both, t, hidden, shape_.norm_before_residual ? x : nullptr);
          }
      });
      LayerRun run(team, space_, shape_.heads, call.lanes, Form{hidden, shape_.eps});
      std::vector<Cache> caches;
      for (const Decoder::Slab& slab : call.slabs) caches.push_back({slab.data, slab.capacity, call.half});
      run.run(layer_, caches.data(), both, attended, normed, gated);
      if (shape_.norm_recurrent || shape_.norm_logits)
        norm_tiles(team, space_, space_.x, norm_, hidden, shape_.eps, normed, plain);
      else
        copy_tiles(team, space_, space_.x, hidden, normed);
      rows_of_tiles(team, shape_.norm_recurrent ? plain : space_.x, hidden, rows, call.states, hidden);
      if (call.logits) Readout(space_, head_, call.first_logits).run(team, normed, call.logits);
    };
    Pool::shared().run(threads, run_all, space_.around());
  }

  static Layer windowed(Layer layer, int64_t window) {
    layer.window = window;
    return layer;
  }

  const EagleShape shape_;
  std::vector<Rope> ropes_;
  Workspace space_;
  Paces paces_;
  const Layer layer_;
  const Matrix fusion_, head_;
  const float *input_norm_, *hidden_norm_, *norm_;
  Buffer<uint32_t> normed_, fused_;
  Buffer<float> embedded_, plain_, wide_, given_, read_, features_, states_;
};

}  // namespace cpu
