// Attention over a cache, against double precision and the same row alone, and what is moved there.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "spec/compaction.hpp"
#include "spec/strict_attention.hpp"
#include "tests/spec/common.hpp"

namespace spec_test {
namespace {

constexpr double kScale = 0.05;

struct Shape {
  int64_t heads, groups, rows, slots, size;
};

// One query in double precision over the slots that it sees.
std::vector<double> attended(const Shape& shape, const float* query, const std::vector<float>& keys,
                             const std::vector<float>& values, int64_t head, const std::vector<int64_t>& slots) {
  std::vector<double> scores, out(static_cast<size_t>(shape.size));
  for (const int64_t slot : slots) {
    const float* key = keys.data() + (head * shape.slots + slot) * shape.size;
    scores.push_back(kScale * std::inner_product(query, query + shape.size, key, 0.0));
  }
  const double peak = *std::max_element(scores.begin(), scores.end());
  double sum = 0.0;
  for (double& score : scores) sum += score = std::exp(score - peak);
  for (size_t j = 0; j < slots.size(); ++j)
    for (int64_t d = 0; d < shape.size; ++d)
      out[d] += scores[j] / sum * values[(head * shape.slots + slots[j]) * shape.size + d];
  return out;
}

std::vector<float> run(const Shape& shape, const std::vector<float>& query, const std::vector<float>& keys,
                       const std::vector<float>& values, const spec::RowPaths& paths) {
  const int64_t size = shape.size, head = shape.slots * size;
  const spec::AttentionShape strides{shape.heads, shape.groups, shape.rows, size, head, size, head, size,
                                      static_cast<float>(kScale)};
  std::vector<float> out(query.size(), NAN);
  spec::strict_attention(strides, query.data(), keys.data(), values.data(), paths, out.data());
  return out;
}

}  // namespace

// Rows along paths; the cache ends with the last slot that is seen, and nothing is read of a row of padding.
void test_strict_attention() {
  const int64_t columns = 2, live = 4;
  const std::vector<int32_t> nodes{0, -7, 0, 1, 0, 2, -7, -7, -7, -7}, counts{1, 2, 2, 0, -7};
  for (const int64_t prefix : {0, 5, 63, 64, 70})
    for (const int64_t size : {1, 20, 64, 100}) {
      const Shape shape{2, 3, 5, prefix + 3, size};
      const auto query = random_scores(shape.heads * shape.groups * shape.rows * size, false, false);
      auto keys = random_scores(shape.heads * shape.slots * size, false, false), values = keys;
      std::shuffle(values.begin(), values.end(), generator);
      const auto out = run(shape, query, keys, values, {columns, prefix, live, nodes.data(), counts.data()});
      for (int64_t row = 0; row < shape.rows; ++row) {
        std::vector<int64_t> slots(static_cast<size_t>(row < live ? prefix : 0));
        std::iota(slots.begin(), slots.end(), 0);
        for (int64_t j = 0; row < live && j < counts[row]; ++j) slots.push_back(prefix + nodes[row * columns + j]);
        const auto count = static_cast<int64_t>(slots.size());
        const Shape one{1, 1, 1, count, size};
        for (int64_t head = 0; head < shape.heads * shape.groups; ++head) {
          const float* from = query.data() + (head * shape.rows + row) * size;
          const float* got = out.data() + (head * shape.rows + row) * size;
          if (slots.empty()) {
            check(std::all_of(got, got + size, [](float value) { return value == 0.0f; }), "sees nothing", prefix);
            continue;
          }
          const auto wanted = attended(shape, from, keys, values, head / shape.groups, slots);
          for (int64_t d = 0; d < size; ++d) check(std::fabs(got[d] - wanted[d]) < 2e-5, "strict attention", prefix);
          std::vector<float> seen_keys, seen_values;  // the same row alone, all that it sees being committed
          for (const int64_t slot : slots)
            for (int64_t d = 0; d < size; ++d) {
              const int64_t place = (head / shape.groups * shape.slots + slot) * size + d;
              seen_keys.push_back(keys[place]), seen_values.push_back(values[place]);
            }
          const int32_t none = 0;
          const auto alone = run(one, {from, from + size}, seen_keys, seen_values, {0, count, 1, nullptr, &none});
          check(std::equal(alone.begin(), alone.end(), got), "strict attention alone", prefix);
        }
      }
      const auto nothing = run(shape, query, keys, values, {columns, prefix, 0, nodes.data(), counts.data()});
      check(nothing == std::vector<float>(nothing.size()), "no live row", prefix);
    }
}

void test_compact_rows() {
  const int64_t planes = 3, slots = 20, row_bytes = 6, prefix = 4;
  std::vector<char> slab(static_cast<size_t>(planes * slots * row_bytes));
  for (char& byte : slab) byte = static_cast<char>(below(256));
  const std::vector<char> before = slab;
  const std::vector<int64_t> path{0, 1, 3, 4, 15};
  const auto compact = [&](const std::vector<int64_t>& given) {
    return spec::compact_rows(slab.data(), planes, slots, row_bytes, prefix, given.data(),
                              static_cast<int64_t>(given.size()));
  };
  for (const std::vector<int64_t>& wrong : {std::vector<int64_t>{1}, {0, 2, 2}, {0, 3, 1}, {0, 16}})
    check(!compact(wrong) && slab == before, "compact_rows refuses", wrong.back());
  check(compact({}) && slab == before && compact(path), "compact_rows accepts", prefix);
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

}  // namespace spec_test
