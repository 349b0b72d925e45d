// Key-value rows of the accepted path, moved to where the committed ones end.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace spec {

// Row prefix + path[j] becomes row prefix + j in each of `planes` planes of plane_bytes; path is ascending from 0,
// so no row is overwritten before it was read.
inline void compact_rows(char* slab, int64_t planes, int64_t plane_bytes, int64_t row_bytes, int64_t prefix,
                         const std::vector<int64_t>& path) {
  size_t first = 0;
  while (first < path.size() && path[first] == static_cast<int64_t>(first)) ++first;
  for (int64_t plane = 0; plane < planes; ++plane) {
    char* scratch = slab + plane * plane_bytes + prefix * row_bytes;
    for (size_t j = first; j < path.size(); ++j)
      std::memcpy(scratch + static_cast<int64_t>(j) * row_bytes, scratch + path[j] * row_bytes,
                  static_cast<size_t>(row_bytes));
  }
}

}  // namespace spec
