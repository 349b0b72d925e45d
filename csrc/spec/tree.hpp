// The draft tree as flat arrays: node 0 is the root, parents[i] < i.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "spec/scores.hpp"
#include "spec/tree_arrays.hpp"

namespace spec {

constexpr int64_t kWordBits = 64;

inline int64_t words_for(int64_t nodes) { return (nodes + kWordBits - 1) / kWordBits; }

// out: [nodes, words], words >= words_for(nodes); bit j of row i is set iff j is i or an ancestor of i.
// False where the root's parent is not -1 or another's is not an earlier node; out is undefined then.
inline bool ancestor_words(const int64_t* parents, int64_t nodes, int64_t words, uint64_t* out) {
  std::fill(out, out + nodes * words, uint64_t{0});
  for (int64_t node = 0; node < nodes; ++node) {
    const int64_t parent = parents[node];
    uint64_t* row = out + node * words;
    if (node == 0) {
      if (parent != -1) return false;
    } else {
      if (parent < 0 || parent >= node) return false;
      std::copy_n(out + parent * words, words, row);
    }
    row[node / kWordBits] |= uint64_t{1} << (node % kWordBits);
  }
  return true;
}

// Hangs `count` nodes into the tree, which has `size` and room for them. False where a parent is not among
// the first `size`, with nothing written.
inline bool append_nodes(const TreeArrays& tree, int64_t size, int64_t count, const int64_t* parents,
                         const int64_t* tokens, const float* log_probs) {
  for (int64_t i = 0; i < count; ++i)
    if (parents[i] < 0 || parents[i] >= size) return false;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t node = size + i, parent = parents[i];
    tree.tokens[node] = tokens[i];
    tree.parents[node] = parent;
    tree.depths[node] = tree.depths[parent] + 1;
    tree.log_probs[node] = log_probs[i];
    tree.path_log_probs[node] = tree.path_log_probs[parent] + log_probs[i];
    uint64_t* row = tree.ancestors + node * tree.words;
    std::copy_n(tree.ancestors + parent * tree.words, tree.words, row);
    row[node / kWordBits] |= uint64_t{1} << (node % kWordBits);
  }
  return true;
}

struct Children {
  std::vector<int64_t> parents, tokens;
  std::vector<float> log_probs;
};

// The first `most` entries of [rows, children], row by row, or of those that are chosen; chosen may be null.
inline Children chosen_children(const int64_t* nodes, int64_t rows, int64_t children, const int64_t* tokens,
                                const float* log_probs, const uint8_t* chosen, int64_t most) {
  Children found;
  const auto room = static_cast<size_t>(std::min(most, rows * children));
  found.parents.reserve(room);
  found.tokens.reserve(room);
  found.log_probs.reserve(room);
  for (int64_t i = 0; i < rows * children && found.parents.size() < room; ++i) {
    if (chosen && !chosen[i]) continue;
    found.parents.push_back(nodes[i / children]);
    found.tokens.push_back(tokens[i]);
    found.log_probs.push_back(log_probs[i]);
  }
  return found;
}

// The tree of `count` nodes alone, renumbered in their order; parents: [size]. Writes new_parents [room], -1 behind the
// nodes, and ancestors [room, words_for(room)], 0 there. False unless nodes ascend from the root and hold every node's
// parent; outputs are undefined then.
inline bool subtree(const int64_t* parents, int64_t size, const int64_t* nodes, int64_t count, int64_t room,
                    int64_t* new_parents, uint64_t* ancestors) {
  if (count < 1 || nodes[0] != 0 || nodes[count - 1] >= size) return false;
  new_parents[0] = -1;
  for (int64_t i = 1; i < count; ++i) {
    if (nodes[i] <= nodes[i - 1] || nodes[i] >= size) return false;
    const int64_t parent = parents[nodes[i]];
    const int64_t* found = std::lower_bound(nodes, nodes + i, parent);
    if (found == nodes + i || *found != parent) return false;
    new_parents[i] = found - nodes;
  }
  const int64_t words = words_for(room);
  std::fill(new_parents + count, new_parents + room, int64_t{-1});
  std::fill(ancestors + count * words, ancestors + room * words, uint64_t{0});
  return ancestor_words(new_parents, count, words, ancestors);
}

// The first `columns` bits of each word row as bytes of 0 or 1; out: [nodes, columns].
inline void tree_mask(const uint64_t* ancestors, int64_t nodes, int64_t words, int64_t columns, uint8_t* out) {
  for (int64_t node = 0; node < nodes; ++node)
    for (int64_t first = 0; first < columns; first += kWordBits) {
      const uint64_t word = ancestors[node * words + first / kWordBits];
      uint8_t* row = out + node * columns + first;
      const int64_t bits = std::min(kWordBits, columns - first);
      for (int64_t bit = 0; bit < bits; ++bit) row[bit] = static_cast<uint8_t>((word >> bit) & 1);
    }
}

// Ascending indices of the `count` best by (value descending, index ascending), -inf never; out has room for
// min(count, size). Returns how many, or -1 where a value is NaN.
inline int64_t select_best(const float* values, int64_t size, int64_t count, int64_t* out) {
  std::vector<Scored> scored;
  scored.reserve(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    if (std::isnan(values[i])) return -1;
    if (values[i] > kLowest) scored.push_back({values[i], i});
  }
  const int64_t kept = std::min<int64_t>(count, static_cast<int64_t>(scored.size()));
  if (kept < static_cast<int64_t>(scored.size()))
    std::nth_element(scored.begin(), scored.begin() + kept, scored.end(), better);
  for (int64_t i = 0; i < kept; ++i) out[i] = scored[static_cast<size_t>(i)].index;
  std::sort(out, out + kept);
  return kept;
}

// Node ids from the root down while a child carries the token chosen at its parent, into path; returns how many. A node
// whose choice is negative is not entered, nor is the root then. One pass is enough, as children come after their parents.
inline int64_t walk(const int64_t* tokens, const int64_t* parents, const int64_t* chosen, int64_t nodes,
                    int64_t* path) {
  if (nodes < 1 || chosen[0] < 0) return 0;
  path[0] = 0;
  int64_t count = 1;
  for (int64_t node = 1; node < nodes; ++node) {
    const int64_t last = path[count - 1];
    if (parents[node] == last && tokens[node] == chosen[last] && chosen[node] >= 0) path[count++] = node;
  }
  return count;
}

}  // namespace spec
