// Tests of selection from scores and rows of logits, against sorting all of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "spec/candidates.hpp"
#include "spec/entropy.hpp"
#include "spec/mixing.hpp"
#include "spec/top_children.hpp"
#include "spec/tree.hpp"
#include "tests/spec/common.hpp"

namespace spec_test {
namespace {

std::vector<spec::Scored> sorted(const std::vector<float>& values) {
  std::vector<spec::Scored> all;
  for (size_t i = 0; i < values.size(); ++i) all.push_back({spec::defined(values[i]), static_cast<int64_t>(i)});
  std::sort(all.begin(), all.end(), spec::better);
  return all;
}

// The values as T stores them, and what T keeps of them back in `values`.
template <typename T>
std::vector<T> stored(std::vector<float>& values) {
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
  return raw;
}

template <typename T>
void test_top_children(const char* what) {
  for (const int64_t columns : {1, 2, 15, 255, 256, 257, 1000, 5003})
    for (const int64_t k : {int64_t{1}, int64_t{10}, columns})
      for (int kind = 0; kind < 4; ++kind) {
        if (k > columns) continue;
        const int64_t rows = 3, stride = columns + 2;
        auto values = random_scores((rows - 1) * stride + columns, kind & 1, kind & 2);
        const std::vector<T> raw = stored<T>(values);
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

// Candidates of normalised rows, by sorting all of them; scores are sums of two floats there, so equality is exact.
std::vector<spec::Candidate> brute_candidates(const std::vector<float>& values, int64_t rows, int64_t columns,
                                              int64_t stride, const std::vector<float>& scores, int64_t count,
                                              float log_gate, float bound) {
  std::vector<spec::Candidate> all;
  float anchor = -INFINITY;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      const float value = spec::defined(values[r * stride + c]), score = spec::defined(scores[r]) + value;
      anchor = std::max(anchor, score);
      if (score > bound && score > -INFINITY) all.push_back({score, value, value, r, c});
    }
  const auto fails = [&](const spec::Candidate& candidate) {
    return log_gate > -INFINITY && candidate.score < anchor + log_gate;
  };
  all.erase(std::remove_if(all.begin(), all.end(), fails), all.end());
  std::stable_sort(all.begin(), all.end(), [](const spec::Candidate& a, const spec::Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.row == b.row && a.value > b.value);
  });
  if (static_cast<int64_t>(all.size()) > count) all.resize(static_cast<size_t>(count));
  return all;
}

template <typename T>
void test_best_candidates(const char* what) {
  for (const int64_t columns : {1, 2, 255, 256, 257, 1000, 5003})
    for (const int64_t rows : {0, 1, 4})
      for (const int64_t count : {1, 7, 59, 300, 30000})
        for (int kind = 0; kind < 16; ++kind) {
          const int64_t stride = columns + 2;
          auto values = random_scores(rows ? (rows - 1) * stride + columns : 0, kind & 1, kind & 2);
          const std::vector<T> raw = stored<T>(values);
          const auto scores = random_scores(rows, kind & 1, kind & 2);
          const float log_gate = kind & 4 ? -2.0f : -INFINITY, bound = kind & 8 ? 1.0f : -INFINITY;
          const auto got = spec::best_candidates(raw.data(), rows, columns, stride, scores.data(), count, log_gate,
                                                 bound, true);
          const auto expected = brute_candidates(values, rows, columns, stride, scores, count, log_gate, bound);
          check(got.size() == expected.size(), what, columns);
          for (size_t i = 0; i < std::min(got.size(), expected.size()); ++i)
            check(got[i].score == expected[i].score && got[i].log_prob == expected[i].log_prob &&
                      got[i].row == expected[i].row && got[i].column == expected[i].column,
                  what, columns);
        }
}

template <typename T>
void test_top_entropy(const char* what) {
  for (const int64_t columns : {1, 2, 255, 256, 257, 1000, 5003})
    for (const int64_t top : {int64_t{1}, int64_t{10}, columns - 1, columns, columns + 5})
      for (int kind = 0; kind < 16; ++kind) {
        if (top < 1) continue;
        const bool normalized = kind & 8;
        const int64_t rows = 3, stride = columns + 2;
        auto values = random_scores((rows - 1) * stride + columns, kind & 1, false);
        for (float& value : values) {
          if (kind & 4) value *= 30.0f;
          if (normalized) value = -std::fabs(value);
          if (kind & 2 && below(4) == 0) value = below(2) ? NAN : -INFINITY;
        }
        const std::vector<T> raw = stored<T>(values);
        std::vector<float> out(static_cast<size_t>(rows), NAN);
        spec::top_entropy(raw.data(), rows, columns, stride, top, normalized, out.data());
        for (int64_t r = 0; r < rows; ++r) {
          const auto row = sorted({values.begin() + r * stride, values.begin() + r * stride + columns});
          double log_sum = 0.0, entropy = 0.0;
          if (!normalized && row[0].value > -INFINITY) {
            double sum = 0.0;
            for (const auto& scored : row) sum += std::exp(static_cast<double>(scored.value) - row[0].value);
            log_sum = row[0].value + std::log(sum);
          }
          for (int64_t j = 0; j < std::min(top, columns); ++j) {
            const double log_prob = row[j].value - log_sum;
            if (row[j].value > -INFINITY) entropy -= std::exp(log_prob) * log_prob;
          }
          check(std::fabs(out[r] - entropy) <= 1e-5 + 1e-6 * std::fabs(entropy), what, columns);
        }
      }
}

template <typename T>
void test_mix_rows(const char* what) {
  const double unit = sizeof(T) == 4 ? 1e-5 : 8e-3;  // of a value's size, as T stores it
  for (const int64_t columns : {1, 2, 256, 257, 1000})
    for (const int64_t more : {0, 3})
      for (const bool normalized : {false, true}) {
        const int64_t rows = 3, stride = columns + 2, width = columns + more;
        auto values = random_scores((rows - 1) * stride + columns, false, false);
        if (normalized)
          for (float& value : values) value = -std::fabs(value);
        values[0] = normalized ? -INFINITY : values[0];
        const std::vector<T> raw = stored<T>(values);
        const std::vector<double> left{0.25, 1.0, 0.5}, gained{0.75, 0.5};
        const std::vector<int64_t> places{0, 3 * width - 1};
        std::vector<T> out(static_cast<size_t>(rows * width));
        std::vector<uint8_t> raised(out.size(), 0);
        spec::mix_rows(raw.data(), rows, columns, stride, more, normalized, -20.0f, left, places, gained, out.data(),
                       raised.data());
        for (int64_t r = 0; r < rows; ++r) {
          const float* row = values.data() + r * stride;
          const double peak = *std::max_element(row, row + columns);
          double sum = 0.0;
          for (int64_t c = 0; c < columns; ++c) sum += std::exp(row[c] - peak);
          const double scale = normalized ? left[r] : 1.0, whole = normalized ? 1.0 : std::exp(peak) * sum / left[r];
          for (int64_t c = 0; c < width; ++c) {
            const int64_t place = r * width + c;
            const auto hit = std::find(places.begin(), places.end(), place) - places.begin();
            const double further = normalized ? 0.0 : std::exp(peak - 20.0);
            double expected = c < columns ? scale * std::exp(static_cast<double>(row[c])) : further;
            if (hit < 2) expected += whole * gained[hit];
            const double got = spec::load(out.data(), place), exact = std::log(expected);
            check(got == exact || std::fabs(got - exact) <= unit * (1.0 + std::fabs(exact)), what, columns);
            check(raised[place] == (hit < 2), what, columns);
          }
        }
      }
}

}  // namespace

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

void test_rows() {
  test_top_children<float>("top_children float32");
  test_top_children<uint16_t>("top_children bfloat16");
  test_best_candidates<float>("best_candidates float32");
  test_best_candidates<uint16_t>("best_candidates bfloat16");
  test_top_entropy<float>("top_entropy float32");
  test_top_entropy<uint16_t>("top_entropy bfloat16");
  test_mix_rows<float>("mix_rows float32");
  test_mix_rows<uint16_t>("mix_rows bfloat16");
}

}  // namespace spec_test
