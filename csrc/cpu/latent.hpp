// Latent attention: all heads share one latent of a row and one turned key, and the cache keeps these alone.
//
// A head's keys are a matrix of its own times the latent, and so are its values. The first matrix is multiplied to the
// head's query instead, which makes it one over latents, and the second to what attention gives of latents. So attention
// is that of one key-value head whose keys are a latent and the turned key behind it, and whose values are the same
// numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/layer.hpp"

namespace cpu {

// Holds buffers that all forwards of a network with latent attention use.
struct LatentScratch {
  Buffer<float> low, wide;  // [tiles][channels][16]: small queries, and those of all heads
  Buffer<uint32_t> low_in, plain, latents;
};

// One forward's layers with latent attention. Made once, outside of the stages.
class LatentRun {
 public:
  LatentRun(const Team& team, Workspace& space, LayerRun& run, const Heads& heads, const LatentSizes& sizes,
            LatentScratch& scratch)
      : team_(team), space_(space), run_(run), heads_(heads), sizes_(sizes),
        low_(scratch.low.reserve(static_cast<size_t>(space.tiles * rounded_up(sizes.query_rank, kOutputs) * kRows))),
        wide_(scratch.wide.reserve(static_cast<size_t>(space.tiles * heads.queries * sizes.query() * kRows))),
        low_in_(space.input(scratch.low_in, std::max<int64_t>(sizes.query_rank, 1))),
        plain_(space.input(scratch.plain, heads.queries * plain_stride())),
        latents_(space.input(scratch.latents, heads.queries * heads.size)) {}

  // caches: the layer's of each lane. Heads' values come side by side into `attended`.
  void attend_rows(const Layer& layer, const Cache* caches, const Input& in, const Input& attended) {
    const Latent& latent = layer.latent;
    const bool small = latent.q_a.panels;
    float* const latent_of_rows = space_.qkv + heads_.queries * heads_.size * kRows;
    products_of(team_, space_, {small ? &latent.q_a : &latent.q_b, &latent.kv_a}, in,
                [&](size_t part, int64_t panel, const float* sums, const Pieces&) {
                  if (part == 1) return keep(latent.kv_a, panel, sums, latent_of_rows, heads_.channels());
                  if (small) return keep(latent.q_a, panel, sums, low_, sizes_.query_rank);
                  keep(latent.q_b, panel, sums, wide_, heads_.queries * sizes_.query());
                });
    if (small) {
      norm_tiles(team_, space_, low_, latent.q_norm, sizes_.query_rank, sizes_.eps, low_in_);
      products_of(team_, space_, {&latent.q_b}, low_in_, [&](size_t, int64_t panel, const float* sums, const Pieces&) {
        keep(latent.q_b, panel, sums, wide_, heads_.queries * sizes_.query());
      });
    }
    place(layer, caches);
    by_heads(latent.keys, plain_, plain_stride(), [&](int64_t head, int64_t panel, const float* sums) {
      keep(latent.keys[0], panel, sums, space_.qkv + head * heads_.size * kRows, heads_.channels());
    });
    run_.attend(layer, caches, latents_);
    by_heads(latent.values, latents_, heads_.size, [&](int64_t head, int64_t panel, const float* sums) {
      const int64_t live = std::min<int64_t>(kOutputs, sizes_.value - panel * kOutputs);
      for (int64_t t = 0; t < space_.tiles; ++t)
        space_.kernels.copy(sums + t * kOutputs * kRows, live, attended, t, head * sizes_.value + panel * kOutputs);
    });
  }

 private:
  // Channels of a head's plain query among those of all heads: each begins with a block.
  int64_t plain_stride() const { return rounded_up(sizes_.plain, kDepth); }

  // Copies a panel's sums, without the padding, to [tiles][channels][16].
  void keep(const Matrix& m, int64_t panel, const float* sums, float* to, int64_t channels) const {
    const int64_t live = std::min<int64_t>(kOutputs, m.outputs - panel * kOutputs);
    for (int64_t t = 0; t < space_.tiles; ++t)
      std::copy_n(sums + t * kOutputs * kRows, live * kRows, to + (t * channels + panel * kOutputs) * kRows);
  }

  // Turns queries and keys, norms latents, and writes these and keys into the cache.
  void place(const Layer& layer, const Cache* caches) {
    const int64_t all = heads_.queries + 1;
    team_.each(space_.tiles * all, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          const int64_t tile = i / all, head = i % all;
          float* states = space_.qkv + (tile * heads_.channels() + head * heads_.size) * kRows;
          if (head < heads_.queries)
            place_query(layer, tile, head, states + sizes_.rank * kRows);
          else
            place_key(layer, caches, tile, states);
        }
    });
  }

  // The turned part of a head's query goes to `to`; its plain part is what the head's matrix of keys reads.
  void place_query(const Layer& layer, int64_t tile, int64_t head, float* to) {
    float* query = wide_ + (tile * heads_.queries + head) * sizes_.query() * kRows;
    space_.kernels.copy(query, sizes_.plain, plain_, tile, head * plain_stride());
    std::copy_n(query + sizes_.plain * kRows, sizes_.turned * kRows, to);
    if (layer.rope != Layer::kNone) run_.rotate(space_.turns(layer.rope), tile, to);
  }

  void place_key(const Layer& layer, const Cache* caches, int64_t tile, float* states) {
    space_.kernels.norm(states, layer.latent.norm, sizes_.rank, sizes_.eps, nullptr, 0, 0, states);
    if (layer.rope != Layer::kNone) run_.rotate(space_.turns(layer.rope), tile, states + sizes_.rank * kRows);
    run_.write_all(caches, false, 0, tile, states);
  }

  // Runs `body(head, panel, sums)` for each panel of matrices of one size, each of which reads its own head's channels:
  // those behind `stride` times the head's number.
  template <typename Body>
  void by_heads(const std::vector<Matrix>& matrices, const Input& in, int64_t stride, const Body& body) {
    const int64_t panels = matrices[0].panels, words = stride * kRows / (space_.kernels.pairs ? 2 : 1);
    team_.each(heads_.queries * panels, 2, [&](Pieces& pieces) {
      const int64_t size = space_.tiles * kOutputs * kRows;
      ThreadScratch& mine = space_.threads[static_cast<size_t>(pieces.index())];
      float* sums = mine.sums.reserve(static_cast<size_t>(2 * size));
      uint8_t* scratch = mine.bytes.reserve(static_cast<size_t>(scratch_bytes(matrices[0].blocks, space_.tiles)));
      float* const to[2] = {sums, sums + size};
      int64_t of = -1;
      Input own = in;
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last;) {
          const int64_t head = i / panels, panel = i % panels;
          const Matrix& m = matrices[static_cast<size_t>(head)];
          own.data = in.data + head * words;
          if (head != of) space_.kernels.prepare(m, own, space_.rows, scratch);
          of = head;
          const Matrix* two[2] = {&m, &m};
          const int64_t which[2] = {panel, panel + 1};
          const int count = i + 1 < pieces.last && panel + 1 < panels ? 2 : 1;
          space_.kernels.products(two, which, count, own, space_.tiles, space_.rows, to, scratch);
          for (int k = 0; k < count; ++k) body(head, which[k], to[k]);
          i += count;
        }
    });
  }

  const Team& team_;
  Workspace& space_;
  LayerRun& run_;
  const Heads heads_;
  const LatentSizes sizes_;
  float *const low_, *const wide_;
  const Input low_in_, plain_, latents_;
};

}  // namespace cpu
