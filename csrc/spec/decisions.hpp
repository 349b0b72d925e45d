// Learning to Draft's observations and networks, in float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "spec/top_children.hpp"

namespace spec {

// Where the candidates of a beam stand in an observation: places [first, last) of the whole beam's, of which a level d
// begins at 0 (d = 1) or width + (d - 2) * width^2, in `room` places; then two facts, `repeats` times each.
struct BeamWindow {
  int64_t width, first, last, room, repeats;
  float pad, lowest;  // of vacant places; scores below `lowest` count as that
};

// scores, depths: of `count` nodes, level by level; the root has depth 0 and is not shown. out: [room + 2 * repeats].
inline void beam_observation(const BeamWindow& window, const float* scores, const int64_t* depths, int64_t count,
                             float first_fact, float second_fact, float* out) {
  std::fill(out, out + window.room, window.pad);
  int64_t depth = 0, place = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (depths[i] == 0) continue;
    if (depths[i] != depth) {
      depth = depths[i];
      place = depth == 1 ? 0 : window.width + (depth - 2) * window.width * window.width;
    }
    if (place >= window.first && place < window.last) out[place - window.first] = std::max(scores[i], window.lowest);
    ++place;
  }
  std::fill(out + window.room, out + window.room + window.repeats, first_fact);
  std::fill(out + window.room + window.repeats, out + window.room + 2 * window.repeats, second_fact);
}

// out = bias + weight * in; weight: [outputs, inputs].
SPEC_CLONES inline void dense(const float* weight, const float* bias, const float* in, int64_t inputs, int64_t outputs,
                              float* out) {
  const int64_t whole = inputs / kLanes * kLanes;
  for (int64_t o = 0; o < outputs; ++o) {
    const float* row = weight + o * inputs;
    float lanes[kLanes] = {}, sum = bias[o];
    for (int64_t i = 0; i < whole; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += row[i + lane] * in[i + lane];
    for (int64_t i = whole; i < inputs; ++i) sum += row[i] * in[i];
    for (const float lane : lanes) sum += lane;
    out[o] = sum;
  }
}

// The first of the largest outputs of a perceptron. sizes: inputs, then the outputs of each layer; parameters: weight and
// bias of each layer; between layers tanh or ReLU.
inline int64_t best_action(const std::vector<int64_t>& sizes, const std::vector<const float*>& parameters, bool tanh,
                           const float* observation) {
  std::vector<float> values(observation, observation + sizes[0]), next;
  for (size_t layer = 0; layer + 1 < sizes.size(); ++layer) {
    next.resize(static_cast<size_t>(sizes[layer + 1]));
    dense(parameters[2 * layer], parameters[2 * layer + 1], values.data(), sizes[layer], sizes[layer + 1], next.data());
    if (layer + 2 < sizes.size())
      for (float& value : next) value = tanh ? std::tanh(value) : std::max(value, 0.0f);
    values.swap(next);
  }
  return std::max_element(values.begin(), values.end()) - values.begin();
}

}  // namespace spec
