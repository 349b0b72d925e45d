#include "tests/cpu/packed.hpp"

namespace cpu_test {

std::vector<float> weights_of(const cpu::Kernels& kernels, const cpu::Matrix& matrix, int64_t output) {
  const Guarded<float> row(matrix.blocks * cpu::kDepth);
  Begun begun(kernels);
  kernels.weights(matrix, output, row.data());
  return row.values();
}

void pack(cpu::Weights& weights, const std::string& name, Kind kind, const FileMatrix& file, const int32_t* order,
          const std::string& beside) {
  const int64_t row = static_cast<int64_t>(file.bytes.size()) / file.outputs, part = 2 * cpu::kOutputs;
  weights.add_matrix(name + ".weight", kind, file.outputs, file.inputs, beside.empty() ? beside : beside + ".weight");
  for (int64_t first = 0; first < file.outputs; first += part) {
    const uint8_t* rows = file.bytes.data() + (order ? 0 : first * row);
    weights.pack(name + ".weight", file.kind, first, std::min(part, file.outputs - first), rows, order);
  }
}

Packed::Packed(Kind kind, int64_t outputs, int64_t inputs, bool wild, bool with_bias, bool shuffled, int threads)
    : file(random_matrix(source_of(kind), outputs, inputs, wild)), weights_(threads) {
  std::vector<int32_t> order(static_cast<size_t>(outputs));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  if (shuffled) std::shuffle(order.begin(), order.end(), generator);
  pack(weights_, "m", kind, file, shuffled ? order.data() : nullptr);
  bias = with_bias ? normals(outputs) : std::vector<float>(static_cast<size_t>(outputs), 0.0f);
  if (with_bias) weights_.add_vector("m.bias", bias.data(), outputs);
  matrix = weights_.matrix("m");
  move_behind_walls();
  for (const int32_t row : order)
    values.insert(values.end(), file.values.begin() + row * inputs, file.values.begin() + (row + 1) * inputs);
  if (kind == Kind::i8) {  // the numbers of a file, of which packing keeps 255 steps per row
    kept_from = values;
    for (int64_t o = 0; o < outputs; ++o) {
      const std::vector<float> row = weights_of(*cpu::portable_kernels(), matrix, o);
      std::copy(row.begin(), row.begin() + inputs, values.begin() + o * inputs);
    }
  }
}

void Packed::move_behind_walls() {
  data_ = {matrix.data, matrix.panels * cpu::panel_bytes(matrix.kind, matrix.blocks)};
  matrix.data = data_.data();
  const auto move = [&](const float*& from, Guarded<float>& to) {
    if (!from) return;
    to = Guarded<float>(from, matrix.panels * cpu::kOutputs);
    from = to.data();
  };
  move(matrix.scales, scales_);
  move(matrix.bias, bias_);
}

}  // namespace cpu_test
