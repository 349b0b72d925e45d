// DFlash2's convolution over the rows of a block, each by a kernel of its own, before and after a part of a layer.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/kernels.hpp"

namespace cpu {

// Channel c of a row becomes the sum over taps t of (base[t][c] + added[t][group of c]) times that channel t rows before, of
// rows of the block. The product adds to the kernels of both sides, of the rows before the part.
struct BlockConvolution {
  Matrix projection;            // [2][taps][groups] outputs; without panels there is no convolution
  const float* base = nullptr;  // [2][taps][channels]
  int64_t taps = 0, size = 1;   // size: channels of a group

  bool any() const { return projection.panels != 0; }

  // Sums of the channels of a tile from `first` on, `count` of them, to `out`, [count][16]. side: 0 before the part, 1 after.
  // rows: [tiles][channels][16]; added: the tile's, [outputs][16]; before: [16], how many rows of its block stand before each
  // row, below 0 where there is none; line: [taps + 15].
  void run(int64_t side, const float* rows, int64_t channels, const float* added, const int32_t* before, int64_t tile,
           int64_t first, int64_t count, float* line, float* out) const {
    const int64_t earlier = taps - 1, begin = tile * kRows - earlier, groups = projection.outputs / (2 * taps);
    std::fill_n(out, count * kRows, 0.0f);
    for (int64_t c = first; c < first + count; ++c, out += kRows) {
      for (int64_t i = std::max<int64_t>(-begin, 0); i < earlier; ++i)
        line[i] = rows[((begin + i) / kRows * channels + c) * kRows + (begin + i) % kRows];
      std::copy_n(rows + (tile * channels + c) * kRows, kRows, line + earlier);
      for (int32_t t = 0; t < taps; ++t) {
        const float kernel = base[(side * taps + t) * channels + c];
        const float* by = added + ((side * taps + t) * groups + c / size) * kRows;
        for (int64_t row = 0; row < kRows; ++row)
          if (before[row] >= t) out[row] += (kernel + by[row]) * line[earlier - t + row];
      }
    }
  }
};

}  // namespace cpu
