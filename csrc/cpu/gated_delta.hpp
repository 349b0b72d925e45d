// The gated delta rule of Qwen3.5: a causal convolution of queries, keys and values, a state for each head that decays and
// moves towards the values, and a norm of what it gives that is gated.
#pragma once

#include "cpu/exponents.hpp"
#include "cpu/mixers.hpp"

namespace cpu {

class GatedDelta : public Mixer {
 public:
  struct Parts {
    Matrix qkv, z, b, a, out;
    const float* taps;      // [taps][channels]
    const float* a_log;     // [heads]
    const float* dt_bias;   // [heads]
    const float* norm;      // [value size]
  };

  GatedDelta(const Recurrence& of, const Parts& parts, float eps)
      : Mixer(parts.out), of_(of), parts_(parts), eps_(eps),
        weights_(padded(parts.taps, of.taps, of.channels, of.width())) {
    for (int64_t h = 0; h < of.heads; ++h) rates_.push_back(exp_of(static_cast<double>(parts.a_log[h])));
  }

  void run(const Team& team, Workspace& space, const Lineages& lanes, int64_t layer, const Input& in,
           MixerScratch& scratch, const Input& mixed) const override {
    const MixerRows rows(lanes, of_, layer, scratch);
    float* gates = scratch.tiles.reserve(static_cast<size_t>(space.tiles * values() * kRows));
    float* convolved = scratch.convolved.reserve(static_cast<size_t>(lanes.count() * of_.width()));
    float* outs = scratch.outs.reserve(static_cast<size_t>(space.rows * values()));
    multiply(team, space, in, rows, gates);
    convolve(team, space, lanes, rows, convolved);
    update_states(team, space, lanes, of_, rows, layer, convolved, {0, keys(), 2 * keys(), true}, outs);
    gate(team, space, outs, gates, mixed);
  }

 private:
  int64_t keys() const { return of_.keys(); }
  int64_t values() const { return of_.values(); }

  void multiply(const Team& team, Workspace& space, const Input& in, const MixerRows& rows, float* gates) const {
    float *to = rows.own(), *scalars = rows.own_scalars();
    const std::vector<const Matrix*> parts{&parts_.qkv, &parts_.z, &parts_.b, &parts_.a};
    products_of(team, space, parts, in, [&](size_t part, int64_t panel, const float* sums, const Pieces&) {
      const int64_t live = std::min<int64_t>(kOutputs, parts[part]->outputs - panel * kOutputs);
      for (int64_t t = 0; t < space.tiles; ++t, sums += kOutputs * kRows) {
        const int64_t row = t * kRows, count = std::min<int64_t>(kRows, space.rows - row), channel = panel * kOutputs;
        if (part == 0) {
          space.kernels.write(sums, live, count, to + row * of_.width() + channel, of_.width(), false);
        } else if (part == 1) {
          std::memcpy(gates + (t * values() + channel) * kRows, sums, kOutputs * kRows * sizeof(float));
        } else {
          float* from = scalars + row * of_.scalars() + (part == 2 ? of_.heads : 0) + channel;
          space.kernels.write(sums, live, count, from, of_.scalars(), false);
        }
      }
    });
  }

  // Convolves each item's queries, keys and values head by head; queries and keys become of length one. Makes decays and
  // rates of the scalars.
  void convolve(const Team& team, const Workspace& space, const Lineages& lanes, const MixerRows& rows,
                float* convolved) const {
    const int64_t heads = 2 * of_.key_heads + of_.heads, all = heads + 1;
    team.each(lanes.count() * all + 1, 1, [&](Pieces& pieces) {
      std::vector<const float*> read(static_cast<size_t>(of_.taps));
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          const int64_t item = i / all, head = i % all;
          if (item == lanes.count()) {
            rows.move_tails();
            continue;
          }
          const bool own = rows.is_own(item);
          if (head == heads) {
            if (own) find_scalars(rows.scalars(item));
          } else if (own || head >= of_.key_heads) {  // nobody asks for an earlier row's queries
            convolve_head(space, rows, item, head, convolved + item * of_.width(), read);
          }
        }
    });
  }

  void convolve_head(const Workspace& space, const MixerRows& rows, int64_t item, int64_t head, float* to,
                     std::vector<const float*>& read) const {
    const bool value = head >= 2 * of_.key_heads;
    const int64_t channel = value ? 2 * keys() + (head - 2 * of_.key_heads) * of_.value_size : head * of_.key_size;
    rows.read(item, channel, read.data());
    ConvolveTask task{};
    task.rows = read.data();
    task.weights = weights_.data() + channel;
    task.taps = of_.taps;
    task.stride = of_.width();
    task.channels = value ? of_.value_size : of_.key_size;
    task.silu = true;
    task.out = to + channel;
    space.kernels.convolve(task);
    const float root = 1.0f / std::sqrt(static_cast<float>(of_.key_size));
    if (!value) space.kernels.unit(task.out, of_.key_size, head < of_.key_heads ? root : 1.0f);
  }

  void find_scalars(float* scalars) const {
    for (int64_t h = 0; h < of_.heads; ++h) {
      const double step = softplus_of(static_cast<double>(scalars[h]) + static_cast<double>(parts_.dt_bias[h]));
      scalars[h] = static_cast<float>(exp_of(-rates_[static_cast<size_t>(h)] * step));
      float& rate = scalars[of_.heads + h];
      rate = static_cast<float>(sigmoid_of(static_cast<double>(rate)));
    }
  }

  // Norms what the heads give and multiplies it by the activated gates.
  void gate(const Team& team, Workspace& space, const float* outs, const float* gates, const Input& mixed) const {
    const int64_t size = of_.value_size;
    team.each(space.tiles * of_.heads, 1, [&](Pieces& pieces) {
      ThreadScratch& mine = space.threads[static_cast<size_t>(pieces.index())];
      float* normed = mine.floats.reserve(static_cast<size_t>(size * kRows));
      while (pieces.next())
        for (int64_t i = pieces.first; i < pieces.last; ++i) {
          const int64_t tile = i / of_.heads, channel = i % of_.heads * size, row = tile * kRows;
          const int64_t count = std::min<int64_t>(kRows, space.rows - row);
          rows_to_tile(outs + row * values() + channel, values(), count, size, normed);
          space.kernels.norm(normed, parts_.norm, size, eps_, nullptr, 0, 0, normed);
          const float* by = gates + (tile * values() + channel) * kRows;
          for (int64_t c = 0; c < size; c += kOutputs)
            space.kernels.gate(by + c * kRows, normed + c * kRows, mixed, tile, channel + c, Activation::silu);
        }
    });
  }

  const Recurrence of_;
  const Parts parts_;
  const float eps_;
  const std::vector<float> weights_;
  std::vector<double> rates_;
};

}  // namespace cpu
