// LFM2's mixer: three gates and inputs b, c and x of each channel; c times a causal convolution of b times x.
#pragma once

#include "cpu/mixers.hpp"

namespace cpu {

class ShortConvolution : public Mixer {
 public:
  // weights: [taps][channels]; bias: [channels] or null, readable up to the width.
  ShortConvolution(const Recurrence& of, const Matrix& b, const Matrix& c, const Matrix& x, const Matrix& out,
                   const float* weights, const float* bias)
      : Mixer(out), of_(of), b_(b), c_(c), x_(x), weights_(padded(weights, of.taps, of.channels, of.width())), bias_(bias) {}

  void run(const Team& team, Workspace& space, const Lineages& lanes, int64_t layer, const Input& in,
           MixerScratch& scratch, const Input& mixed) const override {
    const MixerRows rows(lanes, of_, layer, scratch);
    float* gates = scratch.tiles.reserve(static_cast<size_t>(space.tiles * of_.width() * kRows));
    multiply_inputs(team, space, in, rows.own());
    products_of(team, space, {&c_}, in, [&](size_t, int64_t panel, const float* sums, const Pieces&) {
      for (int64_t t = 0; t < space.tiles; ++t)
        std::memcpy(gates + (t * of_.width() + panel * kOutputs) * kRows, sums + t * kOutputs * kRows,
                    kOutputs * kRows * sizeof(float));
    });
    const int64_t chunks = (of_.width() + kChannels - 1) / kChannels;
    team.each(space.tiles * chunks + 1, 1, [&](Pieces& pieces) {
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i)
          if (i == space.tiles * chunks) {
            rows.move_tails();
            rows.keep();
          } else
            convolve(space, rows, i / chunks, i % chunks * kChannels, gates, mixed);
    });
  }

 private:
  static constexpr int64_t kChannels = 64;  // at a time

  // b times x, to `to`: [rows][width].
  void multiply_inputs(const Team& team, Workspace& space, const Input& in, float* to) const {
    team.each(b_.panels, 1, [&](Pieces& pieces) {
      const int64_t size = space.tiles * kOutputs * kRows;
      ThreadScratch& mine = space.threads[static_cast<size_t>(pieces.index())];
      float* sums = mine.sums.reserve(static_cast<size_t>(2 * size));
      uint8_t* bytes = mine.bytes.reserve(static_cast<size_t>(scratch_bytes(b_.blocks, space.tiles)));
      space.kernels.prepare(b_, in, space.rows, bytes);
      if (x_.kind != b_.kind) space.kernels.prepare(x_, in, space.rows, bytes);
      const Matrix* matrices[2] = {&b_, &x_};
      float* both[2] = {sums, sums + size};
      while (pieces.next())
        for (int64_t panel = pieces.first; panel < pieces.last; ++panel) {
          const int64_t panels[2] = {panel, panel}, live = std::min<int64_t>(kOutputs, b_.outputs - panel * kOutputs);
          space.kernels.products(matrices, panels, 2, in, space.tiles, space.rows, both, bytes);
          for (int64_t i = 0; i < size; ++i) sums[i] *= sums[size + i];
          for (int64_t t = 0; t < space.tiles; ++t)
            space.kernels.write(sums + t * kOutputs * kRows, live, std::min<int64_t>(kRows, space.rows - t * kRows),
                                to + t * kRows * of_.width() + panel * kOutputs, of_.width(), false);
        }
    });
  }

  void convolve(const Workspace& space, const MixerRows& rows, int64_t tile, int64_t channel, const float* gates,
                const Input& mixed) const {
    const int64_t count = std::min<int64_t>(kRows, space.rows - tile * kRows);
    float found[kRows * kChannels], turned[kChannels * kRows];
    std::vector<const float*> read(static_cast<size_t>(of_.taps));
    ConvolveTask task{};
    task.rows = read.data();
    task.weights = weights_.data() + channel;
    task.bias = bias_ ? bias_ + channel : nullptr;
    task.taps = of_.taps;
    task.stride = of_.width();
    task.channels = std::min(kChannels, of_.width() - channel);
    for (int64_t lane = 0; lane < count; ++lane) {
      rows.read(rows.item_of(tile * kRows + lane), channel, read.data());
      task.out = found + lane * kChannels;
      space.kernels.convolve(task);
    }
    rows_to_tile(found, kChannels, count, task.channels, turned);
    const float* by = gates + (tile * of_.width() + channel) * kRows;
    for (int64_t i = 0; i < task.channels * kRows; ++i) turned[i] *= by[i];
    space.kernels.copy(turned, std::min(task.channels, of_.channels - channel), mixed, tile, channel);
  }

  const Recurrence of_;
  const Matrix b_, c_, x_;
  const std::vector<float> weights_;
  const float* bias_;
};

}  // namespace cpu
