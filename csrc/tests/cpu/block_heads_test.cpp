// Heads that predict a block in one pass (DFlash) on cpu::Decoder, against doubles: what layers see, convolutions around
// their parts, and several texts at once.
#include "tests/cpu/toys.hpp"

namespace cpu_test {
namespace {

constexpr int64_t kFeatures = 3;

struct Variant {
  ToyShape shape;
  std::vector<bool> ahead;    // of the layers
  int64_t taps = 0, size = 1;  // of convolutions, and channels of a group
};

// A text: features of its committed tokens, and the embeddings of a block.
struct Text {
  int64_t prompt, block;
  std::vector<float> features, embeddings;

  Text(int64_t prompt, int64_t block, int64_t hidden)
      : prompt(prompt), block(block), features(normals(prompt * kFeatures * hidden)), embeddings(normals(block * hidden)) {}
  int64_t capacity() const { return prompt + block; }
};

std::vector<Row> rows_of(const std::vector<float>& all, int64_t width) {
  std::vector<Row> rows;
  for (auto from = all.begin(); from != all.end(); from += width) rows.emplace_back(from, from + width);
  return rows;
}

class BlockHead {
 public:
  explicit BlockHead(const Variant& variant) : variant_(variant), shape_(variant.shape) {
    const int64_t hidden = shape_.hidden;
    toy_.matrix("model.embed_tokens", shape_.kind, shape_.vocabulary, hidden);
    toy_.matrix("model.fc", shape_.kind, hidden, kFeatures * hidden);
    for (const char* name : {"model.norm.weight", "model.hidden_norm.weight"}) toy_.vector(name, hidden, 1.0, 0.2);
    for (int64_t i = 0; i < kLayers; ++i) {
      toy_.layer(prefix(i), shape_, hidden);
      toy_.vector(prefix(i) + "input_layernorm.weight", hidden, 1.0, 0.2);
      for (const char* name : {"attention_conv.", "mlp_conv."}) {
        if (!variant.taps) continue;
        toy_.matrix(prefix(i) + name + "kernel_projection", shape_.kind, 2 * variant.taps * hidden / variant.size, hidden);
        toy_.vector(prefix(i) + name + "base_kernel", 2 * variant.taps * hidden, 0.3, 0.4);
      }
    }
  }

  void run(const cpu::Kernels& kernels) {
    kernels_ = &kernels;
    const cpu::Shape sizes{kLayers, shape_.hidden, shape_.vocabulary, shape_.heads, {shape_.hidden, kEps}};
    std::vector<cpu::Place> places;
    for (size_t i = 0; i < kLayers; ++i) {
      places.push_back({0, shape_.window(i)});
      places.back().ahead = variant_.ahead[i];
    }
    cpu::Decoder decoder(kernels, sizes, toy_.weights, {rope_of(shape_)}, places);
    // the last one's rows begin within a tile that has rows of both others
    std::vector<Text> texts;
    for (const auto& [prompt, block] : {std::pair<int64_t, int64_t>{21, 6}, {0, 5}, {70, 33}})
      texts.emplace_back(prompt, block, shape_.hidden);
    std::vector<const Text*> all;
    std::vector<Slab> slabs;
    std::vector<std::vector<float>> alone;
    for (const Text& text : texts) {
      all.push_back(&text);
      slabs.push_back(remembered(decoder, text, text.prompt + 1));
      const Slab pieces = remembered(decoder, text, 17);
      expect(pieces.values() == slabs.back().values(), kernels, "keys and values of features in pieces", text.prompt);
      alone.push_back(forward(decoder, {&text}, {&slabs.back()}, 1)[0]);
      compare(text, alone.back());
    }
    for (const int threads : {1, 2, 3}) {
      std::vector<Slab> copies;
      std::vector<const Slab*> own;
      for (const Slab& slab : slabs) copies.push_back(copied(slab));
      for (const Slab& slab : copies) own.push_back(&slab);
      expect(forward(decoder, all, own, threads) == alone, kernels, "bits of blocks beside others", threads);
    }
    change(decoder, texts[2], slabs[2], alone[2]);
    for (float& value : texts[0].embeddings) value = NAN;
    const auto given = forward(decoder, all, {&slabs[0], &slabs[1], &slabs[2]}, 2);
    expect(all_nan(given[0]), kernels, "a block of NaN", 0);
    expect(given[1] == alone[1] && given[2] == alone[2], kernels, "bits of blocks beside NaN", 0);
  }

 private:
  static std::string prefix(int64_t layer) { return "model.layers." + std::to_string(layer) + "."; }

  Slab remembered(cpu::Decoder& decoder, const Text& text, int64_t piece) const {
    Slab slab(slab_bytes(shape_, kLayers, text.capacity()));
    for (int64_t first = 0; first < text.prompt; first += piece) {
      const std::vector<int64_t> positions = counting(first, std::min(piece, text.prompt - first));
      cpu::Decoder::Call call{};
      add(call, text, slab, positions, first);
      const int64_t width = kFeatures * shape_.hidden;
      const Guarded<float> features(text.features.data() + first * width, static_cast<int64_t>(positions.size()) * width);
      decoder.remember(call, features.data(), piece % 2 + 1);
    }
    return slab;
  }

  void add(cpu::Decoder::Call& call, const Text& text, const Slab& slab, const std::vector<int64_t>& positions,
           int64_t start) const {
    cpu::Rows lane;
    lane.first = call.lanes.empty() ? 0 : call.lanes.back().first + call.lanes.back().count;
    lane.count = static_cast<int64_t>(positions.size()), lane.positions = positions.data();
    lane.prefix = lane.start = start;
    call.lanes.push_back(lane);
    call.slabs.push_back({slab.data(), text.capacity()});
    call.half = shape_.half;
  }

  // The states of each text's block, [rows * hidden].
  std::vector<std::vector<float>> forward(cpu::Decoder& decoder, const std::vector<const Text*>& texts,
                                          const std::vector<const Slab*>& slabs, int threads) const {
    cpu::Decoder::Call call{};
    std::vector<std::vector<int64_t>> positions;
    std::vector<float> embeddings;
    for (const Text* text : texts) {
      positions.push_back(counting(text->prompt, text->block));
      embeddings.insert(embeddings.end(), text->embeddings.begin(), text->embeddings.end());
    }
    for (size_t i = 0; i < texts.size(); ++i) add(call, *texts[i], *slabs[i], positions[i], texts[i]->prompt);
    const auto count = static_cast<int64_t>(embeddings.size());
    const Guarded<float> inputs(embeddings.data(), count), states(count);
    call.inputs = inputs.data(), call.states = states.data();
    call.features = {kLayers}, call.layers = kLayers;
    call.first_logits = count / shape_.hidden;
    decoder.forward(call, threads);
    std::vector<std::vector<float>> found;
    const float* from = states.data();
    for (const Text* text : texts) {
      found.emplace_back(from, from + text->embeddings.size());
      from += text->embeddings.size();
    }
    return found;
  }

  // Rows of the text's tokens stand before those of its block, in all layers as they are after the fusion.
  std::vector<Row> exact(const Text& text) const {
    const int64_t hidden = shape_.hidden, all = text.capacity();
    std::vector<Row> committed, x = rows_of(text.embeddings, hidden);
    for (const Row& row : rows_of(text.features, kFeatures * hidden))
      committed.push_back(naive::norm(toy_.dense.at("model.fc")(row), toy_.vectors.at("model.hidden_norm.weight")));
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      naive::Context context;
      for (int64_t row = 0; row < all; ++row) {
        context.positions.push_back(row);
        context.before.push_back(std::max<int64_t>(row - text.prompt, -1));
        auto& sees = context.sees.emplace_back();
        for (int64_t other = 0; other < all; ++other)
          sees.push_back(other <= row || (variant_.ahead[static_cast<size_t>(layer)] && row >= text.prompt));
      }
      std::vector<Row> inputs = committed, residual(static_cast<size_t>(text.prompt), Row(static_cast<size_t>(hidden)));
      for (const Row& row : x) inputs.push_back(naive::norm(row, toy_.vectors.at(prefix(layer) + "input_layernorm.weight")));
      residual.insert(residual.end(), x.begin(), x.end());
      const naive::Positions positions(shape_.heads.size);
      naive::Layer(toy_, prefix(layer), shape_.heads, &positions, shape_.blocks, shape_.window(static_cast<size_t>(layer)))
          .run(inputs, context, residual);
      x.assign(residual.begin() + text.prompt, residual.end());
    }
    for (Row& row : x) row = naive::norm(row, toy_.vectors.at("model.norm.weight"));
    return x;
  }

  void compare(const Text& text, const std::vector<float>& states) const {
    const std::vector<Row> rows = exact(text);
    for (int64_t r = 0; r < text.block; ++r) {
      const double from = distance(states.data() + r * shape_.hidden, rows[static_cast<size_t>(r)]);
      expect(from <= tolerance(*kernels_, shape_), *kernels_, "states of a block", r);
    }
  }

  // Another last row shows in those before it where a layer sees ahead, within the block's reach, and else in no other.
  void change(cpu::Decoder& decoder, const Text& text, const Slab& slab, const std::vector<float>& states) const {
    Text other = text;
    for (int64_t c = 1; c <= shape_.hidden; ++c) other.embeddings[other.embeddings.size() - static_cast<size_t>(c)] += 1.0f;
    const Slab own = copied(slab);
    const std::vector<float> changed = forward(decoder, {&other}, {&own}, 1)[0];
    const auto row = [&](const std::vector<float>& all, int64_t r) {
      return std::vector<float>(all.begin() + r * shape_.hidden, all.begin() + (r + 1) * shape_.hidden);
    };
    const bool ahead = variant_.ahead[0] || variant_.ahead[1];
    for (int64_t r = 0; r < text.block; ++r) {
      const bool differs = ahead || r == text.block - 1;
      expect(same_bits(row(changed, r), row(states, r)) != differs, *kernels_, "another last row", r);
    }
  }

  const Variant variant_;
  const ToyShape shape_;
  const cpu::Kernels* kernels_ = nullptr;
  Toy toy_;
};

Blocks windows(int64_t first, int64_t second) {
  Blocks blocks;
  blocks.windows = {first, second};
  return blocks;
}

// Convolutions whose tensors do not fit, or in layers that have more than attention and a network, are refused.
void test_refused() {
  const cpu::Kernels& kernels = *cpu::available_kernels()[0];
  const Kind kind = kernels.pairs ? Kind::bf16 : Kind::f32;
  const auto refuses = [&](int64_t outputs, int64_t numbers, bool output_norms, int64_t reads) {
    Blocks blocks;
    blocks.output_norms = output_norms;
    ToyDecoder toy({kind, kind, 48, 37, 53, {4, 2, 16}, false, false, false, false, blocks});
    toy.toy.matrix("model.layers.1.mlp_conv.kernel_projection", kind, outputs, 48);
    if (numbers) toy.toy.vector("model.layers.1.mlp_conv.base_kernel", numbers, 0.0, 1.0);
    std::vector<cpu::Place> places{{0, 0, 2, 16, reads}, {0, 0, 2, 16, reads}};
    places[0].ahead = true;
    try {
      cpu::Decoder(kernels, {kLayers, 48, 53, toy.shape.heads, {48, kEps}}, toy.toy.weights, {rope_of(toy.shape)}, places);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  constexpr int64_t kOwn = cpu::Place::kOwn;
  expect(!refuses(24, 192, false, kOwn) && !refuses(192, 192, false, kOwn), kernels, "convolutions", 2);
  expect(refuses(24, 0, false, kOwn) && refuses(24, 190, false, kOwn), kernels, "a base of no taps", 2);
  expect(refuses(3, 192, false, kOwn) && refuses(20, 192, false, kOwn), kernels, "groups that divide no channels", 2);
  expect(refuses(24, 192, true, kOwn), kernels, "convolutions beside other norms", 2);
  expect(refuses(24, 192, false, cpu::Place::kPassed), kernels, "a layer that looks ahead over another's keys", 2);
}

}  // namespace

void test_block_heads() {
  using K = Kind;
  // query heads of a key-value head, of which a tile holds 16, 8, 3 or 1 rows
  const Variant variants[] = {
      {{K::f32, K::f32, 48, 37, 8, {2, 2, 16}, false, false, true, false}, {true, true}},
      {{K::f32, K::f32, 34, 80, 8, {5, 1, 6}, false, true, true, false, windows(4, 0)}, {false, true}},
      {{K::f32, K::f32, 48, 37, 8, {16, 1, 4}, false, false, false, false, windows(9, 40)}, {true, true}},
      {{K::bf16, K::bf16, 64, 41, 8, {4, 2, 32}, true, true, true, false, windows(1, 33)}, {true, false}},
      {{K::f32, K::f32, 48, 37, 8, {2, 1, 16}, false, false, true, false}, {true, true}, 2, 8},
      {{K::f32, K::f32, 34, 80, 8, {5, 1, 6}, false, true, true, false, windows(4, 4)}, {false, false}, 4, 1},
      {{K::f32, K::f32, 130, 37, 8, {2, 2, 16}, false, false, false, false, windows(0, 7)}, {true, false}, 1, 65},
      {{K::f32, K::f32, 36, 37, 8, {4, 2, 8}, false, false, true, false}, {false, true}, 19, 36},
      {{K::bf16, K::bf16, 64, 41, 8, {4, 2, 32}, true, false, true, false}, {true, true}, 3, 16},
      {{K::i8, K::i8, 64, 64, 8, {4, 1, 16}, true, false, true, false, windows(12, 12)}, {true, true}, 2, 4},
  };
  for (const Variant& variant : variants) {
    BlockHead head(variant);
    for (const cpu::Kernels* kernels : cpu::available_kernels())
      if (multiplies(*kernels, variant.shape.kind)) head.run(*kernels);
  }
  test_refused();
}

}  // namespace cpu_test
