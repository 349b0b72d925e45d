// The noise of a draw in float32: for drafts, which guess what a target will draw, and may be a little off.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "spec/gumbel.hpp"
#include "spec/philox.hpp"
#include "spec/vector.hpp"

namespace spec {

// ln of a positive normal float: x = 2^e m with m from 2/3 to 4/3, and ln m = 2 artanh((m - 1) / (m + 1)).
SPEC_INLINE float quick_log(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t exponent = (bits - 0x3f2aaaab) >> 23;
  bits -= exponent * (1 << 23);
  float m;
  std::memcpy(&m, &bits, sizeof m);
  const float s = (m - 1.0f) / (m + 1.0f), q = s * s;
  const float series = 1.0f + q * (1.0f / 3 + q * (1.0f / 5 + q * (1.0f / 7 + q * (1.0f / 9))));
  return static_cast<float>(exponent) * 0.693147181f + 2.0f * s * series;
}

// -log(-log(u)), u = (word + 0.5) / 2^32, of `kCount` words. Where u is so near to 1 that a float has no digits left of
// the distance, -log(u) comes from that distance. In loops without branches, which compilers turn into vectors.
template <int kCount>
SPEC_INLINE void quick_gumbel(const uint32_t (&words)[kCount], float (&out)[kCount]) {
  float near_one[kCount], rest[kCount];
  for (int i = 0; i < kCount; ++i) {
    rest[i] = (static_cast<float>(~words[i]) + 0.5f) * 0x1p-32f;
    near_one[i] = rest[i] * (1.0f + rest[i] * (0.5f + rest[i] * (1.0f / 3)));
    out[i] = -quick_log((static_cast<float>(words[i]) + 0.5f) * 0x1p-32f);
  }
  for (int i = 0; i < kCount; ++i) out[i] = rest[i] < 0.00390625f ? near_one[i] : out[i];
  for (int i = 0; i < kCount; ++i) out[i] = -quick_log(out[i]);
}

// Draw the noise of the 256 tokens from `first_counter` on.
SPEC_CLONES inline void gumbel_block(uint32_t first_counter, uint64_t position, PhiloxKey key, float* out) {
  constexpr int kCounters = kNoiseBlock / 4;
  uint32_t words[4][kCounters];
  for (int i = 0; i < kCounters; ++i) {
    words[0][i] = first_counter + static_cast<uint32_t>(i);
    words[1][i] = static_cast<uint32_t>(position);
    words[2][i] = static_cast<uint32_t>(position >> 32);
    words[3][i] = 0;
  }
  philox(words, key);
  float noise[4][kCounters];
  for (int word = 0; word < 4; ++word) quick_gumbel(words[word], noise[word]);
  for (int i = 0; i < kCounters; ++i)
    for (int word = 0; word < 4; ++word) out[4 * i + word] = noise[word][i];
}

// The noise of whole vocabularies at the positions asked for last: a position is drafted for in several cycles, and by
// several rows of each.
class NoiseRows {
 public:
  // The noise of the tokens below `count`.
  const float* at(uint64_t seed, uint64_t position, int64_t count) {
    Row* row = find(seed, position);
    if (static_cast<int64_t>(row->noise.size()) < count) fill(*row, count);
    return row->noise.data();
  }

 private:
  struct Row {
    uint64_t seed = 0, position = 0;
    std::vector<float> noise;
  };
  static constexpr size_t kRows = 32;

  Row* find(uint64_t seed, uint64_t position) {
    for (Row& row : rows_)
      if (row.seed == seed && row.position == position && !row.noise.empty()) return &row;
    if (rows_.size() < kRows) {
      rows_.emplace_back();
      oldest_ = rows_.size() - 1;
    }
    Row& row = rows_[oldest_];
    oldest_ = (oldest_ + 1) % kRows;
    row.seed = seed, row.position = position;
    row.noise.clear();
    return &row;
  }

  static void fill(Row& row, int64_t count) {
    const int64_t blocks = (count + kNoiseBlock - 1) / kNoiseBlock;
    row.noise.resize(static_cast<size_t>(blocks * kNoiseBlock));
    const PhiloxKey key{static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)};
    for (int64_t block = 0; block < blocks; ++block)
      gumbel_block(static_cast<uint32_t>(block * kNoiseBlock / 4), row.position, key,
                   row.noise.data() + block * kNoiseBlock);
  }

  std::vector<Row> rows_;
  size_t oldest_ = 0;
};

// out = logits + scale * noise of (seed, position of the row, token of the column); ids: the columns' tokens, null where
// they are the tokens themselves. Rows of equal positions that stand side by side share what is gathered.
inline void couple(const float* logits, int64_t rows, int64_t columns, int64_t stride, const int64_t* ids,
                   const int64_t* positions, uint64_t seed, float scale, float* out) {
  thread_local NoiseRows known;
  std::vector<float> gathered(ids ? static_cast<size_t>(columns) : 0);
  const int64_t count = ids ? 1 + *std::max_element(ids, ids + columns) : columns;
  const float* noise = nullptr;
  for (int64_t row = 0; row < rows; ++row) {
    if (row == 0 || positions[row] != positions[row - 1]) {
      noise = known.at(seed, static_cast<uint64_t>(positions[row]), count);
      if (ids) {
        for (int64_t column = 0; column < columns; ++column) gathered[column] = noise[ids[column]];
        noise = gathered.data();
      }
    }
    const float* from = logits + row * stride;
    float* into = out + row * columns;
    for (int64_t column = 0; column < columns; ++column) into[column] = from[column] + scale * noise[column];
  }
}

}  // namespace spec
