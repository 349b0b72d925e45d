// Mixing a few further probabilities into rows of logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "spec/scores.hpp"
#include "spec/top_children.hpp"

namespace spec {

// log(exp(a) + exp(b))
inline double log_add(double a, double b) {
  const double high = std::max(a, b), low = std::min(a, b);
  return low > kLowest ? high + std::log1p(std::exp(low - high)) : high;
}

// Copies rows into wider ones, and adds probabilities to some columns of rows of which the share `left`, (0, 1], stays.
// logits: [rows, columns], T and row_stride as in top_children; log-probabilities where `normalized`. out, [rows,
// columns + more]: the same; the further columns are `faint` below the row's best, or -inf where `normalized`.
// places: of `out`, distinct; raised: as `out`, where these become 1, or null.
template <typename T>
void mix_rows(const T* logits, int64_t rows, int64_t columns, int64_t row_stride, int64_t more, bool normalized,
              float faint, const std::vector<double>& left, const std::vector<int64_t>& places,
              const std::vector<double>& probabilities, T* out, uint8_t* raised) {
  const int64_t width = columns + more;
  std::vector<float> maxima(static_cast<size_t>((columns + kBlock - 1) / kBlock));
  std::vector<double> levels(static_cast<size_t>(rows), 0.0);
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = logits + r * row_stride;
    T* wide = out + r * width;
    std::copy_n(row, columns, wide);
    const bool mixed = left[r] < 1.0;
    float peak = kLowest, log_sum = 0.0f;
    if (normalized) {
      const auto scale = static_cast<float>(std::log(left[r]));
      for (int64_t c = 0; mixed && c < columns; ++c) store(wide + c, load(row, c) + scale);
    } else if (mixed || more) {
      row_pass_clones(row, columns, mixed, maxima.data(), &peak, &log_sum);
      levels[r] = static_cast<double>(peak) + log_sum - std::log(left[r]);
    }
    for (int64_t c = columns; c < width; ++c) store(wide + c, normalized ? kLowest : peak + faint);
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const int64_t place = places[i];
    const double added = levels[place / width] + std::log(probabilities[i]);
    store(out + place, static_cast<float>(log_add(load(out, place), added)));
    if (raised) raised[place] = 1;
  }
}

}  // namespace spec
