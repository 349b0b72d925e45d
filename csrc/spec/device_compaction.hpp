// Moving the key-value rows of the accepted path, one column of all rows per lane: no lane reads what another writes.
#pragma once

#include <cstdint>

#include "spec/vector.hpp"

namespace spec {

constexpr int kRowsInFlight = 8;  // read before the first of them is written

// column: the same piece of every row from the prefix on, `stride` pieces apart. Piece path[j] becomes piece j. The
// path ascends from 0, so path[j] >= j and no piece is overwritten before it was read.
template <typename Piece>
SPEC_HD inline void move_column(Piece* column, int64_t stride, const int64_t* path, int count) {
  for (int first = 0; first < count; first += kRowsInFlight) {
    Piece held[kRowsInFlight];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int j = 0; j < kRowsInFlight; ++j)
      if (first + j < count && path[first + j] != first + j) held[j] = column[path[first + j] * stride];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int j = 0; j < kRowsInFlight; ++j)
      if (first + j < count && path[first + j] != first + j) column[(first + j) * stride] = held[j];
  }
}

}  // namespace spec
