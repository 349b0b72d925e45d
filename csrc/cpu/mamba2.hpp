// Mamba-2: a causal convolution of inputs, keys and queries (x, B and C in its paper), a state for each head that decays and
// adds its inputs, gates of what it gives, and, before them, behind them or not at all, a norm by groups of channels.
#pragma once

#include "cpu/exponents.hpp"
#include "cpu/mixers.hpp"

namespace cpu {

class Mamba2 : public Mixer {
 public:
  struct Parts {
    Matrix gates, xbc, dt, out;
    const float* taps;       // [taps][channels]
    const float* bias;       // [channels] or null, readable up to the width
    const float* a_log;      // [heads]
    const float* dt_bias;    // [heads]
    const float* skip;       // [heads]: by which inputs are added to what a state gives
    const float* norm;       // [values], or null where there is none
  };

  Mamba2(const Recurrence& of, const Parts& parts, float eps)
      : Mixer(parts.out), of_(of), parts_(parts), eps_(eps),
        weights_(padded(parts.taps, of.taps, of.channels, of.width())) {
    for (int64_t h = 0; h < of.heads; ++h) rates_.push_back(exp_of(static_cast<double>(parts.a_log[h])));
  }

  void run(const Team& team, Workspace& space, const Lineages& lanes, int64_t layer, const Input& in,
           MixerScratch& scratch, const Input& mixed) const override {
    const MixerRows rows(lanes, of_, layer, scratch);
    float* gates = scratch.gates.reserve(static_cast<size_t>(space.rows * of_.values()));
    float* convolved = scratch.convolved.reserve(static_cast<size_t>(lanes.count() * of_.width()));
    float* outs = scratch.outs.reserve(static_cast<size_t>(space.rows * of_.values()));
    multiply(team, space, in, rows, gates);
    convolve(team, space, lanes, rows, convolved);
    const int64_t key = of_.values();
    update_states(team, space, lanes, of_, rows, layer, convolved, {key + of_.keys(), key, 0, false}, outs);
    norm(team, space, rows, convolved, gates, outs, mixed);
  }

 private:
  static constexpr int64_t kChannels = 256;  // at a time

  void multiply(const Team& team, Workspace& space, const Input& in, const MixerRows& rows, float* gates) const {
    const std::vector<const Matrix*> parts{&parts_.gates, &parts_.xbc, &parts_.dt};
    float* const to[] = {gates, rows.own(), rows.own_scalars()};
    const int64_t strides[] = {of_.values(), of_.width(), of_.scalars()};
    products_of(team, space, parts, in, [&](size_t part, int64_t panel, const float* sums, const Pieces&) {
      const int64_t channel = panel * kOutputs, live = std::min<int64_t>(kOutputs, parts[part]->outputs - channel);
      for (int64_t row = 0; row < space.rows; row += kRows)
        space.kernels.write(sums + row * kOutputs, live, std::min<int64_t>(kRows, space.rows - row),
                            to[part] + row * strides[part] + channel, strides[part], false);
    });
  }

  void convolve(const Team& team, const Workspace& space, const Lineages& lanes, const MixerRows& rows,
                float* convolved) const {
    const int64_t chunks = (of_.width() + kChannels - 1) / kChannels, all = chunks + 1;
    team.each(lanes.count() * all + 1, 1, [&](Pieces& pieces) {
      std::vector<const float*> read(static_cast<size_t>(of_.taps));
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          const int64_t item = i / all, channel = i % all * kChannels;
          if (item == lanes.count()) {
            rows.move_tails();
          } else if (i % all < chunks) {
            convolve_chunk(space, rows, item, channel, convolved + item * of_.width(), read);
          } else if (rows.is_own(item)) {
            find_scalars(rows.scalars(item));
          }
        }
    });
  }

  void convolve_chunk(const Workspace& space, const MixerRows& rows, int64_t item, int64_t channel, float* to,
                      std::vector<const float*>& read) const {
    rows.read(item, channel, read.data());
    ConvolveTask task{};
    task.rows = read.data();
    task.weights = weights_.data() + channel;
    task.bias = parts_.bias ? parts_.bias + channel : nullptr;
    task.taps = of_.taps;
    task.stride = of_.width();
    task.channels = std::min(kChannels, of_.width() - channel);
    task.silu = true;
    task.out = to + channel;
    space.kernels.convolve(task);
  }

  // Of the steps' products: decays, and steps, by which inputs are multiplied.
  void find_scalars(float* scalars) const {
    for (int64_t h = 0; h < of_.heads; ++h) {
      const double step = softplus_of(static_cast<double>(scalars[h]) + static_cast<double>(parts_.dt_bias[h]));
      scalars[h] = static_cast<float>(exp_of(-rates_[static_cast<size_t>(h)] * step));
      scalars[of_.heads + h] = static_cast<float>(step);
    }
  }

  // Adds the inputs to what the heads give, multiplies it by the activated gates, and norms it before or behind that.
  void norm(const Team& team, Workspace& space, const MixerRows& rows, const float* convolved, const float* gates,
            float* outs, const Input& mixed) const {
    const int64_t groups = of_.norms ? of_.norms : of_.heads;
    const int64_t values = of_.values(), size = values / groups, heads = of_.heads / groups;
    team.each(space.tiles * groups, 1, [&](Pieces& pieces) {
      ThreadScratch& mine = space.threads[static_cast<size_t>(pieces.index())];
      float* tile = mine.floats.reserve(static_cast<size_t>(size * kRows));
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          const int64_t group = i % groups, row = i / groups * kRows, begin = group * size;
          const int64_t count = std::min<int64_t>(kRows, space.rows - row);
          for (int64_t r = row; r < row + count; ++r)
            for (int64_t h = group * heads; h < (group + 1) * heads; ++h) {
              const int64_t at = h * of_.value_size;
              space.kernels.skip(convolved + rows.item_of(r) * of_.width() + at, parts_.skip[h],
                                 of_.gated_last ? nullptr : gates + r * values + at, of_.value_size,
                                 outs + r * values + at);
            }
          rows_to_tile(outs + row * values + begin, values, count, size, tile);
          const bool last = !of_.gated_last;
          if (parts_.norm)
            space.kernels.norm(tile, parts_.norm + begin, size, eps_, last ? &mixed : nullptr, i / groups, begin,
                               last ? nullptr : tile);
          else if (last)
            space.kernels.copy(tile, size, mixed, i / groups, begin);
          if (!last) gate(space, gates + row * values + begin, count, tile, size, mixed, i / groups, begin);
        }
    });
  }

  // Multiplies a tile's channels by the activated gates of its rows.
  void gate(const Workspace& space, const float* gates, int64_t count, const float* tile, int64_t size,
            const Input& mixed, int64_t number, int64_t begin) const {
    float own[kOutputs * kRows];
    for (int64_t c = 0; c < size; c += kOutputs) {
      rows_to_tile(gates + c, of_.values(), count, kOutputs, own);
      space.kernels.gate(own, tile + c * kRows, mixed, number, begin + c, Activation::silu);
    }
  }

  const Recurrence of_;
  const Parts parts_;
  const float eps_;
  const std::vector<float> weights_;
  std::vector<double> rates_;
};

}  // namespace cpu
