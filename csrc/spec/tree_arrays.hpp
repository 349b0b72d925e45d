// A tree's arrays, for the host and for a device.
#pragma once

#include <cstdint>

namespace spec {

// Of fixed capacity: [capacity] each, ancestors [capacity, words].
struct TreeArrays {
  int64_t *tokens, *parents, *depths;
  float *log_probs, *path_log_probs;  // of the edge to a node; their sum from the root
  uint64_t* ancestors;
  int64_t words;
};

}  // namespace spec
