// Eagle of each table against doubles, and every row's bits against one row at a time.
#include "cpu/eagle.hpp"
#include "tests/cpu/toys.hpp"

namespace cpu_test {
namespace {

constexpr int64_t kPrompt = 13, kNodes = 18, kCapacity = kPrompt + kNodes, kFeatures = 3;

struct Flags {
  bool before_residual, logits, recurrent;
};

struct Rows {
  std::vector<std::vector<float>> states, logits;

  bool same_row(size_t row, const Rows& other, size_t of) const {
    return same_bits(states[row], other.states[of]) && same_bits(logits[row], other.logits[of]);
  }
};

class ToyEagle {
 public:
  ToyEagle(const ToyShape& shape, const Flags& flags) : shape_(shape), flags_(flags), tree_(kPrompt, kNodes) {
    toy_.layer("layers.0.", shape, 2 * shape.hidden);
    toy_.matrix("fc", shape.kind, shape.hidden, kFeatures * shape.hidden);
    if (shape.biases) toy_.bias("fc", shape.hidden);
    toy_.matrix("lm_head", shape.kind, shape.vocabulary, shape.hidden);
    for (const char* name : {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight"})
      toy_.vector(name, shape.hidden, 1.0, 0.2);
    hidden_ = normals(kCapacity * shape.hidden), embeddings_ = normals(kCapacity * shape.hidden);
    exact();
  }

  void run(const cpu::Kernels& kernels) {
    const cpu::EagleShape sizes{shape_.hidden, shape_.vocabulary, shape_.heads,
                                kEps, flags_.before_residual, flags_.logits, flags_.recurrent};
    cpu::Eagle eagle(kernels, sizes, toy_.weights, rope_of(shape_));
    const Slab slab(slab_bytes(shape_, 1, kCapacity));
    const Rows prompt = forward(eagle, slab, 0, kPrompt, kPrompt, nullptr, 2);
    compare(kernels, prompt, 0);
    const Slab plain = copied(slab), poisoned = copied(slab);
    const std::vector<uint64_t> seen = tree_.seen(kPrompt), all = tree_.seen(0);
    const Rows given = forward(eagle, slab, kPrompt, kNodes, kPrompt, &seen, 1);
    compare(kernels, given, kPrompt);
    const Rows again = forward(eagle, slab, kPrompt, kNodes, 0, &all, 3);
    for (size_t node = 0; node < kNodes; ++node)
      expect(given.same_row(node, again, node), kernels, "a draft node's bits, words from the first slot", 3);
    for (const int64_t node : tree_.depth_first()) {
      const auto depth = tree_.depths[static_cast<size_t>(node)];
      const Rows alone = forward(eagle, plain, kPrompt + node, 1, kPrompt + depth, nullptr, 1);
      expect(given.same_row(static_cast<size_t>(node), alone, 0), kernels, "a draft node's bits alone", node);
    }
    poison(kernels, eagle, poisoned, given);
    fuse(kernels, eagle);
  }

 private:
  // Rows `first` to `first + count` of the hidden states; without words they go to `at` and see all up to their own.
  Rows forward(cpu::Eagle& eagle, const Slab& slab, int64_t first, int64_t count, int64_t at,
               const std::vector<uint64_t>* seen, int threads) const {
    const std::vector<int64_t> of_tree = tree_.positions();
    const int64_t start = seen || first < kPrompt ? first : at;
    const std::vector<int64_t> positions = seen ? of_tree : counting(start, count);
    const Guarded<float> states(count * shape_.hidden), logits(count * shape_.vocabulary);
    const Guarded<float> hidden(hidden_.data() + first * shape_.hidden, count * shape_.hidden);
    const Guarded<float> embeddings(embeddings_.data() + first * shape_.hidden, count * shape_.hidden);
    cpu::Eagle::Call call{};
    cpu::Rows own;
    own.count = count, own.positions = positions.data();
    own.start = start, own.prefix = seen ? at : start;
    if (seen) own.seen = seen->data(), own.words = static_cast<int64_t>(seen->size()) / count;
    call.lanes = {own};
    call.hidden = hidden.data(), call.embeddings = embeddings.data();
    call.slabs = {{slab.data(), kCapacity}}, call.half = shape_.half;
    call.states = states.data(), call.logits = logits.data(), call.first_logits = 0;
    eagle.forward(call, threads);
    return {in_rows(states, count), in_rows(logits, count)};
  }

  void exact() {
    std::vector<Row> inputs, x;
    for (int64_t r = 0; r < kCapacity; ++r) {
      const auto row = [&](const std::vector<float>& from) {
        return Row(from.begin() + r * shape_.hidden, from.begin() + (r + 1) * shape_.hidden);
      };
      const Row normed = naive::norm(row(hidden_), toy_.vectors.at("layers.0.hidden_norm.weight"));
      inputs.push_back(naive::norm(row(embeddings_), toy_.vectors.at("layers.0.input_layernorm.weight")));
      inputs.back().insert(inputs.back().end(), normed.begin(), normed.end());
      x.push_back(flags_.before_residual ? normed : row(hidden_));
    }
    const naive::Positions positions(shape_.heads.size);
    naive::Layer(toy_, "layers.0.", shape_.heads, &positions).run(inputs, tree_.context(), x);
    for (const Row& row : x) {
      const Row normed = naive::norm(row, toy_.vectors.at("norm.weight"));
      states_.push_back(flags_.recurrent ? normed : row);
      logits_.push_back(toy_.dense.at("lm_head")(flags_.recurrent || flags_.logits ? normed : row));
    }
  }

  void compare(const cpu::Kernels& kernels, const Rows& given, int64_t first) const {
    for (size_t r = 0; r < given.states.size(); ++r) {
      const int64_t row = first + static_cast<int64_t>(r);
      const Row &states = states_[static_cast<size_t>(row)], &logits = logits_[static_cast<size_t>(row)];
      const double limit = tolerance(kernels, shape_);
      expect(distance(given.states[r].data(), states) <= limit, kernels, "recurrent states", row);
      expect(distance(given.logits[r].data(), logits) <= limit, kernels, "draft logits", row);
    }
  }

  // NaN in one node's hidden state shows in those below it, and in no other.
  void poison(const cpu::Kernels& kernels, cpu::Eagle& eagle, const Slab& slab, const Rows& given) {
    const std::vector<float> before = hidden_;
    hidden_[static_cast<size_t>((kPrompt + 1) * shape_.hidden)] = NAN;
    const std::vector<uint64_t> seen = tree_.seen(kPrompt);
    const Rows beside = forward(eagle, slab, kPrompt, kNodes, kPrompt, &seen, 2);
    hidden_ = before;
    for (int64_t node = 0; node < kNodes; ++node) {
      const auto row = static_cast<size_t>(node);
      if (tree_.is_above(1, node))
        expect(all_nan(beside.logits[row]), kernels, "draft logits of NaN", node);
      else
        expect(given.same_row(row, beside, row), kernels, "a draft node's bits beside NaN", node);
    }
  }

  void fuse(const cpu::Kernels& kernels, cpu::Eagle& eagle) const {
    const int64_t width = kFeatures * shape_.hidden, rows = 19;
    const std::vector<float> drawn = normals(rows * width);
    const Guarded<float> features(drawn.data(), rows * width), out(rows * shape_.hidden), alone(shape_.hidden);
    eagle.fuse(features.data(), rows, out.data(), 3);
    const auto fused = in_rows(out, rows);
    for (int64_t r = 0; r < rows; ++r) {
      const Row exact = toy_.dense.at("fc")(Row(drawn.begin() + r * width, drawn.begin() + (r + 1) * width));
      const auto& got = fused[static_cast<size_t>(r)];
      expect(distance(got.data(), exact) <= tolerance(kernels, shape_), kernels, "fused features", r);
      eagle.fuse(features.data() + r * width, 1, alone.data(), 1);
      expect(same_bits(alone.values(), got), kernels, "fused features alone", r);
    }
  }

  const ToyShape shape_;
  const Flags flags_;
  const Tree tree_;
  Toy toy_;
  std::vector<float> hidden_, embeddings_;  // [rows][hidden]
  std::vector<Row> states_, logits_;
};

}  // namespace

void test_eagle() {
  using K = Kind;
  const std::pair<ToyShape, Flags> cases[] = {
      {{K::f32, K::f32, 48, 37, 53, {2, 2, 16}, false, false, false, false}, {false, true, false}},
      {{K::f32, K::f32, 34, 80, 35, {6, 2, 6}, false, true, true, false}, {true, true, false}},
      {{K::bf16, K::bf16, 64, 96, 53, {8, 1, 16}, true, true, true, false}, {false, false, true}},
      {{K::bf16, K::bf16, 50, 41, 40, {5, 1, 10}, true, false, false, false}, {true, false, false}},
      {{K::bf16, K::bf16, 64, 32, 40, {4, 2, 32}, true, false, false, false}, {false, true, false}},
      {{K::i8, K::i8, 32, 64, 53, {4, 4, 8}, false, false, false, false}, {false, true, true}},
      {{K::q8_0, K::q4_0, 64, 96, 53, {4, 2, 16}, false, false, true, false}, {true, true, true}},
  };
  for (const auto& [shape, flags] : cases) {
    ToyEagle eagle(shape, flags);
    for (const cpu::Kernels* kernels : cpu::available_kernels())
      if (multiplies(*kernels, shape.kind)) eagle.run(*kernels);
  }
}

}  // namespace cpu_test
