// Key-value rows of the accepted path, moved to where the committed ones end.
#pragma once

#include <cstdint>
#include <cstring>

namespace spec {

// Row prefix + path[j] becomes row prefix + j in each of `planes` planes of `capacity` rows. False, and nothing is moved,
// unless path ascends from 0 within the capacity; so no row is overwritten before it was read.
inline bool compact_rows(char* slab, int64_t planes, int64_t capacity, int64_t row_bytes, int64_t prefix,
                         const int64_t* path, int64_t count) {
  if (count > 0 && (path[0] != 0 || prefix < 0 || path[count - 1] >= capacity - prefix)) return false;
  for (int64_t j = 1; j < count; ++j)
    if (path[j] <= path[j - 1]) return false;
  if (row_bytes == 0) return true;
  int64_t first = 0;
  while (first < count && path[first] == first) ++first;
  for (int64_t plane = 0; plane < planes; ++plane) {
    char* scratch = slab + (plane * capacity + prefix) * row_bytes;
    for (int64_t j = first; j < count; ++j)
      std::memcpy(scratch + j * row_bytes, scratch + path[j] * row_bytes, static_cast<size_t>(row_bytes));
  }
  return true;
}

}  // namespace spec
