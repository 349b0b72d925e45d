// Helpers of the tests of csrc/spec: random scores, and the parts of the program.
#pragma once

#include <cmath>
#include <vector>

#include "tests/check.hpp"

namespace spec_test {

// Normal values; coarse ones tie often. One in 16 is NaN, -inf or +inf where `special`.
inline std::vector<float> random_scores(int64_t size, bool coarse, bool special) {
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) {
    value = normal(generator);
    if (coarse) value = std::round(value);
    if (special && below(16) == 0) {
      const float kinds[] = {NAN, -INFINITY, INFINITY};
      value = kinds[below(3)];
    }
  }
  return values;
}

void test_philox();
void test_gumbel();
void test_coupling();
void test_tree();
void test_select_best();
void test_rows();
void test_classifier();
void test_decisions();
void test_strict_attention();
void test_best_first();
void test_step_queues();
void test_compact_rows();
void test_worth();
void test_copies();

}  // namespace spec_test
