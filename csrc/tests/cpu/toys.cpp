#include "tests/cpu/toys.hpp"

namespace cpu_test {

namespace {

FileMatrix repeated(FileMatrix file, int64_t period) {
  const auto bytes = static_cast<int64_t>(file.bytes.size()) / file.outputs;
  for (int64_t o = period; o < file.outputs; ++o) {
    std::copy_n(file.bytes.begin() + (o - period) * bytes, bytes, file.bytes.begin() + o * bytes);
    std::copy_n(file.values.begin() + (o - period) * file.inputs, file.inputs, file.values.begin() + o * file.inputs);
  }
  return file;
}

}  // namespace

std::vector<int64_t> random_tokens(int64_t count, int64_t vocabulary) {
  std::vector<int64_t> tokens(static_cast<size_t>(count));
  for (int64_t& token : tokens) token = below(vocabulary);
  return tokens;
}

std::vector<int64_t> counting(int64_t first, int64_t count) {
  std::vector<int64_t> found;
  for (int64_t i = 0; i < count; ++i) found.push_back(first + i);
  return found;
}

bool Given::same_row(int64_t row, const Given& other, int64_t of) const {
  const auto a = static_cast<size_t>(row), b = static_cast<size_t>(of);
  return same_bits(states[a], other.states[b]) && same_bits(logits[a], other.logits[b]) &&
         chosen[a] == other.chosen[b] && same_bits(chosen_logits[a], other.chosen_logits[b]);
}

bool Given::chosen_is_best(size_t row) const {
  std::vector<float> wanted;
  for (const int64_t token : chosen[row])
    wanted.push_back(token < 0 ? -INFINITY : logits[row][static_cast<size_t>(token)]);
  return chosen[row] == best_of(logits[row], static_cast<int64_t>(chosen[row].size())) &&
         same_bits(chosen_logits[row], wanted);
}

bool Given::operator==(const Given& other) const {
  if (chosen.size() != other.chosen.size()) return false;
  for (size_t r = 0; r < chosen.size(); ++r)
    if (!same_row(static_cast<int64_t>(r), other, static_cast<int64_t>(r))) return false;
  return true;
}

ToyDecoder::ToyDecoder(const ToyShape& shape, int threads, int64_t period) : shape(shape), toy(threads) {
  const Kind from = source_of(shape.kind);
  FileMatrix embedding = random_matrix(from, shape.vocabulary, shape.hidden, false);
  const auto row = static_cast<int64_t>(embedding.bytes.size()) / shape.vocabulary;
  if (has_nan()) std::fill(embedding.bytes.end() - row, embedding.bytes.end(), uint8_t{0xFF});
  toy.add("model.embed_tokens", shape.kind, shape.tied ? repeated(embedding, period) : embedding);
  if (!shape.tied) {
    const double size = 1.0 / std::sqrt(static_cast<double>(shape.hidden));
    const FileMatrix head = random_matrix(from, shape.vocabulary, shape.hidden, false, size);
    toy.add("lm_head", shape.kind, repeated(head, period));
  }
  toy.vector("model.norm.weight", shape.hidden, 1.0, 0.2);
  if (shape.blocks.normed) toy.vector("model.embed_norm.weight", shape.hidden, 1.0, 0.2);
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    toy.layer(prefix, shape, shape.hidden, shape.mixer(static_cast<size_t>(i)));
    if (shape.blocks.input_norms) toy.vector(prefix + "input_layernorm.weight", shape.hidden, 1.0, 0.2);
  }
}

ToyDecoder::Exact ToyDecoder::exact(const std::vector<int64_t>& tokens, const naive::Context& context) const {
  Exact found;
  std::vector<Row> x;
  const Dense &embedding = toy.dense.at("model.embed_tokens"), &head = shape.tied ? embedding : toy.dense.at("lm_head");
  for (const int64_t token : tokens) {
    const auto row = embedding.weights.begin() + token * shape.hidden;
    x.emplace_back(row, row + shape.hidden);
    for (double& value : x.back()) value *= static_cast<double>(shape.blocks.embedding);
    if (shape.blocks.normed) x.back() = naive::norm(x.back(), toy.vectors.at("model.embed_norm.weight"));
  }
  const auto normed = [&](const std::string& name) {
    std::vector<Row> rows;
    const auto weight = toy.vectors.find(name);
    for (const Row& row : x) rows.push_back(weight == toy.vectors.end() ? row : naive::norm(row, weight->second));
    return rows;
  };
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    found.states.push_back(x);
    const naive::Positions positions = i ? second_positions(shape) : first_positions(shape);
    const naive::Positions* turns = i && !shape.blocks.second_turned ? nullptr : &positions;
    const auto layer = static_cast<size_t>(i);
    naive::Layer(toy, prefix, shape.heads, turns, shape.blocks, shape.window(layer), shape.mixer(layer))
        .run(normed(prefix + "input_layernorm.weight"), context, x);
  }
  found.states.push_back(normed("model.norm.weight"));
  for (const Row& row : found.states.back()) {
    found.logits.push_back(head(row));
    for (double& logit : found.logits.back()) logit /= static_cast<double>(shape.blocks.divisor);
  }
  return found;
}

struct Network::Decoder : cpu::Decoder {
  using cpu::Decoder::Decoder;
};

Network::Network(const ToyDecoder& toy, const cpu::Kernels& kernels, bool passed) : shape_(toy.shape), passed_(passed) {
  const Blocks& blocks = shape_.blocks;
  const auto activation = blocks.clamped ? cpu::Activation::clamped
                          : blocks.plain ? cpu::Activation::relu
                          : blocks.gelu  ? cpu::Activation::gelu_tanh
                                         : cpu::Activation::silu;
  const cpu::Form form{shape_.hidden, kEps, activation, blocks.scale, blocks.residual, blocks.routing,
                        blocks.added_eps};
  const cpu::Shape sizes{kLayers, shape_.hidden, shape_.vocabulary, shape_.heads, form, blocks.embedding, blocks.divisor,
                         blocks.recurrence};
  const std::vector<cpu::Rope> ropes{rope_of(first_positions(shape_)), rope_of(second_positions(shape_))};
  const int second = blocks.second_turned ? 1 : cpu::Layer::kNone;
  std::vector<cpu::Place> places{{0, shape_.window(0)}, {second, shape_.window(1)}};
  if (passed) places[0].reads = cpu::Place::kPassed, places[1].reads = cpu::Place::kPassed - 1;
  decoder_ = std::make_unique<Decoder>(kernels, sizes, toy.toy.weights, ropes, places);
}

Network::~Network() = default;

cpu::Memory Network::memory() const { return cpu::Memory(decoder_->shape().recurrence); }

Given Network::run(const Ask& ask, const Slab& slab, int64_t capacity, int threads) {
  const auto rows = static_cast<int64_t>(ask.tokens.size());
  const Guarded<float> states(rows * (kLayers + 1) * shape_.hidden),
      logits((rows - ask.first_logits) * shape_.vocabulary);
  const Guarded<int64_t> chosen(rows * ask.count);
  const Guarded<float> chosen_logits(rows * ask.count);
  cpu::Decoder::Call call{};
  cpu::Rows& lane = call.lanes.emplace_back();
  lane.count = rows, lane.positions = ask.positions.data();
  lane.prefix = ask.prefix, lane.start = ask.start;
  if (ask.seen) lane.seen = ask.seen->data(), lane.words = static_cast<int64_t>(ask.seen->size()) / rows;
  call.tokens = ask.tokens.data();
  call.slabs.push_back({slab.data(), capacity});
  if (passed_) {
    call.slabs.push_back({slab.data() + slab_bytes(shape_, 1, capacity), capacity});
    lane.see_prefix();
  }
  call.half = shape_.half;
  call.features = counting(0, kLayers + 1), call.states = states.data();
  call.logits = logits.data(), call.first_logits = ask.first_logits;
  call.count = ask.count, call.chosen = chosen.data(), call.chosen_logits = chosen_logits.data();
  call.layers = kLayers;
  if (ask.memory) call.memories = {ask.memory}, call.committed = {ask.committed};
  decoder_->forward(call, threads);
  Given given;
  given.chosen = in_rows(chosen, rows), given.chosen_logits = in_rows(chosen_logits, rows);
  given.states = in_rows(states, rows), given.logits = in_rows(logits, rows - ask.first_logits);
  return given;
}

std::vector<std::vector<float>> Network::read(const std::vector<std::vector<float>>& states) {
  const auto rows = static_cast<int64_t>(states.size());
  const Guarded<float> from(rows * shape_.hidden), logits(rows * shape_.vocabulary);
  float* to = from.data();
  for (const auto& row : states) to = std::copy(row.begin(), row.end(), to);
  decoder_->read(from.data(), rows, logits.data(), 1);
  return in_rows(logits, rows);
}

std::vector<float> Network::embedding(int64_t token) {
  const Guarded<float> out(shape_.hidden);
  decoder_->embedding(token, out.data());
  return out.values();
}

}  // namespace cpu_test
