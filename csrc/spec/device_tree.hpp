// The draft tree in device memory: appending nodes, and the walk. Each function is what a lane does between two
// barriers.
#pragma once

#include <cstdint>

#include "spec/scores.hpp"

namespace spec {

constexpr int kMostWalked = 1024;  // nodes of a verified tree
constexpr int32_t kNoChild = INT32_MAX;

// The arrays of TokenTree: [capacity], ancestors [capacity, words].
struct DeviceTree {
  int64_t *tokens, *parents, *depths;
  float *log_probs, *path_log_probs;
  uint64_t* ancestors;
  int32_t* size;
  int capacity, words;
};

// What hangs under nodes that the tree has already.
struct NewNodes {
  const int64_t *parents, *tokens;
  const float* log_probs;
  int count;
};

// Those of the new nodes to draft from, padded to `width` with node 0 and a score of -inf.
struct Frontier {
  const int64_t* expand;  // indices into the new nodes
  int expanded, width;
  int64_t *nodes, *depths;
  float* scores;  // path log-probabilities
};

SPEC_HD inline void append_nodes(const DeviceTree& tree, const NewNodes& made, int start, int lane, int lanes) {
  for (int i = lane; i < made.count; i += lanes) {
    const int64_t parent = made.parents[i];
    tree.tokens[start + i] = made.tokens[i];
    tree.parents[start + i] = parent;
    tree.depths[start + i] = tree.depths[parent] + 1;
    tree.log_probs[start + i] = made.log_probs[i];
    tree.path_log_probs[start + i] = tree.path_log_probs[parent] + made.log_probs[i];
  }
  for (int i = lane; i < made.count * tree.words; i += lanes) {
    const int node = start + i / tree.words, word = i % tree.words;
    const uint64_t own = node / 64 == word ? uint64_t{1} << (node % 64) : 0;
    tree.ancestors[static_cast<int64_t>(node) * tree.words + word] =
        tree.ancestors[made.parents[i / tree.words] * tree.words + word] | own;
  }
}

// After a barrier behind append_nodes.
SPEC_HD inline void write_frontier(const DeviceTree& tree, const Frontier& frontier, int start, int lane, int lanes) {
  for (int i = lane; i < frontier.width; i += lanes) {
    const bool live = i < frontier.expanded;
    const int64_t node = live ? start + frontier.expand[i] : 0;
    frontier.nodes[i] = node;
    frontier.depths[i] = tree.depths[node];
    frontier.scores[i] = live ? tree.path_log_probs[node] : kLowest;
  }
}

// ---- the walk

SPEC_HD inline bool is_chosen(const int64_t* tokens, const int64_t* parents, const int64_t* chosen, int node) {
  const int64_t parent = parents[node];
  return parent >= 0 && parent < node && tokens[node] == chosen[parent];
}

// From the root down along the chosen child of each node, kNoChild where none is; returns the length of the path.
SPEC_HD inline int follow(const int32_t* chosen_child, int64_t* path) {
  int count = 0;
  for (int32_t node = 0; node != kNoChild; node = chosen_child[node]) path[count++] = node;
  return count;
}

}  // namespace spec
