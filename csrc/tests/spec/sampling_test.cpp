// Random numbers and the choice of a token by Gumbel noise, against known answers and by every column.
#include <cmath>
#include <vector>

#include "spec/coupling.hpp"
#include "spec/gumbel.hpp"
#include "tests/spec/common.hpp"

namespace spec_test {
namespace {

int64_t brute_gumbel(const std::vector<float>& scores, uint64_t seed, uint64_t position) {
  double best = -INFINITY;
  int64_t index = -1;
  for (size_t i = 0; i < scores.size(); ++i) {
    uint32_t words[4][1] = {{static_cast<uint32_t>(i / 4)},
                            {static_cast<uint32_t>(position)},
                            {static_cast<uint32_t>(position >> 32)},
                            {0}};
    spec::philox(words, {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    const double sum = static_cast<double>(spec::defined(scores[i])) + spec::gumbel(words[i % 4][0]);
    if (sum > best) best = sum, index = static_cast<int64_t>(i);
  }
  return index;
}

}  // namespace

void test_philox() {  // Random123's known answers
  const uint32_t cases[3][10] = {
      {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
      {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
      {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
       0x24126ea1},
  };
  for (const auto& known : cases) {
    uint32_t words[4][1] = {{known[0]}, {known[1]}, {known[2]}, {known[3]}};
    spec::philox(words, {known[4], known[5]});
    for (int i = 0; i < 4; ++i) check(words[i][0] == known[6 + i], "philox", i);
  }
}

void test_gumbel() {
  check(spec::gumbel(~0u) <= spec::kLargestNoise && spec::gumbel(~0u) > spec::kLargestNoise - 0.01, "noise bound", 0);
  for (const int64_t size : {1, 3, 4, 63, 64, 255, 256, 257, 1000, 3001})
    for (int kind = 0; kind < 8; ++kind) {
      auto scores = random_scores(size, kind & 1, kind & 2);
      if (kind & 4)
        for (float& score : scores) score *= 100.0f;
      const uint64_t seed = generator(), position = generator();
      check(spec::keyed_gumbel_argmax(scores.data(), size, seed, position) == brute_gumbel(scores, seed, position),
            "keyed_gumbel_argmax", size);
    }
  const std::vector<float> nothing(70, -INFINITY);
  check(spec::keyed_gumbel_argmax(nothing.data(), 70, 1, 1) == -1, "keyed_gumbel_argmax of nothing", 70);
}

void test_coupling() {
  std::vector<uint32_t> words{0, 1, 2, ~0u, ~0u - 1, ~0u / 2, ~0u - (1u << 24), ~0u - (1u << 24) - 1};
  for (int i = 0; i < 20000; ++i) words.push_back(static_cast<uint32_t>(generator()));
  for (const uint32_t word : words) {
    const uint32_t given[1] = {word};
    float noise[1];
    spec::quick_gumbel(given, noise);
    check(std::fabs(noise[0] - spec::gumbel(word)) < 2e-5, "quick_gumbel", word);
  }
  const int64_t ids[3] = {700, 0, 257}, positions[3] = {1ll << 33, 1ll << 33, 5};
  const float logits[12] = {1, 2, 3, NAN, 4, 5, 6, NAN, -INFINITY, 7, 8, NAN};
  float out[9];
  spec::couple(logits, 3, 3, 4, ids, positions, ~0ull, 0.5f, out);
  for (int i = 0; i < 9; ++i) {
    const auto id = ids[i % 3], position = positions[i / 3];
    uint32_t words[4][1] = {
        {static_cast<uint32_t>(id / 4)}, {static_cast<uint32_t>(position)}, {static_cast<uint32_t>(position >> 32)}, {0}};
    spec::philox(words, {~0u, ~0u});
    const float expected =
        logits[i / 3 * 4 + i % 3] + 0.5f * static_cast<float>(spec::gumbel(words[id % 4][0]));
    check(out[i] == expected || std::fabs(out[i] - expected) < 1e-4, "couple", i);
  }
}

}  // namespace spec_test
