// Classifiers and decisions of small networks, in double precision.
#include <algorithm>
#include <cmath>
#include <vector>

#include "spec/classifier.hpp"
#include "spec/decisions.hpp"
#include "tests/spec/common.hpp"

namespace spec_test {

void test_classifier() {
  for (const int64_t hidden : {1, 7, 48}) {
    const auto weights = random_scores(hidden * 3, false, false), bias = random_scores(hidden, false, false),
               last = random_scores(hidden, false, false), paths = random_scores(10, false, false);
    const float entropies[] = {0.5f, 2.0f};
    const spec::Network net{weights.data(), bias.data(), last.data(), 0.25f, 3, hidden};
    std::vector<float> out(10, NAN), alone(1, NAN);
    spec::classify_paths(net, paths.data(), entropies, 2.0f, 2, 5, out.data());
    for (int64_t i = 0; i < 10; ++i) {
      const float features[] = {std::exp(paths[i]), entropies[i / 5], 2.0f};
      double sum = 0.25;
      for (int64_t unit = 0; unit < hidden; ++unit) {
        double value = bias[unit];
        for (int64_t j = 0; j < 3; ++j) value += static_cast<double>(weights[unit * 3 + j]) * features[j];
        sum += value > 0.0 ? last[unit] * value : 0.0;
      }
      spec::probabilities(net, features, 1, alone.data());
      const float short_row[] = {std::fabs(paths[i])};  // one column: a probability of 1, an entropy of 0
      const spec::Network by_row{weights.data(), bias.data(), last.data(), 0.25f, 3, hidden};
      const float sure[] = {1.0f, 0.0f, 4.0f};
      float wanted;
      spec::probabilities(by_row, sure, 1, &wanted);
      check(std::fabs(spec::classify_row(by_row, short_row, 1, 1, false, 4.0f) - wanted) < 1e-5, "row", hidden);
      check(alone[0] == out[i] && std::fabs(out[i] - 1.0 / (1.0 + std::exp(-sum))) < 1e-5, "classifier", hidden);
    }
  }
}

void test_decisions() {
  const spec::BeamWindow window{2, 2, 6, 5, 2, -9.0f, -7.0f};  // the level behind the first, and a vacant place
  const float scores[] = {0.0f, -1.0f, -2.0f, -3.0f, -8.0f, -5.0f};
  const int64_t depths[] = {0, 1, 1, 2, 2, 2};
  std::vector<float> seen(9, NAN);
  spec::beam_observation(window, scores, depths, 6, 0.5f, 0.25f, seen.data());
  check(seen == std::vector<float>{-3, -7, -5, -9, -9, 0.5f, 0.5f, 0.25f, 0.25f}, "observation", 0);
  for (const bool tanh : {false, true})
    for (const int64_t hidden : {1, 16, 37}) {
      const auto first = random_scores(hidden * 9, false, false), bias = random_scores(hidden, false, false),
                 last = random_scores(hidden * 3, false, false), rest = random_scores(3, false, false);
      std::vector<double> out(3);
      for (int64_t action = 0; action < 3; ++action) {
        out[action] = rest[action];
        for (int64_t unit = 0; unit < hidden; ++unit) {
          double value = bias[unit];
          for (int64_t i = 0; i < 9; ++i) value += static_cast<double>(first[unit * 9 + i]) * seen[i];
          out[action] += last[action * hidden + unit] * (tanh ? std::tanh(value) : std::max(value, 0.0));
        }
      }
      const int64_t action = spec::best_action({9, hidden, 3}, {first.data(), bias.data(), last.data(), rest.data()},
                                               tanh, seen.data());
      check(out[action] >= *std::max_element(out.begin(), out.end()) - 1e-3, "action", hidden);
    }
}

}  // namespace spec_test
