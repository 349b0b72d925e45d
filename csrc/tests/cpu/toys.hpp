// Tiny decoders of random weights, and what one forward of them gives.
#pragma once

#include <memory>

#include "tests/cpu/trees.hpp"

namespace cpu_test {

constexpr int64_t kLayers = 2;

using Slab = Guarded<uint8_t>;  // keys and values, NaN where nothing was written

inline Slab copied(const Slab& slab) { return {slab.data(), slab.size()}; }

inline int64_t slab_bytes(const ToyShape& shape, int64_t layers, int64_t capacity) {
  return layers * 2 * shape.heads.keys * capacity * shape.heads.size * (shape.half ? 2 : 4);
}

inline cpu::Rope rope_of(const naive::Positions& positions) { return {positions.frequencies, positions.factor}; }
inline cpu::Rope rope_of(const ToyShape& shape) { return rope_of(naive::Positions(shape.heads.size)); }

// Set the first layer's, then the second layer's.
inline naive::Positions first_positions(const ToyShape& shape) {
  return naive::Positions(shape.blocks.turned ? shape.blocks.turned : shape.heads.size);
}
inline naive::Positions second_positions(const ToyShape& shape) {
  return shape.blocks.turned ? naive::Positions(shape.heads.size, 30.0f) : naive::Positions(shape.heads.size);
}

// The largest accepted difference from doubles: values may be rounded to bfloat16 on the way.
inline double tolerance(const cpu::Kernels& kernels, const ToyShape& shape) {
  return kernels.pairs || shape.half ? 0.05 : 1e-4;
}

std::vector<int64_t> random_tokens(int64_t count, int64_t vocabulary);
std::vector<int64_t> counting(int64_t first, int64_t count);

template <typename T>
std::vector<std::vector<T>> in_rows(const Guarded<T>& all, int64_t rows) {
  std::vector<std::vector<T>> found;
  const int64_t width = rows ? all.size() / rows : 0;
  for (int64_t r = 0; r < rows; ++r) found.emplace_back(all.data() + r * width, all.data() + (r + 1) * width);
  return found;
}

// The tokens that a forward runs, and the slots that they see.
struct Ask {
  std::vector<int64_t> tokens, positions;
  int64_t start, prefix;
  const std::vector<uint64_t>* seen = nullptr;  // of the slots behind `prefix`; null: all slots up to the token's own
  int64_t first_logits = 0;
  int64_t count = 3;  // of the largest logits
  cpu::Memory* memory = nullptr;  // of layers without attention
  int64_t committed = 0;          // slots of tokens that stay

  // Tokens that stand and are seen in their order.
  static Ask in_order(const std::vector<int64_t>& tokens, int64_t start) {
    return {tokens, counting(start, static_cast<int64_t>(tokens.size())), start, start};
  }
};

// The results of a forward for each row.
struct Given {
  std::vector<std::vector<float>> states, logits;  // [row]; states are all layers' side by side
  std::vector<std::vector<int64_t>> chosen;
  std::vector<std::vector<float>> chosen_logits;

  bool chosen_is_best(size_t row) const;
  bool same_row(int64_t row, const Given& other, int64_t of) const;
  bool operator==(const Given& other) const;
};

class ToyDecoder {
 public:
  // Every weight is drawn anew; the head's rows repeat after `period` tokens, so that the best logit is never alone.
  explicit ToyDecoder(const ToyShape& shape, int threads = 1, int64_t period = 13);

  // Hidden states [layers + 1][row] as transformers numbers them, and logits [row].
  struct Exact {
    std::vector<std::vector<Row>> states;
    std::vector<Row> logits;
  };
  Exact exact(const std::vector<int64_t>& tokens, const naive::Context& context) const;

  // True if the last token's embedding is NaN.
  bool has_nan() const { return !shape.tied && (shape.kind == Kind::f32 || shape.kind == Kind::bf16); }

  ToyShape shape;
  Toy toy;
};

// cpu::Decoder of a toy, compiled in one place.
class Network {
 public:
  // passed: each layer reads a slab of its own, [2][key-value heads][capacity][size], which another network wrote.
  Network(const ToyDecoder& toy, const cpu::Kernels& kernels, bool passed = false);
  ~Network();

  cpu::Memory memory() const;  // of no token
  Given run(const Ask& ask, const Slab& slab, int64_t capacity, int threads = 1);
  std::vector<std::vector<float>> read(const std::vector<std::vector<float>>& states);
  std::vector<float> embedding(int64_t token);

 private:
  struct Decoder;
  const ToyShape shape_;
  const bool passed_;
  std::unique_ptr<Decoder> decoder_;
};

}  // namespace cpu_test
