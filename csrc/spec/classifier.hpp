// Networks of one hidden layer: ReLU units to one probability, in float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "spec/entropy.hpp"
#include "spec/top_children.hpp"


namespace spec {

// hidden_weight: [hidden, inputs]; hidden_bias, output_weight: [hidden].
struct Network {
  const float *hidden_weight, *hidden_bias, *output_weight;
  float output_bias;
  int64_t inputs, hidden;
};

inline float probability(const Network& net, const float* features) {
  float sum = net.output_bias;
  for (int64_t unit = 0; unit < net.hidden; ++unit) {
    float value = net.hidden_bias[unit];
    const float* weights = net.hidden_weight + unit * net.inputs;
    for (int64_t i = 0; i < net.inputs; ++i) value += weights[i] * features[i];
    if (value > 0.0f) sum += net.output_weight[unit] * value;
  }
  return 1.0f / (1.0f + std::exp(-sum));
}

// features: [count, inputs]; out: [count].
inline void probabilities(const Network& net, const float* features, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = probability(net, features + i * net.inputs);
}

// The same of C2T's features: path probability, entropy of the parent's distribution, depth. paths: log-probabilities,
// [rows, children]; entropies: [rows]; out: [rows, children].
inline void classify_paths(const Network& net, const float* paths, const float* entropies, float depth, int64_t rows,
                           int64_t children, float* out) {
  for (int64_t i = 0; i < rows * children; ++i) {
    const float features[] = {std::exp(paths[i]), entropies[i / children], depth};
    out[i] = probability(net, features);
  }
}

// The same of Disco's features: the largest probabilities of a row of logits, filled up with 0, its entropy over the
// `top` likeliest columns, the depth. The row and `normalized` as in top_children.
template <typename T>
float classify_row(const Network& net, const T* row, int64_t columns, int64_t top, bool normalized, float depth) {
  const int64_t count = net.inputs - 2, found = std::min(count, columns);
  std::vector<float> features(static_cast<size_t>(net.inputs), 0.0f);
  std::vector<int64_t> best(static_cast<size_t>(std::max<int64_t>(found, 1)));
  if (found > 0) top_children(row, 1, columns, columns, found, normalized, features.data(), best.data());
  for (int64_t i = 0; i < found; ++i) features[i] = std::exp(features[i]);
  top_entropy(row, 1, columns, columns, top, normalized, features.data() + count);
  features[count + 1] = depth;
  return probability(net, features.data());
}

}  // namespace spec
