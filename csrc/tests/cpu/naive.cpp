#include "tests/cpu/naive.hpp"

namespace cpu_test {

Row Dense::operator()(const Row& x) const {
  Row out(static_cast<size_t>(outputs), 0.0);
  for (int64_t o = 0; o < outputs; ++o) {
    const double *row = weights.data() + o * inputs, *from = x.data();
    double sum = bias.empty() ? 0.0 : bias[static_cast<size_t>(o)];
    for (int64_t k = 0; k < inputs; ++k) sum += row[k] * from[k];
    out[static_cast<size_t>(o)] = sum;
  }
  return out;
}

void Toy::matrix(const std::string& name, Kind kind, int64_t outputs, int64_t inputs) {
  const double size = 1.0 / std::sqrt(static_cast<double>(inputs));
  add(name, kind, random_matrix(source_of(kind), outputs, inputs, false, size));
}

void Toy::add(const std::string& name, Kind kind, const FileMatrix& file) {
  pack(weights, name, kind, file, nullptr);
  Dense& one = dense[name];
  one.outputs = file.outputs, one.inputs = file.inputs, one.weights = file.values;
  if (kind != Kind::i8) return;
  const cpu::Matrix packed = weights.matrix(name);
  for (int64_t o = 0; o < one.outputs; ++o) {
    const std::vector<float> row = weights_of(*cpu::portable_kernels(), packed, o);
    std::copy(row.begin(), row.begin() + one.inputs, one.weights.begin() + o * one.inputs);
  }
}

void Toy::vector(const std::string& name, int64_t count, double mean, double deviation) {
  std::vector<float> values = normals(count, deviation);
  for (float& value : values) value += static_cast<float>(mean);
  weights.add_vector(name, values.data(), count);
  vectors[name].assign(values.begin(), values.end());
}

void Toy::bias(const std::string& name, int64_t count) {
  vector(name + ".bias", count, 0.0, 0.3);
  dense[name].bias = vectors[name + ".bias"];
}

void Toy::network(const std::string& prefix, const ToyShape& shape) {
  matrix(prefix + "gate_proj", shape.kind, shape.inner, shape.hidden);
  matrix(prefix + "up_proj", shape.other, shape.inner, shape.hidden);
  matrix(prefix + "down_proj", shape.other, shape.hidden, shape.inner);
  if (!shape.blocks.clamped) return;
  bias(prefix + "gate_proj", shape.inner);
  bias(prefix + "up_proj", shape.inner);
  bias(prefix + "down_proj", shape.hidden);
}

void Toy::experts(const std::string& prefix, const ToyShape& shape) {
  const int64_t count = shape.blocks.experts;
  const Kind kind = shape.kind == Kind::f32 ? Kind::f32 : Kind::bf16;
  matrix(prefix + "router", kind, count, shape.hidden);
  if (shape.blocks.clamped) bias(prefix + "router", count);
  if (shape.blocks.choice) vector(prefix + "router.choice", count, 0.0, 0.3);
  for (int64_t e = 0; e < count; ++e) network(prefix + "experts." + std::to_string(e) + ".", shape);
  if (!shape.blocks.shared) return;
  network(prefix + "shared.", shape);
  matrix(prefix + "shared.gate", kind, 1, shape.hidden);
}

void Toy::layer(const std::string& prefix, const ToyShape& shape, int64_t width) {
  const std::string attention = prefix + "self_attn.";
  const int64_t size = shape.heads.size, queries = shape.heads.queries * size, keys = shape.heads.keys * size;
  matrix(attention + "q_proj", shape.kind, queries, width);
  matrix(attention + "k_proj", shape.kind, keys, width);
  matrix(attention + "v_proj", shape.other, keys, width);
  matrix(attention + "o_proj", shape.kind, shape.hidden, queries);
  if (shape.blocks.experts)
    experts(prefix + "mlp.", shape);
  else
    network(prefix + "mlp.", shape);
  if (shape.blocks.clamped) vector(attention + "sinks", shape.heads.queries, 0.5, 1.0);
  if (shape.blocks.input_norms) vector(prefix + "post_attention_layernorm.weight", shape.hidden, 1.0, 0.2);
  if (shape.blocks.output_norms) {
    vector(prefix + "attention_output_norm.weight", shape.hidden, 0.7, 0.2);
    vector(prefix + "mlp_output_norm.weight", shape.hidden, 0.7, 0.2);
  }
  if (shape.biases) {
    bias(attention + "q_proj", queries);
    bias(attention + "k_proj", keys);
    bias(attention + "v_proj", keys);
    bias(attention + "o_proj", shape.hidden);
  }
  if (shape.head_norms) {
    vector(attention + "q_norm.weight", shape.blocks.whole_norms ? queries : size, 1.0, 0.2);
    vector(attention + "k_norm.weight", shape.blocks.whole_norms ? keys : size, 1.0, 0.2);
  }
}

double distance(const float* got, const Row& exact) {
  double apart = 0.0, length = 0.0;
  for (size_t i = 0; i < exact.size(); ++i) {
    apart += std::pow(static_cast<double>(got[i]) - exact[i], 2);
    length += exact[i] * exact[i];
  }
  return std::sqrt(apart / length);
}

namespace naive {

Row norm(const Row& x, const Row& weight) {
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  const double root = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + static_cast<double>(kEps));
  Row out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * root * weight[i];
  return out;
}

Positions::Positions(int64_t channels, float base) : factor(1.1f) {
  for (int64_t i = 0; i < channels / 2; ++i)
    frequencies.push_back(std::pow(base, -2.0f * static_cast<float>(i) / static_cast<float>(channels)));
}

void Positions::rotate(double* head, int64_t position) const {
  const size_t half = frequencies.size();
  for (size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(static_cast<float>(position) * frequencies[i]);
    const double cosine = std::cos(angle) * static_cast<double>(factor);
    const double sine = std::sin(angle) * static_cast<double>(factor);
    const double a = head[i], b = head[i + half];
    head[i] = a * cosine - b * sine, head[i + half] = b * cosine + a * sine;
  }
}

void Layer::run(const std::vector<Row>& inputs, const Context& context, std::vector<Row>& residual) const {
  std::vector<Row> queries, keys, values;
  for (size_t r = 0; r < inputs.size(); ++r) {
    queries.push_back(heads_of("q", heads_.queries, inputs[r], context.positions[r]));
    keys.push_back(heads_of("k", heads_.keys, inputs[r], context.positions[r]));
    values.push_back(dense("self_attn.v_proj")(inputs[r]));
  }
  const auto add = [&](const Row& added, Row& to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += added[i] * static_cast<double>(blocks_.residual);
  };
  for (size_t r = 0; r < inputs.size(); ++r) {
    std::vector<char> sees = context.sees[r];
    for (size_t other = 0; other < sees.size() && window_; ++other)
      sees[other] = sees[other] && context.positions[other] > context.positions[r] - window_;
    const Row attended = dense("self_attn.o_proj")(attend(queries[r], keys, values, sees));
    add(normed("attention_output_norm.weight", attended), residual[r]);
    const Row read = normed("post_attention_layernorm.weight", residual[r]);
    add(normed("mlp_output_norm.weight", blocks_.experts ? mixed(read) : gated("mlp.", read)), residual[r]);
  }
}

double Layer::activated(double gate, double up) const {
  if (blocks_.clamped) {
    const double x = std::min(gate, 7.0), other = std::max(-7.0, std::min(up, 7.0));
    return x / (1.0 + std::exp(-1.702 * x)) * (other + 1.0);
  }
  if (!blocks_.gelu) return gate / (1.0 + std::exp(-gate)) * up;
  return 0.5 * gate * (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) * (gate + 0.044715 * gate * gate * gate))) * up;
}

Row Layer::gated(const std::string& prefix, const Row& x) const {
  Row gates = dense(prefix + "gate_proj")(x);
  const Row ups = dense(prefix + "up_proj")(x);
  for (size_t i = 0; i < gates.size(); ++i) gates[i] = activated(gates[i], ups[i]);
  return dense(prefix + "down_proj")(gates);
}

// The numbers of the experts that a row uses: those of the best scores, in the groups of the best two.
std::vector<size_t> Layer::chosen(const Row& scores) const {
  Row ranks = scores;
  const auto choice = toy_.vectors.find(prefix_ + "mlp.router.choice");
  for (size_t e = 0; e < ranks.size(); ++e)
    if (choice != toy_.vectors.end()) ranks[e] += choice->second[e];
  const auto groups = static_cast<size_t>(blocks_.routing.groups), kept = static_cast<size_t>(blocks_.routing.kept);
  const size_t size = ranks.size() / groups;
  std::vector<std::pair<double, size_t>> of_groups, found;
  for (size_t g = 0; g < groups; ++g) {
    Row own(ranks.begin() + static_cast<int64_t>(g * size), ranks.begin() + static_cast<int64_t>((g + 1) * size));
    std::sort(own.begin(), own.end(), [](double a, double b) { return a > b; });
    of_groups.emplace_back(-(own[0] + (size > 1 ? own[1] : 0.0)), g);
  }
  std::sort(of_groups.begin(), of_groups.end());
  for (size_t i = 0; i < kept; ++i)
    for (size_t e = of_groups[i].second * size; e < (of_groups[i].second + 1) * size; ++e) found.emplace_back(-ranks[e], e);
  std::sort(found.begin(), found.end());
  std::vector<size_t> best;
  for (int64_t i = 0; i < blocks_.routing.chosen; ++i) best.push_back(found[static_cast<size_t>(i)].second);
  return best;
}

Row Layer::mixed(const Row& x) const {
  const cpu::Routing& routing = blocks_.routing;
  Row scores = dense("mlp.router")(x);
  double total = 0.0, sum = 0.0;
  for (double& score : scores) total += score = routing.sigmoid ? 1.0 / (1.0 + std::exp(-score)) : std::exp(score);
  if (!routing.sigmoid)
    for (double& score : scores) score /= total;
  const std::vector<size_t> best = chosen(scores);
  for (const size_t e : best) sum += scores[e];
  Row found(x.size(), 0.0);
  const auto add = [&](const std::string& prefix, double weight) {
    const Row given = gated(prefix, x);
    for (size_t i = 0; i < found.size(); ++i) found[i] += weight * given[i];
  };
  for (const size_t e : best)
    add("mlp.experts." + std::to_string(e) + ".",
        scores[e] / (routing.normalised ? sum : 1.0) * static_cast<double>(routing.factor));
  if (blocks_.shared) add("mlp.shared.", 1.0 / (1.0 + std::exp(-dense("mlp.shared.gate")(x)[0])));
  return found;
}

Row Layer::normed(const std::string& name, const Row& x) const {
  const auto weight = toy_.vectors.find(prefix_ + name);
  return weight == toy_.vectors.end() ? x : norm(x, weight->second);
}

Row Layer::heads_of(const std::string& which, int64_t count, const Row& input, int64_t position) const {
  Row all = dense("self_attn." + which + "_proj")(input);
  const std::string name = "self_attn." + which + "_norm.weight";
  if (blocks_.whole_norms) all = normed(name, all);
  for (int64_t h = 0; h < count; ++h) {
    double* head = all.data() + h * heads_.size;
    if (!blocks_.whole_norms) {
      const Row one = normed(name, Row(head, head + heads_.size));
      std::copy(one.begin(), one.end(), head);
    }
    if (positions_) positions_->rotate(head, position);
  }
  return all;
}

Row Layer::attend(const Row& query, const std::vector<Row>& keys, const std::vector<Row>& values,
                  const std::vector<char>& sees) const {
  Row out(query.size(), 0.0);
  for (int64_t h = 0; h < heads_.queries; ++h) {
    const int64_t from = h / heads_.groups() * heads_.size, to = h * heads_.size;
    Row scores(keys.size(), -INFINITY);
    double peak = -INFINITY, sum = 0.0;
    for (size_t s = 0; s < keys.size(); ++s) {
      if (!sees[s]) continue;
      scores[s] = 0.0;
      for (int64_t d = 0; d < heads_.size; ++d) scores[s] += query.data()[to + d] * keys[s].data()[from + d];
      scores[s] *= blocks_.scale > 0.0f ? static_cast<double>(blocks_.scale) : 1.0 / std::sqrt(static_cast<double>(heads_.size));
      peak = std::max(peak, scores[s]);
    }
    if (blocks_.clamped) {
      const double sink = toy_.vectors.at(prefix_ + "self_attn.sinks")[static_cast<size_t>(h)];
      peak = std::max(peak, sink);
      sum = std::exp(sink - peak);
    }
    for (double& score : scores) score = std::exp(score - peak), sum += score;
    for (size_t s = 0; s < keys.size(); ++s)
      for (int64_t d = 0; d < heads_.size && sees[s]; ++d)
        out.data()[to + d] += scores[s] / sum * values[s].data()[from + d];
  }
  return out;
}

}  // namespace naive
}  // namespace cpu_test
