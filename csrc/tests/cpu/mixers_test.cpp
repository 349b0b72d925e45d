// Decoders with recurrent mixers against doubles, and every row's bits against plain decoding: in trees, behind accepted
// paths, and in trees that are run level by level.
#include <algorithm>

#include "cpu/exponents.hpp"
#include "tests/cpu/toys.hpp"

namespace cpu_test {
namespace {

class MixersTest {
 public:
  MixersTest(const ToyDecoder& toy, int64_t prompt, int64_t nodes)
      : toy_(toy), shape_(toy.shape), prompt_(prompt), tree_(prompt, nodes), capacity_(prompt + nodes + 1),
        tokens_(random_tokens(prompt + nodes, shape_.vocabulary - 1)), exact_(toy.exact(tokens_, tree_.context())) {}

  void run(const cpu::Kernels& kernels) {
    kernels_ = &kernels;
    network_ = std::make_unique<Network>(toy_, kernels);
    const Kept empty{Slab(slab_bytes(shape_, kLayers, capacity_)), network_->memory()};
    prompted_ = std::make_unique<Kept>(copied(empty.slab), empty.memory);
    const Given prompt = in_order(*prompted_, 0, prompt_);
    compare(prompt, 0);
    pieces(empty, prompt);
    Kept kept = again();
    given_ = on_tree(kept, 0, tree_.nodes(), 3);
    compare(given_, prompt_);
    levels();
    for (const int threads : {2, 3}) {
      Kept other = again();
      holds(on_tree(other, 0, tree_.nodes(), threads) == given_, "bits of so many threads", threads);
    }
    plain_decoding(0, again());
    paths();
    marks();
  }

 private:
  struct Kept {
    Kept(Slab slab, const cpu::Memory& memory) : slab(std::move(slab)), memory(memory) {}
    Slab slab;
    cpu::Memory memory;
  };

  Kept again() const { return {copied(prompted_->slab), prompted_->memory}; }

  void holds(bool right, const char* what, int64_t size) const {
    expect(right, *kernels_, std::string(what) + " of mixers over " + name_of(shape_.kind), size);
  }

  void compare(const Given& given, int64_t first) const {
    const double limit = tolerance(*kernels_, shape_);
    for (size_t r = 0; r < given.logits.size(); ++r) {
      const size_t row = static_cast<size_t>(first) + r;
      for (size_t i = 0; i <= kLayers; ++i) {
        const float* states = given.states[r].data() + static_cast<int64_t>(i) * shape_.hidden;
        holds(distance(states, exact_.states[i][row]) <= limit, "hidden states", static_cast<int64_t>(i));
      }
      holds(distance(given.logits[r].data(), exact_.logits[row]) <= limit, "logits", static_cast<int64_t>(row));
    }
  }

  // Tokens that are committed as they come.
  Given in_order(Kept& kept, int64_t first, int64_t last) {
    Ask ask = Ask::in_order({tokens_.begin() + first, tokens_.begin() + last}, first);
    ask.memory = &kept.memory, ask.committed = first;
    return network_->run(ask, kept.slab, capacity_);
  }

  // Nodes `first` to `last` of the tree, of which those before were run.
  Given on_tree(Kept& kept, int64_t first, int64_t last, int threads = 1) {
    const std::vector<uint64_t> all = tree_.seen(prompt_);
    const int64_t words = tree_.words_from(prompt_);
    const std::vector<uint64_t> seen(all.begin() + first * words, all.begin() + last * words);
    std::vector<int64_t> positions = tree_.positions();
    positions = {positions.begin() + first, positions.begin() + last};
    Ask ask{{tokens_.begin() + prompt_ + first, tokens_.begin() + prompt_ + last}, positions, prompt_ + first, prompt_, &seen};
    ask.memory = &kept.memory, ask.committed = prompt_;
    return network_->run(ask, kept.slab, capacity_, threads);
  }

  // A token as the root of a tree of its own, behind `committed` slots.
  Given alone(Kept& kept, int64_t token, int64_t committed) {
    const std::vector<uint64_t> seen{1};
    Ask ask{{token}, {committed}, committed, committed, &seen};
    ask.memory = &kept.memory, ask.committed = committed;
    return network_->run(ask, kept.slab, capacity_);
  }

  void pieces(const Kept& empty, const Given& whole) {
    Kept other = again();
    const Given first_node = on_tree(other, 0, 1);
    for (const int64_t piece : {1, 3, 17}) {
      Kept kept{copied(empty.slab), empty.memory};
      for (int64_t first = 0; first < prompt_; first += piece) {
        const int64_t last = std::min(first + piece, prompt_);
        const Given part = in_order(kept, first, last);
        for (int64_t r = first; r < last; ++r) holds(part.same_row(r - first, whole, r), "a prompt in pieces", piece);
      }
      holds(on_tree(kept, 0, 1) == first_node, "states behind pieces", piece);
    }
  }

  // As a draft runs it: later rows go on from those of earlier forwards.
  void levels() {
    Kept kept = again();
    const int64_t nodes = tree_.nodes();
    for (int64_t first = 0, count = 1; first < nodes; first += count, count = 2 * count + 1) {
      const int64_t last = std::min(first + count, nodes);
      const Given part = on_tree(kept, first, last);
      for (int64_t node = first; node < last; ++node) holds(part.same_row(node - first, given_, node), "a level", node);
    }
  }

  // Each node below `node` alone, behind those above it, each of which was a tree of one node.
  void plain_decoding(int64_t node, Kept kept) {
    const auto at = static_cast<size_t>(node);
    const Given given = alone(kept, tokens_[static_cast<size_t>(prompt_) + at], prompt_ + tree_.depths[at]);
    holds(given_.same_row(node, given, 0), "a node's bits in plain decoding", node);
    for (int64_t child = node + 1; child < tree_.nodes(); ++child)
      if (tree_.parents[static_cast<size_t>(child)] == node) plain_decoding(child, {copied(kept.slab), kept.memory});
  }

  // Behind each path of the tree, the next token has the bits that it has behind the same tokens in their order.
  void paths() {
    for (int64_t node = 0; node < tree_.nodes(); node += 3) {
      std::vector<int64_t> path, tokens;
      for (int64_t above = node; above >= 0; above = tree_.parents[static_cast<size_t>(above)]) path.insert(path.begin(), above);
      Kept kept = again(), plain = again();
      on_tree(kept, 0, tree_.nodes());
      const auto length = static_cast<int64_t>(path.size());
      kept.memory.keep(prompt_, path.data(), length);
      for (int64_t i = 0; i < length; ++i) {
        tokens.push_back(tokens_[static_cast<size_t>(prompt_ + path[static_cast<size_t>(i)])]);
        alone(plain, tokens.back(), prompt_ + i);
      }
      move_slots(kept.slab, path);
      const Given after = alone(kept, 5, prompt_ + length), wanted = alone(plain, 5, prompt_ + length);
      holds(after == wanted, "a token behind a path", node);
      holds(kept.memory.folded() == prompt_ + length, "folded tokens", node);
      alone(kept, 7, prompt_ + length);  // another root, where the last one was rejected
      holds(alone(kept, 5, prompt_ + length) == wanted, "a token behind a rejected one", node);
    }
  }

  // A path's keys and values to where they are kept.
  void move_slots(const Slab& slab, const std::vector<int64_t>& path) const {
    const int64_t bytes = shape_.heads.size * (shape_.half ? 2 : 4), planes = kLayers * 2 * shape_.heads.keys;
    for (int64_t plane = 0; plane < planes; ++plane)
      for (size_t i = 0; i < path.size(); ++i) {
        uint8_t* from = slab.data() + (plane * capacity_ + prompt_) * bytes;
        std::memmove(from + static_cast<int64_t>(i) * bytes, from + path[i] * bytes, static_cast<size_t>(bytes));
      }
  }

  void marks() {
    Kept kept = again();
    kept.memory.mark();
    on_tree(kept, 0, tree_.nodes());
    const std::vector<int64_t> path{0};
    kept.memory.keep(prompt_, path.data(), 1);
    alone(kept, 5, prompt_ + 1);
    holds(kept.memory.reach(prompt_ + 1) == prompt_ + 1, "slots in reach", prompt_ + 1);
    holds(kept.memory.reach(prompt_) == prompt_ && kept.memory.reach(prompt_ - 1) == 0, "slots in reach", prompt_);
    kept.memory.crop(prompt_);
    holds(on_tree(kept, 0, tree_.nodes()) == given_, "bits behind a mark", prompt_);
    kept.memory.crop(prompt_ - 1);
    holds(kept.memory.folded() == 0 && kept.memory.marked() == 0, "an empty memory", prompt_);
    in_order(kept, 0, prompt_);
    holds(on_tree(kept, 0, tree_.nodes()) == given_, "bits after a crop", prompt_);
  }

  const ToyDecoder& toy_;
  const ToyShape shape_;
  const int64_t prompt_;
  const Tree tree_;
  const int64_t capacity_;
  const std::vector<int64_t> tokens_;
  const ToyDecoder::Exact exact_;
  const cpu::Kernels* kernels_ = nullptr;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Kept> prompted_;
  Given given_;
};

Blocks convolutions(int64_t hidden, int64_t taps, Mixes second) {
  Blocks blocks;
  blocks.mixers = {Mixes::convolution, second};
  blocks.recurrence.channels = hidden, blocks.recurrence.taps = taps;
  blocks.gated = blocks.by_head = taps % 2 == 1;
  return blocks;
}

Blocks deltas(int64_t taps, int64_t key_heads, int64_t heads, int64_t key_size, int64_t value_size, bool first) {
  Blocks blocks;
  blocks.mixers = {first ? Mixes::delta : Mixes::none, first ? Mixes::none : Mixes::delta};
  blocks.gated = true;
  blocks.turned = 4;
  cpu::Recurrence& of = blocks.recurrence;
  of.taps = taps, of.key_heads = key_heads, of.heads = heads, of.key_size = key_size, of.value_size = value_size;
  of.channels = 2 * key_heads * key_size + heads * value_size;
  return blocks;
}

// single: the layer without a mixer is a network alone, without gates, and the other one has none.
Blocks mambas(int64_t taps, int64_t groups, int64_t heads, int64_t size, int64_t head_size, int64_t norms, bool single) {
  Blocks blocks;
  blocks.mixers = {single ? Mixes::none : Mixes::mamba, single ? Mixes::mamba : Mixes::none};
  blocks.plain = blocks.single = single;
  cpu::Recurrence& of = blocks.recurrence;
  of.taps = taps, of.key_heads = groups, of.heads = heads, of.key_size = size, of.value_size = head_size, of.norms = norms;
  of.channels = 2 * of.keys() + of.values();
  return blocks;
}

// Attention stands beside the mixers. norms: 0 for none.
Blocks beside(int64_t taps, int64_t groups, int64_t heads, int64_t norms, bool gated_last) {
  Blocks blocks = mambas(taps, groups, heads, 16, 32, norms, false);
  blocks.mixers = {Mixes::mamba, Mixes::mamba};
  blocks.beside = true;
  blocks.recurrence.gated_last = gated_last;
  return blocks;
}

void test_exponents() {
  for (double x = -40.0; x < 40.0; x += 0.37) {
    const auto near = [&](double got, double exact) { return std::fabs(got - exact) <= 4e-15 * std::fabs(exact); };
    check(near(cpu::exp_of(x), std::exp(x)), "exponential", static_cast<int64_t>(x));
    check(near(cpu::log_of(std::exp(x)), std::log(std::exp(x))) || std::fabs(x) < 1.0, "logarithm", static_cast<int64_t>(x));
    check(std::fabs(cpu::log_of(std::exp(x)) - x) <= 4e-14, "logarithm", static_cast<int64_t>(x));
    check(near(cpu::sigmoid_of(x), 1.0 / (1.0 + std::exp(-x))), "sigmoid", static_cast<int64_t>(x));
    check(std::fabs(cpu::softplus_of(x) - std::log1p(std::exp(x))) <= 4e-15 * (1.0 + std::fabs(x)), "softplus", static_cast<int64_t>(x));
  }
  check(cpu::exp_of(-INFINITY) == 0.0 && cpu::exp_of(INFINITY) == INFINITY, "exponential of no number", 0);
  check(std::isnan(cpu::exp_of(NAN)) && std::isnan(cpu::softplus_of(NAN)), "exponential of NaN", 0);
}

}  // namespace

void test_mixers() {
  using K = Kind;
  test_exponents();
  const struct {
    ToyShape shape;
    int64_t prompt, nodes;
  } cases[] = {
      {{K::f32, K::f32, 48, 37, 53, {2, 2, 16}, false, false, false, false, convolutions(48, 3, Mixes::none)}, 21, 19},
      {{K::f32, K::f32, 34, 40, 53, {2, 1, 8}, false, true, false, true, convolutions(34, 7, Mixes::convolution)}, 2, 70},
      {{K::bf16, K::bf16, 64, 41, 53, {4, 2, 32}, true, true, true, false, convolutions(64, 2, Mixes::none)}, 33, 19},
      {{K::q4_0, K::q8_0, 64, 64, 53, {2, 1, 16}, true, false, false, true, convolutions(64, 4, Mixes::none)}, 9, 19},
      {{K::f32, K::f32, 48, 37, 53, {2, 2, 16}, false, false, true, false, deltas(4, 2, 4, 16, 32, true)}, 21, 19},
      {{K::f32, K::f32, 34, 40, 53, {3, 1, 10}, false, false, true, true, deltas(3, 1, 3, 32, 16, false)}, 2, 70},
      {{K::bf16, K::bf16, 64, 41, 53, {4, 2, 32}, true, true, true, false, deltas(4, 2, 2, 48, 16, true)}, 33, 19},
      {{K::i8, K::i8, 64, 64, 53, {4, 2, 16}, true, false, true, true, deltas(2, 1, 4, 16, 48, false)}, 18, 33},
      {{K::f32, K::f32, 48, 37, 53, {2, 2, 16}, false, false, false, false, mambas(4, 2, 4, 12, 32, 2, false)}, 21, 19},
      {{K::f32, K::f32, 34, 40, 53, {2, 1, 8}, false, true, false, true, mambas(3, 1, 3, 32, 16, 1, true)}, 2, 70},
      {{K::bf16, K::bf16, 64, 41, 53, {4, 2, 32}, true, true, true, false, mambas(4, 2, 8, 16, 48, 4, false)}, 33, 19},
      {{K::i8, K::i8, 64, 64, 53, {4, 2, 16}, true, false, false, true, mambas(2, 1, 2, 64, 16, 1, true)}, 18, 33},
      {{K::f32, K::f32, 48, 37, 53, {2, 2, 16}, false, true, false, false, beside(4, 2, 4, 0, false)}, 21, 19},
      {{K::bf16, K::bf16, 64, 41, 53, {4, 2, 32}, true, false, false, false, beside(3, 1, 2, 2, true)}, 33, 19},
      {{K::i8, K::i8, 64, 64, 53, {4, 2, 16}, true, true, false, true, beside(2, 2, 4, 2, false)}, 18, 33},
  };
  for (const auto& [shape, prompt, nodes] : cases) {
    const ToyDecoder toy(shape);
    MixersTest test(toy, prompt, nodes);
    for (const cpu::Kernels* kernels : cpu::available_kernels())
      if (multiplies(*kernels, shape.kind)) test.run(*kernels);
  }
}

}  // namespace cpu_test
