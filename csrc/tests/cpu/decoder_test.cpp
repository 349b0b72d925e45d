// Decoder of each table against doubles, and every row's bits against plain decoding, one row at a time.
#include <limits>

#include "tests/cpu/toys.hpp"

namespace cpu_test {
namespace {

class DecoderTest {
 public:
  DecoderTest(const ToyDecoder& toy, int64_t prompt, int64_t nodes)
      : toy_(toy), shape_(toy.shape), prompt_(prompt), tree_(prompt, nodes), capacity_(prompt + nodes),
        tokens_(random_tokens(capacity_, shape_.vocabulary - 1)), exact_(toy.exact(tokens_, tree_.context())) {}

  void run(const cpu::Kernels& kernels) {
    kernels_ = &kernels;
    network_ = std::make_unique<Network>(toy_, kernels);
    empty_ = Slab(slab_bytes(shape_, kLayers, capacity_));
    prompted_ = copied(empty_);
    prompt();
    given_ = on_tree(tree_tokens(), prompt_);
    compare(given_, prompt_);
    plain_decoding();
    other_prefix();
    change();
    if (toy_.has_nan()) poison();
    readings();
  }

 private:
  std::vector<int64_t> tree_tokens() const { return {tokens_.begin() + prompt_, tokens_.end()}; }

  void holds(bool right, const char* what, int64_t size) const {
    expect(right, *kernels_, std::string(what) + " of " + name_of(shape_.kind), size);
  }

  // Tokens `first` to `last` in their order, into slots from `start`.
  Given causal(const Slab& slab, int64_t first, int64_t last, int64_t start) {
    return network_->run(Ask::in_order({tokens_.begin() + first, tokens_.begin() + last}, start), slab, capacity_);
  }

  Given on_tree(const std::vector<int64_t>& tokens, int64_t prefix, const std::vector<uint64_t>* other = nullptr,
                int64_t first_logits = 0) {
    const Slab slab = copied(prompted_);
    const std::vector<uint64_t> seen = other ? *other : tree_.seen(prefix);
    return network_->run({tokens, tree_.positions(), prompt_, prefix, &seen, first_logits}, slab, capacity_);
  }

  void compare(const Given& given, int64_t first) const {
    const double limit = tolerance(*kernels_, shape_);
    for (size_t r = 0; r < given.chosen.size(); ++r) {
      const size_t row = static_cast<size_t>(first) + r;
      for (size_t i = 0; i <= kLayers; ++i) {
        const float* states = given.states[r].data() + static_cast<int64_t>(i) * shape_.hidden;
        holds(distance(states, exact_.states[i][row]) <= limit, "hidden states", static_cast<int64_t>(i));
      }
      holds(distance(given.logits[r].data(), exact_.logits[row]) <= limit, "logits", static_cast<int64_t>(row));
      holds(given.chosen_is_best(r), "chosen tokens", static_cast<int64_t>(row));
    }
  }

  // At once, in pieces and one by one.
  void prompt() {
    const Given given = causal(prompted_, 0, prompt_, 0);
    compare(given, 0);
    for (const int64_t piece : {1, 17}) {
      const Slab slab = copied(empty_);
      for (int64_t first = 0; first < prompt_; first += piece) {
        const int64_t last = std::min(first + piece, prompt_);
        const Given part = causal(slab, first, last, first);
        for (int64_t r = first; r < last; ++r) holds(part.same_row(r - first, given, r), "a prompt in pieces", piece);
      }
      holds(slab.values() == prompted_.values(), "cache of pieces", piece);
    }
  }

  void plain_decoding() {
    const Slab slab = copied(prompted_);
    for (const int64_t node : tree_.depth_first()) {
      const int64_t row = prompt_ + node;
      const Given alone = causal(slab, row, row + 1, prompt_ + tree_.depths[static_cast<size_t>(node)]);
      holds(given_.same_row(node, alone, 0), "a node's bits in plain decoding", node);
    }
  }

  // The words may tell of the prompt's slots too, all or some of them.
  void other_prefix() {
    for (const int64_t prefix : {int64_t{0}, prompt_ / 2, prompt_ - 1})
      holds(on_tree(tree_tokens(), prefix) == given_, "bits where words begin before", prefix);
  }

  // Another token, or an ancestor hidden, shows in the nodes below and in no other.
  void change() {
    const int64_t changed = 2, last = tree_.nodes() - 1;
    std::vector<int64_t> tokens = tree_tokens();
    tokens[changed] = (tokens[changed] + 1) % (shape_.vocabulary - 1);
    only_below(on_tree(tokens, prompt_), changed, "another token");

    std::vector<uint64_t> seen = tree_.seen(prompt_);
    const int64_t words = tree_.words_from(prompt_);
    seen[static_cast<size_t>(last * words)] &= ~uint64_t{1};
    const Given hidden = on_tree(tree_tokens(), prompt_, &seen);
    for (int64_t node = 0; node <= last; ++node)
      holds(hidden.same_row(node, given_, node) != (node == last), "the root hidden from the last node", node);
  }

  void poison() {
    std::vector<int64_t> tokens = tree_tokens();
    tokens[1] = shape_.vocabulary - 1;
    const Given given = on_tree(tokens, prompt_);
    only_below(given, 1, "NaN");
    for (int64_t node = 0; node < tree_.nodes(); ++node) {
      const auto& row = given.logits[static_cast<size_t>(node)];
      if (tree_.is_above(1, node))
        holds(given.chosen_is_best(static_cast<size_t>(node)) && all_nan(row), "no choice of NaN", node);
    }
  }

  void only_below(const Given& given, int64_t changed, const char* what) const {
    for (int64_t node = 0; node < tree_.nodes(); ++node)
      holds(given.same_row(node, given_, node) != tree_.is_above(changed, node), what, node);
  }

  // The other ways to the same numbers: some rows' logits only, those of states, an embedding.
  void readings() {
    const int64_t rows = tree_.nodes(), first = rows / 2, width = shape_.hidden;
    const Given some = on_tree(tree_tokens(), prompt_, nullptr, first);
    std::vector<std::vector<float>> states;
    for (const auto& all : given_.states) states.emplace_back(all.end() - width, all.end());
    const auto logits = network_->read(states);
    holds(some.chosen == given_.chosen, "chosen where logits are of the last rows", rows);
    for (int64_t r = 0; r < rows; ++r) {
      const auto& wanted = given_.logits[static_cast<size_t>(r)];
      holds(same_bits(logits[static_cast<size_t>(r)], wanted), "logits of states", r);
      if (r < first) continue;
      holds(same_bits(some.logits[static_cast<size_t>(r - first)], wanted), "logits of the last rows", r);
    }
    std::vector<float> embedding = network_->embedding(tokens_[static_cast<size_t>(prompt_)]);
    for (float& value : embedding) value *= shape_.blocks.embedding;
    if (!shape_.blocks.normed)
      holds(distance(embedding.data(), exact_.states[0][static_cast<size_t>(prompt_)]) < 1e-6, "embedding", width);
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
  Slab empty_, prompted_;
  Given given_;
};

// Logits that are no numbers are not chosen, and where there are no others, none is.
void test_chosen(const cpu::Kernels& kernels) {
  const Kind kind = kernels.pairs ? Kind::bf16 : Kind::f32;
  ToyDecoder toy({kind, kind, 32, 32, 53, {2, 1, 16}, false, false, false, false}, 1, 26);
  std::vector<float> bias(53, 0.0f);
  const std::vector<int64_t> tokens = random_tokens(19, 52);
  const auto run = [&](const char* what, int64_t bound) {
    toy.toy.weights.add_vector("lm_head.bias", bias.data(), 53);
    Network network(toy, kernels);
    for (const int threads : {1, 3}) {
      const Slab slab(slab_bytes(toy.shape, kLayers, 19));
      for (const int64_t count : {1, 3, 60}) {
        Ask ask = Ask::in_order(tokens, 0);
        ask.count = count;
        const Given given = network.run(ask, slab, 19, threads);
        for (size_t r = 0; r < 19; ++r)
          expect(given.chosen_is_best(r) && given.chosen[r][0] < bound, kernels, what, threads);
      }
    }
  };
  run("chosen is the lowest of equals", 26);
  bias[3] = INFINITY, bias[17] = NAN, bias[30] = INFINITY, bias[20] = -INFINITY;
  for (const int64_t lower : {4, 8, 40}) bias[static_cast<size_t>(lower)] = std::numeric_limits<float>::lowest() / 2;
  run("chosen is finite", 53);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = i % 3 ? (i % 2 ? INFINITY : -INFINITY) : NAN;
  run("nothing is chosen", 0);
}

// Layers that read another network's keys and values give the bits of layers that wrote them, where the rows see those
// alone. They stand at one position, see up to `prompt` slots, and write nowhere.
void test_passed(const cpu::Kernels& kernels, int64_t prompt, bool half) {
  const Kind kind = kernels.pairs ? Kind::bf16 : Kind::f32;
  Blocks blocks;
  blocks.windows = {33, 0};
  const ToyDecoder toy({kind, kind, 48, 37, 53, {4, 2, 16}, half, false, true, false, blocks});
  constexpr int64_t kNodes = 19;
  const int64_t capacity = prompt + kNodes, heads = kLayers * 2 * toy.shape.heads.keys;
  const Slab slab(slab_bytes(toy.shape, kLayers, capacity)), passed(slab_bytes(toy.shape, kLayers, prompt));
  Network own(toy, kernels), reads(toy, kernels, true);
  if (prompt) own.run(Ask::in_order(random_tokens(prompt, 52), 0), slab, capacity);
  for (int64_t head = 0; head < heads; ++head)
    std::copy_n(slab.data() + head * (slab.size() / heads), passed.size() / heads,
                passed.data() + head * (passed.size() / heads));
  const std::vector<uint64_t> none(kNodes);
  Ask ask{random_tokens(kNodes, 52), std::vector<int64_t>(kNodes, prompt), prompt, prompt, &none};
  const Given wanted = own.run(ask, slab, capacity);
  const Slab before = copied(passed);
  ask.seen = nullptr;
  for (const int threads : {1, 3}) {
    const Given given = reads.run(ask, passed, prompt, threads);
    expect(given == wanted, kernels, "another network's keys and values", prompt);
    for (const auto& states : given.states) expect(!all_nan(states), kernels, "states of passed slabs", prompt);
  }
  expect(passed.values() == before.values(), kernels, "a passed slab", prompt);
}

// Slabs that are passed are those of all layers, or of none, and of the heads of all that read them.
void test_refused_slabs() {
  const cpu::Kernels& kernels = *cpu::available_kernels()[0];
  const Kind kind = kernels.pairs ? Kind::bf16 : Kind::f32;
  const ToyDecoder toy({kind, kind, 48, 37, 53, {4, 2, 16}, false, false, false, false});
  const auto refuses = [&](int64_t first, int64_t second, int64_t size) {
    const cpu::Shape sizes{kLayers, 48, 53, toy.shape.heads, {48, kEps}};
    std::vector<cpu::Place> places{{0, 0, 2, 16, first}, {0, 0, 2, size, second}};
    try {
      cpu::Decoder(kernels, sizes, toy.toy.weights, {rope_of(toy.shape)}, places);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  constexpr int64_t kOwn = cpu::Place::kOwn, kPassed = cpu::Place::kPassed;
  expect(!refuses(kPassed, kPassed, 16) && !refuses(kPassed - 1, kPassed, 16), kernels, "passed slabs", 2);
  expect(refuses(kPassed, kOwn, 16) && refuses(kOwn, kPassed, 16), kernels, "passed slabs beside others", 2);
  expect(refuses(kPassed - 1, kPassed - 1, 16) && refuses(kPassed, 0, 16), kernels, "slabs that none reads", 2);
}

Blocks windows(int64_t first, int64_t second) {
  Blocks blocks;
  blocks.windows = {first, second};
  return blocks;
}

// Norms before and after, GELU, two tables of positions, windows in one of them.
Blocks gemma() {
  Blocks blocks = windows(18, 0);
  blocks.gelu = blocks.output_norms = true;
  blocks.turned = 4;
  blocks.embedding = 2.5f, blocks.scale = 0.3f;
  return blocks;
}

// Norms after alone, those of queries and keys over all heads.
Blocks olmo() {
  Blocks blocks = windows(0, 12);
  blocks.output_norms = blocks.whole_norms = true;
  blocks.input_norms = false;
  return blocks;
}

// Factors everywhere, and a layer without positions.
Blocks granite() {
  Blocks blocks;
  blocks.second_turned = false;
  blocks.scale = 0.125f, blocks.embedding = 3.0f, blocks.residual = 0.22f, blocks.divisor = -4.0f;
  return blocks;
}

// Normed embeddings, gates, another epsilon of what is added, and a layer without positions.
Blocks muse() {
  Blocks blocks = windows(9, 0);
  blocks.output_norms = blocks.gated = blocks.normed = true;
  blocks.second_turned = false;
  blocks.added_eps = 0.25f, blocks.scale = 0.9f, blocks.divisor = 5.0f;
  return blocks;
}

// Networks of experts. Where rows are rounded all experts are chosen: which of two comes first may be a matter of rounding.
Blocks experts(int64_t count, const cpu::Routing& routing) {
  Blocks blocks;
  blocks.experts = count;
  blocks.routing = routing;
  return blocks;
}

// Sigmoids, groups, numbers added to them, and an expert for all rows.
Blocks deepseek() {
  Blocks blocks = experts(8, {3, true, true, 0.0f, 1.7f, 4, 2});
  blocks.choice = blocks.shared = blocks.output_norms = true;
  blocks.residual = 0.7f;
  return blocks;
}

// Sinks, and experts with biases.
Blocks gpt_oss(int64_t chosen) {
  Blocks blocks = experts(3, {chosen, false, true, 0.0f, 1.0f, 1, 1});
  blocks.windows = {0, 12};
  blocks.clamped = true;
  return blocks;
}

}  // namespace

void test_decoder() {
  using K = Kind;
  // 70 nodes are more than a word's bits; slots are summed in chunks of 32
  const struct {
    ToyShape shape;
    int64_t prompt, nodes;
  } cases[] = {
      {{K::f32, K::f32, 48, 37, 53, {2, 2, 16}, false, false, false, false}, 21, 19},
      {{K::f32, K::f32, 34, 80, 53, {4, 2, 6}, false, true, true, false}, 33, 70},
      {{K::f32, K::f32, 64, 96, 40, {3, 1, 10}, false, false, true, true}, 1, 19},
      {{K::bf16, K::bf16, 64, 96, 53, {8, 2, 16}, true, true, false, false}, 21, 19},
      {{K::bf16, K::bf16, 50, 41, 53, {5, 1, 18}, true, false, true, false}, 21, 70},
      {{K::bf16, K::bf16, 32, 32, 17, {2, 1, 2}, true, true, true, true}, 6, 19},
      {{K::bf16, K::bf16, 34, 40, 53, {3, 1, 32}, true, false, false, false}, 75, 40},
      {{K::bf16, K::bf16, 40, 32, 53, {2, 1, 96}, true, false, true, true}, 32, 33},
      {{K::i8, K::i8, 48, 64, 53, {6, 1, 8}, true, true, false, true}, 21, 19},
      {{K::q8_0, K::q8_0, 64, 96, 53, {7, 1, 32}, false, false, true, false}, 21, 19},
      {{K::q4_0, K::q4_1, 64, 64, 53, {16, 2, 4}, false, true, true, false}, 21, 19},
      {{K::q4_1, K::q4_0, 96, 32, 53, {4, 4, 16}, true, false, true, true}, 21, 19},
      {{K::q4_k, K::q6_k, 256, 256, 37, {4, 1, 64}, true, true, false, true}, 18, 7},
      {{K::q6_k, K::q8_0, 256, 256, 37, {8, 4, 32}, false, false, false, false}, 18, 7},
      {{K::f32, K::f32, 48, 37, 53, {2, 2, 16}, false, false, false, false, windows(7, 0)}, 40, 19},
      {{K::f32, K::f32, 34, 80, 53, {4, 2, 6}, false, true, true, false, windows(1, 70)}, 100, 70},
      {{K::bf16, K::bf16, 34, 40, 53, {3, 1, 32}, true, false, false, false, windows(40, 0)}, 107, 40},
      {{K::bf16, K::bf16, 32, 32, 53, {6, 2, 64}, true, false, false, false, windows(33, 64)}, 130, 70},
      {{K::bf16, K::bf16, 40, 32, 53, {2, 1, 32}, true, false, true, true, windows(3, 0)}, 64, 33},
      {{K::f32, K::f32, 48, 37, 53, {4, 2, 16}, false, false, true, false, gemma()}, 21, 19},
      {{K::bf16, K::bf16, 64, 41, 53, {4, 2, 32}, true, true, true, true, gemma()}, 70, 40},
      {{K::f32, K::f32, 48, 37, 53, {4, 2, 16}, false, false, true, false, olmo()}, 21, 19},
      {{K::bf16, K::bf16, 48, 37, 53, {4, 2, 16}, true, true, true, false, olmo()}, 21, 19},
      {{K::f32, K::f32, 34, 40, 53, {2, 1, 12}, false, true, false, true, granite()}, 21, 19},
      {{K::q8_0, K::q8_0, 64, 96, 53, {4, 2, 32}, true, false, false, false, granite()}, 33, 33},
      {{K::f32, K::f32, 48, 37, 53, {4, 2, 16}, false, true, false, false, muse()}, 40, 19},
      {{K::bf16, K::bf16, 64, 41, 53, {4, 2, 32}, true, true, true, false, muse()}, 70, 40},
      {{K::f32, K::f32, 48, 37, 53, {2, 2, 16}, false, false, false, false, experts(5, {2, false, true})}, 21, 19},
      {{K::f32, K::f32, 34, 80, 53, {4, 2, 6}, false, true, true, false, experts(17, {8})}, 33, 70},
      {{K::f32, K::f32, 40, 24, 53, {2, 1, 12}, false, true, false, true, deepseek()}, 21, 40},
      {{K::f32, K::f32, 40, 24, 53, {4, 2, 12}, false, true, false, true, gpt_oss(2)}, 21, 40},
      {{K::bf16, K::bf16, 64, 41, 53, {4, 2, 32}, true, true, true, true, gpt_oss(3)}, 70, 40},
      {{K::i8, K::i8, 48, 64, 53, {6, 1, 8}, true, true, false, true, experts(3, {3})}, 21, 19},
      {{K::q4_0, K::q4_1, 64, 64, 53, {16, 2, 4}, false, true, true, false, experts(3, {3, true, false})}, 21, 19},
  };
  for (const auto& [shape, prompt, nodes] : cases) {
    const ToyDecoder toy(shape);
    DecoderTest test(toy, prompt, nodes);
    for (const cpu::Kernels* kernels : cpu::available_kernels())
      if (multiplies(*kernels, shape.kind)) test.run(*kernels);
  }
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    test_chosen(*kernels);
    for (const int64_t prompt : {0, 1, 32, 75})
      for (const bool half : {false, true}) test_passed(*kernels, prompt, half);
  }
  test_refused_slabs();
}

}  // namespace cpu_test
