// Runs csrc/spec against brute force on random inputs in heap buffers of the exact size, so that the sanitizers see
// every read and write that leaves them. Exits with 1 and a line per failed check.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "spec/compaction.hpp"
#include "spec/gumbel.hpp"
#include "spec/top_children.hpp"
#include "spec/tree.hpp"

namespace {

int failures = 0;

void check(bool holds, const char* what, int64_t size) {
  if (holds) return;
  std::printf("failed: %s (size %lld)\n", what, static_cast<long long>(size));
  ++failures;
}

std::mt19937_64 generator(1);

int64_t below(int64_t bound) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(bound)); }

// Normal values; coarse ones tie often. One in 16 is NaN, -inf or +inf where `special`.
std::vector<float> random_scores(int64_t size, bool coarse, bool special) {
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

std::vector<spec::Scored> sorted(const std::vector<float>& values) {
  std::vector<spec::Scored> all;
  for (size_t i = 0; i < values.size(); ++i) all.push_back({spec::defined(values[i]), static_cast<int64_t>(i)});
  std::sort(all.begin(), all.end(), spec::better);
  return all;
}

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

void test_tree() {
  for (const int64_t nodes : {1, 2, 63, 64, 65, 128, 129, 256}) {
    std::vector<int64_t> parents(static_cast<size_t>(nodes), -1);
    for (int64_t i = 1; i < nodes; ++i) parents[i] = below(i);
    const int64_t words = spec::words_for(nodes);
    std::vector<uint64_t> ancestors(static_cast<size_t>(nodes * words), ~uint64_t{0});
    check(spec::ancestor_words(parents.data(), nodes, ancestors.data()), "ancestor_words accepts", nodes);
    std::vector<uint8_t> mask(static_cast<size_t>(nodes * nodes), 7);
    spec::tree_mask(ancestors.data(), nodes, words, nodes, mask.data());
    for (int64_t node = 0; node < nodes; ++node) {
      std::vector<uint8_t> row(static_cast<size_t>(nodes), 0);
      for (int64_t up = node; up >= 0; up = parents[up]) row[up] = 1;
      check(std::equal(row.begin(), row.end(), mask.begin() + node * nodes), "ancestors", nodes);
    }

    std::vector<int64_t> tokens(static_cast<size_t>(nodes)), chosen(static_cast<size_t>(nodes));
    std::iota(tokens.begin(), tokens.end(), 100);
    std::vector<int64_t> expected;
    for (int64_t node = below(nodes); node >= 0; node = parents[node]) expected.insert(expected.begin(), node);
    for (size_t j = 1; j < expected.size(); ++j) chosen[expected[j - 1]] = tokens[expected[j]];
    check(spec::walk(tokens.data(), parents.data(), chosen.data(), nodes) == expected, "walk", nodes);

    parents.back() = nodes;
    check(!spec::ancestor_words(parents.data(), nodes, ancestors.data()), "ancestor_words refuses", nodes);
  }
}

void test_select_best() {
  for (const int64_t size : {0, 1, 7, 64, 700})
    for (const int64_t count : {0, 1, 5, 60, 1000}) {
      auto values = random_scores(size, true, true);
      for (float& value : values)
        if (std::isnan(value)) value = -INFINITY;
      std::vector<int64_t> expected;
      for (const auto& scored : sorted(values))
        if (static_cast<int64_t>(expected.size()) < count && scored.value > spec::kLowest)
          expected.push_back(scored.index);
      std::sort(expected.begin(), expected.end());
      std::vector<int64_t> out(static_cast<size_t>(std::min(count, size)), -1);
      const int64_t kept = spec::select_best(values.data(), size, count, out.data());
      check(kept == static_cast<int64_t>(expected.size()), "select_best count", size);
      check(std::equal(expected.begin(), expected.end(), out.begin()), "select_best", size);
    }
  const float nan = NAN;
  int64_t out;
  check(spec::select_best(&nan, 1, 1, &out) == -1, "select_best of NaN", 1);
}

template <typename T>
void test_top_children(const char* what) {
  for (const int64_t columns : {1, 2, 15, 255, 256, 257, 1000, 5003})
    for (const int64_t k : {int64_t{1}, int64_t{10}, columns})
      for (int kind = 0; kind < 4; ++kind) {
        if (k > columns) continue;
        const int64_t rows = 3, stride = columns + 2;
        auto values = random_scores((rows - 1) * stride + columns, kind & 1, kind & 2);
        std::vector<T> raw(values.size());
        for (size_t i = 0; i < values.size(); ++i) {
          if constexpr (sizeof(T) == 4) {
            raw[i] = values[i];
          } else {
            uint32_t bits;
            std::memcpy(&bits, &values[i], sizeof bits);
            raw[i] = static_cast<uint16_t>(bits >> 16);
            values[i] = spec::load(raw.data(), static_cast<int64_t>(i));
          }
        }
        std::vector<float> log_probs(static_cast<size_t>(rows * k), NAN);
        std::vector<int64_t> best(static_cast<size_t>(rows * k), -1);
        spec::top_children(raw.data(), rows, columns, stride, k, false, log_probs.data(), best.data());
        for (int64_t r = 0; r < rows; ++r) {
          const std::vector<float> row(values.begin() + r * stride, values.begin() + r * stride + columns);
          const auto expected = sorted(row);
          double sum = 0.0;
          for (const auto& scored : expected) sum += std::exp(static_cast<double>(scored.value) - expected[0].value);
          for (int64_t j = 0; j < k; ++j) {
            const double exact = static_cast<double>(expected[j].value) - expected[0].value - std::log(sum);
            const double got = log_probs[r * k + j];
            check(best[r * k + j] == expected[j].index, what, columns);
            if (expected[j].value == spec::kLowest)
              check(got == -INFINITY, what, columns);
            else if (std::isfinite(static_cast<float>(exact)))
              check(std::fabs(got - exact) <= 1e-6 + 3e-7 * std::fabs(exact), what, columns);
          }
        }
      }
}

void test_compact_rows() {
  const int64_t planes = 3, slots = 20, row_bytes = 6, prefix = 4;
  std::vector<char> slab(static_cast<size_t>(planes * slots * row_bytes));
  for (char& byte : slab) byte = static_cast<char>(below(256));
  const std::vector<char> before = slab;
  const std::vector<int64_t> path{0, 1, 3, 4, 15};
  spec::compact_rows(slab.data(), planes, slots * row_bytes, row_bytes, prefix, path);
  for (int64_t plane = 0; plane < planes; ++plane)
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t j = slot - prefix;
      const bool moved = j >= 0 && j < static_cast<int64_t>(path.size());
      const int64_t source = (plane * slots + (moved ? prefix + path[j] : slot)) * row_bytes;
      check(std::equal(before.begin() + source, before.begin() + source + row_bytes,
                       slab.begin() + (plane * slots + slot) * row_bytes),
            "compact_rows", slot);
    }
}

}  // namespace

int main() {
  test_philox();
  test_gumbel();
  test_tree();
  test_select_best();
  test_top_children<float>("top_children float32");
  test_top_children<uint16_t>("top_children bfloat16");
  test_compact_rows();
  if (failures == 0) std::puts("all checks passed");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
