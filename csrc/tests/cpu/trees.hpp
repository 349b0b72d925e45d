// A random tree behind a prompt, and the words that say who sees whom.
#pragma once

#include "tests/cpu/naive.hpp"

namespace cpu_test {

struct Tree {
  int64_t prompt = 0;  // slots before the tree
  std::vector<int64_t> parents, depths;

  Tree(int64_t prompt, int64_t nodes) : prompt(prompt) {
    for (int64_t i = 0; i < nodes; ++i) {
      parents.push_back(i == 0 ? -1 : std::max(below(i), below(i)));
      depths.push_back(i == 0 ? 0 : depths[static_cast<size_t>(parents.back())] + 1);
    }
  }

  int64_t nodes() const { return static_cast<int64_t>(parents.size()); }
  bool is_above(int64_t ancestor, int64_t node) const {  // or the node itself
    for (; node >= 0; node = parents[static_cast<size_t>(node)])
      if (node == ancestor) return true;
    return false;
  }
  std::vector<int64_t> positions() const {
    std::vector<int64_t> found;
    for (const int64_t depth : depths) found.push_back(prompt + depth);
    return found;
  }

  // Bit j of a node's words: it sees slot prefix + j.
  std::vector<uint64_t> seen(int64_t prefix) const {
    const int64_t words = words_from(prefix);
    std::vector<uint64_t> found(static_cast<size_t>(nodes() * words), 0);
    for (int64_t node = 0; node < nodes(); ++node)
      for (int64_t slot = prefix; slot < prompt + nodes(); ++slot)
        if (slot < prompt || is_above(slot - prompt, node))
          found[static_cast<size_t>(node * words + (slot - prefix) / 64)] |= uint64_t{1} << (slot - prefix) % 64;
    return found;
  }
  int64_t words_from(int64_t prefix) const { return (prompt + nodes() - prefix + 63) / 64; }

  // The prompt's rows, in their order, and the tree's.
  naive::Context context() const {
    naive::Context all;
    for (int64_t row = 0; row < prompt + nodes(); ++row) {
      const int64_t node = row - prompt;
      all.positions.push_back(node < 0 ? row : prompt + depths[static_cast<size_t>(node)]);
      all.sees.emplace_back();
      for (int64_t other = 0; other < prompt + nodes(); ++other)
        all.sees.back().push_back(other < prompt ? other <= row : node >= 0 && is_above(other - prompt, node));
    }
    return all;
  }

  // Nodes with all that is below one of them before the next of its siblings: what lies before a node's depth then are
  // the slots of its ancestors, where each node is decoded into the slot of its depth.
  std::vector<int64_t> depth_first() const {
    std::vector<int64_t> found;
    descend(0, found);
    return found;
  }

 private:
  void descend(int64_t node, std::vector<int64_t>& found) const {
    found.push_back(node);
    for (int64_t child = node + 1; child < nodes(); ++child)
      if (parents[static_cast<size_t>(child)] == node) descend(child, found);
  }
};

}  // namespace cpu_test
