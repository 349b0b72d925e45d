#include "tests/cpu/naive.hpp"

namespace cpu_test {

Row Dense::operator()(const Row& x) const {
  Row out(static_cast<size_t>(outputs), 0.0);
  for (int64_t o = 0; o < outputs; ++o) {
    const double *row = weights.data() + o * inputs, *from = x.data();
    double sum = bias.empty() ? 0.0 : bias[static_cast<size_t>(o)];
    for (int64_t k = 0; k < inputs; ++k) sum += row[k] * from[k];
    out[static_cast<size_t>(o)] = sum * factor;
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

void Toy::factor(const std::string& name, float by) {
  weights.add_vector(name + ".factor", &by, 1);
  dense[name].factor = static_cast<double>(by);
}

void Toy::network(const std::string& prefix, const ToyShape& shape) {
  if (!shape.blocks.plain) matrix(prefix + "gate_proj", shape.kind, shape.inner, shape.hidden);
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

void Toy::mix(const std::string& prefix, const ToyShape& shape, Mixes mixer) {
  const cpu::Recurrence& of = shape.blocks.recurrence;
  if (mixer == Mixes::convolution) {
    for (const char* name : {"b_proj", "c_proj", "x_proj"})
      matrix(prefix + "short_conv." + name, name[0] == 'x' ? shape.other : shape.kind, of.channels, shape.hidden);
    matrix(prefix + "short_conv.out_proj", shape.kind, shape.hidden, of.channels);
    vector(prefix + "short_conv.conv.weight", of.taps * of.channels, 0.0, 0.6);
    if (shape.biases) vector(prefix + "short_conv.conv.bias", of.channels, 0.0, 0.3);
    return;
  }
  if (mixer == Mixes::mamba) {
    const std::string mamba = prefix + "mamba.";
    matrix(mamba + "in_proj_z", shape.other, of.values(), shape.hidden);
    matrix(mamba + "in_proj_xbc", shape.kind, of.channels, shape.hidden);
    matrix(mamba + "in_proj_dt", shape.kind, of.heads, shape.hidden);
    matrix(mamba + "out_proj", shape.kind, shape.hidden, of.values());
    vector(mamba + "conv1d.weight", of.taps * of.channels, 0.0, 0.6);
    if (shape.biases) {
      vector(mamba + "conv1d.bias", of.channels, 0.0, 0.3);
      bias(mamba + "in_proj_dt", of.heads);
    }
    vector(mamba + "A_log", of.heads, 0.0, 1.0);
    vector(mamba + "dt_bias", of.heads, -2.0, 1.0);
    vector(mamba + "D", of.heads, 0.5, 1.0);
    if (of.norms) vector(mamba + "norm.weight", of.values(), 1.0, 0.2);
    return;
  }
  const std::string delta = prefix + "linear_attn.";
  matrix(delta + "in_proj_qkv", shape.kind, of.channels, shape.hidden);
  matrix(delta + "in_proj_z", shape.other, of.heads * of.value_size, shape.hidden);
  matrix(delta + "in_proj_b", shape.kind, of.heads, shape.hidden);
  matrix(delta + "in_proj_a", shape.other, of.heads, shape.hidden);
  matrix(delta + "out_proj", shape.kind, shape.hidden, of.heads * of.value_size);
  vector(delta + "conv1d.weight", of.taps * of.channels, 0.0, 0.6);
  vector(delta + "A_log", of.heads, 0.0, 1.0);
  vector(delta + "dt_bias", of.heads, -2.0, 1.0);
  vector(delta + "norm.weight", of.value_size, 1.0, 0.2);
}

void Toy::layer(const std::string& prefix, const ToyShape& shape, int64_t width, Mixes mixer) {
  const std::string attention = prefix + "self_attn.";
  const int64_t size = shape.heads.size, queries = shape.heads.queries * size, keys = shape.heads.keys * size;
  const bool beside = shape.blocks.beside, attends = (beside || mixer == Mixes::none) && !shape.blocks.single, feeds = mixer == Mixes::none || !shape.blocks.single;
  if (mixer != Mixes::none) mix(prefix, shape, mixer);
  if (attends) {
    matrix(attention + "q_proj", shape.kind, queries, width);
    matrix(attention + "k_proj", shape.kind, keys, width);
    matrix(attention + "v_proj", shape.other, keys, width);
    matrix(attention + "o_proj", shape.kind, shape.hidden, queries);
    const int64_t gates = shape.blocks.by_head ? shape.heads.queries : queries;
    if (shape.blocks.gated) matrix(attention + "gate_proj", shape.other, gates, width);
  }
  if (!feeds) return;
  if (shape.blocks.experts)
    experts(prefix + "mlp.", shape);
  else
    network(prefix + "mlp.", shape);
  if (shape.blocks.clamped && attends) vector(attention + "sinks", shape.heads.queries, 0.5, 1.0);
  if (shape.blocks.input_norms) vector(prefix + "post_attention_layernorm.weight", shape.hidden, 1.0, 0.2);
  if (shape.blocks.output_norms) {
    vector(prefix + "attention_output_norm.weight", shape.hidden, 0.7, 0.2);
    vector(prefix + "mlp_output_norm.weight", shape.hidden, 0.7, 0.2);
  }
  if (shape.biases && attends) {
    bias(attention + "q_proj", queries);
    bias(attention + "k_proj", keys);
    bias(attention + "v_proj", keys);
    bias(attention + "o_proj", shape.hidden);
  }
  if (beside) {
    factor(attention + "q_proj", 1.3f);
    factor(attention + "k_proj", 0.6f);
    factor(attention + "o_proj", -0.7f);
    factor(prefix + "mlp.gate_proj", 1.4f);
    factor(prefix + "mlp.down_proj", 0.5f);
    if (mixer == Mixes::mamba) factor(prefix + "mamba.in_proj_xbc", 1.7f);
    if (mixer == Mixes::mamba) factor(prefix + "mamba.in_proj_dt", 0.8f);
  }
  if (shape.head_norms && attends) {
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

Row norm(const Row& x, const Row& weight, float eps) {
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  const double root = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + static_cast<double>(eps));
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

namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Sums of channels' last inputs by their weights, [taps][channels]; path: rows, the one asked for last.
Row convolved(const std::vector<const Row*>& path, const Row& weights, int64_t taps) {
  const size_t channels = path.back()->size();
  Row out(channels, 0.0);
  for (int64_t t = 0; t < taps; ++t) {
    const auto back = static_cast<size_t>(taps - 1 - t);
    if (back >= path.size()) continue;
    const Row& row = *path[path.size() - 1 - back];
    for (size_t c = 0; c < channels; ++c) out[c] += row[c] * weights[static_cast<size_t>(t) * channels + c];
  }
  return out;
}

// Multiplies channels [first, first + size) so that their length becomes `length`.
void shorten(Row& x, int64_t first, int64_t size, double length) {
  double squares = 1e-6;
  for (int64_t i = first; i < first + size; ++i) squares += x[static_cast<size_t>(i)] * x[static_cast<size_t>(i)];
  for (int64_t i = first; i < first + size; ++i) x[static_cast<size_t>(i)] *= length / std::sqrt(squares);
}

// One head's state after a path, and what it gives for the last row; scalars: decays and rates of the path's rows. By the
// delta rule the path's rows are queries, keys and values, else values, keys and queries.
Row given_by_state(const std::vector<Row>& path, const std::vector<Row>& scalars, int64_t head, const cpu::Recurrence& of,
                   bool delta) {
  const int64_t keys = of.key_heads * of.key_size, key = head / (of.heads / of.key_heads) * of.key_size;
  std::vector<Row> state(static_cast<size_t>(of.key_size), Row(static_cast<size_t>(of.value_size), 0.0));
  Row out(static_cast<size_t>(of.value_size), 0.0);
  for (size_t r = 0; r < path.size(); ++r) {
    const double *query = path[r].data() + (delta ? 0 : of.values() + keys) + key;
    const double *k = path[r].data() + (delta ? keys : of.values()) + key;
    const double* value = path[r].data() + (delta ? 2 * keys : 0) + head * of.value_size;
    const double decay = scalars[r][static_cast<size_t>(head)], rate = scalars[r][static_cast<size_t>(of.heads + head)];
    for (size_t j = 0; j < out.size(); ++j) {
      double given = 0.0;
      for (size_t i = 0; i < state.size(); ++i) state[i][j] *= decay, given += state[i][j] * k[i];
      out[j] = 0.0;
      for (size_t i = 0; i < state.size(); ++i) {
        state[i][j] += k[i] * (value[j] - (delta ? given : 0.0)) * rate;
        out[j] += state[i][j] * query[i];
      }
    }
  }
  return out;
}

// The norm of a row by groups of its channels.
Row normed_by_groups(const Row& x, const Row& weight, int64_t groups) {
  const auto size = static_cast<int64_t>(x.size()) / groups;
  Row found;
  for (int64_t first = 0; first < static_cast<int64_t>(x.size()); first += size) {
    const Row part = norm({x.begin() + first, x.begin() + first + size}, {weight.begin() + first, weight.begin() + first + size});
    found.insert(found.end(), part.begin(), part.end());
  }
  return found;
}

}  // namespace

// Mamba-2: like `mix`, which the other mixers share.
std::vector<Row> mix_by_mamba(const Toy& toy, const std::string& own, const cpu::Recurrence& of, const std::vector<Row>& inputs,
                              const Context& context) {
  const auto dense = [&](const std::string& name, const Row& x) { return toy.dense.at(own + name)(x); };
  const auto vector = [&](const char* name, size_t i) { return toy.vectors.at(own + name)[i]; };
  std::vector<Row> rows, scalars, heads, found;
  for (const Row& x : inputs) {
    rows.push_back(dense("in_proj_xbc", x));
    Row steps = dense("in_proj_dt", x), decays;
    for (size_t h = 0; h < steps.size(); ++h) {
      steps[h] = std::log1p(std::exp(steps[h] + vector("dt_bias", h)));
      decays.push_back(std::exp(-std::exp(vector("A_log", h)) * steps[h]));
    }
    decays.insert(decays.end(), steps.begin(), steps.end());
    scalars.push_back(decays);
  }
  const auto bias = toy.vectors.find(own + "conv1d.bias");
  for (size_t r = 0; r < inputs.size(); ++r) {
    std::vector<const Row*> path;
    std::vector<Row> along, steps;
    for (size_t other = 0; other < inputs.size(); ++other)
      if (context.sees[r][other]) path.push_back(&rows[other]), steps.push_back(scalars[other]);
    heads.push_back(convolved(path, toy.vectors.at(own + "conv1d.weight"), of.taps));
    for (size_t c = 0; c < heads[r].size(); ++c) {
      heads[r][c] += bias == toy.vectors.end() ? 0.0 : bias->second[c];
      heads[r][c] *= sigmoid(heads[r][c]);
    }
    for (size_t other = 0; other <= r; ++other)
      if (context.sees[r][other]) along.push_back(heads[other]);
    const Row gates = dense("in_proj_z", inputs[r]);
    Row out;
    for (int64_t h = 0; h < of.heads; ++h)
      for (const double value : given_by_state(along, steps, h, of, false)) {
        const double x = heads[r][out.size()], gate = gates[out.size()];
        out.push_back(value + vector("D", static_cast<size_t>(h)) * x);
        if (!of.gated_last) out.back() *= gate * sigmoid(gate);
      }
    if (of.norms) out = normed_by_groups(out, toy.vectors.at(own + "norm.weight"), of.norms);
    for (size_t c = 0; c < out.size() && of.gated_last; ++c) out[c] *= gates[c] * sigmoid(gates[c]);
    found.push_back(dense("out_proj", out));
  }
  return found;
}

std::vector<Row> mix(const Toy& toy, const std::string& prefix, Mixes mixer, const cpu::Recurrence& of,
                     const std::vector<Row>& inputs, const Context& context) {
  if (mixer == Mixes::mamba) return mix_by_mamba(toy, prefix + "mamba.", of, inputs, context);
  const std::string own = prefix + (mixer == Mixes::convolution ? "short_conv." : "linear_attn.");
  const auto dense = [&](const std::string& name, const Row& x) { return toy.dense.at(own + name)(x); };
  std::vector<Row> rows, scalars, found;
  for (const Row& x : inputs) {
    if (mixer == Mixes::convolution) {
      rows.push_back(dense("b_proj", x));
      const Row by = dense("x_proj", x);
      for (size_t c = 0; c < by.size(); ++c) rows.back()[c] *= by[c];
      continue;
    }
    rows.push_back(dense("in_proj_qkv", x));
    scalars.push_back(dense("in_proj_a", x));
    for (size_t h = 0; h < scalars.back().size(); ++h) {
      const double step = std::log1p(std::exp(scalars.back()[h] + toy.vectors.at(own + "dt_bias")[h]));
      scalars.back()[h] = std::exp(-std::exp(toy.vectors.at(own + "A_log")[h]) * step);
    }
    for (const double rate : dense("in_proj_b", x)) scalars.back().push_back(sigmoid(rate));
  }
  std::vector<Row> heads;  // convolved queries, keys and values
  for (size_t r = 0; r < inputs.size(); ++r) {
    std::vector<const Row*> path;
    std::vector<size_t> places;
    for (size_t other = 0; other < inputs.size(); ++other)
      if (context.sees[r][other]) path.push_back(&rows[other]), places.push_back(other);
    if (mixer == Mixes::convolution) {
      Row out = convolved(path, toy.vectors.at(own + "conv.weight"), of.taps);
      const auto bias = toy.vectors.find(own + "conv.bias");
      const Row by = dense("c_proj", inputs[r]);
      for (size_t c = 0; c < out.size(); ++c) out[c] = by[c] * (out[c] + (bias == toy.vectors.end() ? 0.0 : bias->second[c]));
      found.push_back(out);
      continue;
    }
    heads.push_back(convolved(path, toy.vectors.at(own + "conv1d.weight"), of.taps));
    for (double& value : heads.back()) value *= sigmoid(value);
    for (int64_t h = 0; h < 2 * of.key_heads; ++h)
      shorten(heads.back(), h * of.key_size, of.key_size,
              h < of.key_heads ? 1.0 / std::sqrt(static_cast<double>(of.key_size)) : 1.0);
    std::vector<Row> along, steps;
    for (const size_t place : places) along.push_back(heads[place]), steps.push_back(scalars[place]);
    const Row gates = dense("in_proj_z", inputs[r]);
    found.emplace_back();
    for (int64_t h = 0; h < of.heads; ++h) {
      const Row out = norm(given_by_state(along, steps, h, of, true), toy.vectors.at(own + "norm.weight"));
      for (const double value : out) {
        const double gate = gates[found.back().size()];
        found.back().push_back(value * gate * sigmoid(gate));
      }
    }
  }
  for (Row& row : found) row = dense("out_proj", row);
  return found;
}

void Layer::run(const std::vector<Row>& inputs, const Context& context, std::vector<Row>& residual) const {
  const bool alone = blocks_.single, feeds = !alone || mixer_ == Mixes::none;
  const std::string around = "attention_conv.", network = "mlp_conv.";
  std::vector<Row> attended, read, fed;
  if (!(alone && feeds)) {
    attended = mixed(convolved(around, 0, inputs, inputs, context), context);
    attended = convolved(around, 1, attended, inputs, context);
  }
  const auto add = [&](const Row& added, Row& to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += added[i] * static_cast<double>(blocks_.residual);
  };
  for (size_t r = 0; r < attended.size(); ++r) add(normed("attention_output_norm.weight", attended[r]), residual[r]);
  if (!feeds) return;
  for (const Row& row : residual) read.push_back(normed("post_attention_layernorm.weight", row));
  for (const Row& row : convolved(network, 0, read, read, context))
    fed.push_back(blocks_.experts ? by_experts(row) : gated("mlp.", row));
  fed = convolved(network, 1, fed, read, context);
  for (size_t r = 0; r < fed.size(); ++r) add(normed("mlp_output_norm.weight", fed[r]), residual[r]);
}

std::vector<Row> Layer::convolved(const std::string& name, size_t side, const std::vector<Row>& rows,
                                  const std::vector<Row>& read, const Context& context) const {
  const auto base = toy_.vectors.find(prefix_ + name + "base_kernel");
  if (base == toy_.vectors.end()) return rows;
  const size_t channels = rows[0].size(), taps = base->second.size() / (2 * channels);
  std::vector<Row> found;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (context.before[r] < 0) {
      found.push_back(rows[r]);
      continue;
    }
    const Row added = dense(name + "kernel_projection")(read[r]);
    const size_t size = channels * 2 * taps / added.size();
    Row& out = found.emplace_back(channels, 0.0);
    for (size_t c = 0; c < channels; ++c)
      for (size_t t = 0; t < taps && t <= static_cast<size_t>(context.before[r]); ++t) {
        const size_t tap = side * taps + t;
        out[c] += (base->second[tap * channels + c] + added[(tap * channels + c) / size]) * rows[r - t][c];
      }
  }
  return found;
}

std::vector<Row> Layer::mixed(const std::vector<Row>& inputs, const Context& context) const {
  if (mixer_ == Mixes::none) return attended(inputs, context);
  std::vector<Row> found = mix(toy_, prefix_, mixer_, blocks_.recurrence, inputs, context);
  if (!blocks_.beside) return found;
  const std::vector<Row> other = attended(inputs, context);
  for (size_t r = 0; r < found.size(); ++r)
    for (size_t c = 0; c < found[r].size(); ++c) found[r][c] += other[r][c];
  return found;
}

std::vector<Row> Layer::attended(const std::vector<Row>& inputs, const Context& context) const {
  std::vector<Row> queries, keys, values, found;
  for (size_t r = 0; r < inputs.size(); ++r) {
    queries.push_back(heads_of("q", heads_.queries, inputs[r], context.positions[r]));
    keys.push_back(heads_of("k", heads_.keys, inputs[r], context.positions[r]));
    values.push_back(dense("self_attn.v_proj")(inputs[r]));
  }
  for (size_t r = 0; r < inputs.size(); ++r) {
    std::vector<char> sees = context.sees[r];
    for (size_t other = 0; other < sees.size() && window_; ++other)
      sees[other] = sees[other] && context.positions[other] > context.positions[r] - window_;
    Row attended = attend(queries[r], keys, values, sees);
    const Row gates = blocks_.gated ? dense("self_attn.gate_proj")(inputs[r]) : Row();
    const size_t channels = blocks_.by_head ? static_cast<size_t>(heads_.size) : 1;  // of a gate
    for (size_t i = 0; i < gates.size() * channels; ++i) attended[i] *= sigmoid(gates[i / channels]);
    found.push_back(dense("self_attn.o_proj")(attended));
  }
  return found;
}

double Layer::activated(double gate, double up) const {
  if (blocks_.clamped) {
    const double x = std::min(gate, 7.0), other = std::max(-7.0, std::min(up, 7.0));
    return x / (1.0 + std::exp(-1.702 * x)) * (other + 1.0);
  }
  if (blocks_.plain) return std::max(gate, 0.0) * up;
  if (!blocks_.gelu) return gate / (1.0 + std::exp(-gate)) * up;
  return 0.5 * gate * (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) * (gate + 0.044715 * gate * gate * gate))) * up;
}

Row Layer::gated(const std::string& prefix, const Row& x) const {
  Row gates = dense(prefix + (blocks_.plain ? "up_proj" : "gate_proj"))(x);
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

Row Layer::by_experts(const Row& x) const {
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
  const bool added = blocks_.added_eps >= 0.0f && name.find("output_norm") != std::string::npos;
  return weight == toy_.vectors.end() ? x : norm(x, weight->second, added ? blocks_.added_eps : kEps);
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
