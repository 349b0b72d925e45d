// Trees: ancestors, masks, paths, subtrees and appended nodes, against what the parents say.
#include <algorithm>
#include <numeric>
#include <vector>

#include "spec/tree.hpp"
#include "tests/spec/common.hpp"

namespace spec_test {
namespace {

// With `padding` rows behind the nodes, of which nothing is read.
void test_subtree(const std::vector<int64_t>& parents, std::vector<int64_t> kept,
                  const std::vector<uint64_t>& ancestors, int64_t words, int64_t padding) {
  const auto nodes = static_cast<int64_t>(parents.size()), count = static_cast<int64_t>(kept.size());
  const int64_t room = count + padding, kept_words = spec::words_for(room);
  std::vector<int64_t> renumbered(static_cast<size_t>(room), 7);
  std::vector<uint64_t> rows(static_cast<size_t>(room * kept_words), ~uint64_t{0});
  const auto run = [&] {
    return spec::subtree(parents.data(), nodes, kept.data(), count, room, renumbered.data(), rows.data());
  };
  check(run(), "subtree accepts", nodes);
  for (int64_t i = 0; i < room; ++i) {
    const bool there = i < count;
    if (i == 0 || !there)
      check(renumbered[i] == -1, "subtree padding", nodes);
    else
      check(kept[renumbered[i]] == parents[kept[i]], "subtree parents", nodes);
    for (int64_t j = 0; j < kept_words * spec::kWordBits; ++j) {
      const bool bit = rows[i * kept_words + j / 64] >> (j % 64) & 1;
      const bool expected =
          there && j < count && (ancestors[kept[i] * words + kept[j] / 64] >> (kept[j] % 64) & 1);
      check(bit == expected, "subtree ancestors", nodes);
    }
  }
  const auto refuses = [&](int64_t place, int64_t node) {
    const int64_t before = kept[place];
    kept[place] = node;
    check(!run(), "subtree refuses", nodes);
    kept[place] = before;
  };
  refuses(0, 1);
  refuses(count - 1, nodes);
  refuses(count - 1, -1);
  check(!spec::subtree(parents.data(), nodes, kept.data(), 0, room, renumbered.data(), rows.data()), "no subtree", 0);
  if (count > 2) refuses(1, kept[2]);
}

// Appended in runs whose parents are there before them, against what the parents say.
void test_append_nodes(const std::vector<int64_t>& parents, const std::vector<uint64_t>& ancestors, int64_t words) {
  const auto nodes = static_cast<int64_t>(parents.size());
  std::vector<int64_t> tokens(parents.size(), 7), above(parents.size(), -1), depths(parents.size());
  std::vector<float> edges(parents.size()), paths(parents.size());
  std::vector<uint64_t> rows(static_cast<size_t>(nodes * words));
  rows[0] = 1;
  std::vector<int64_t> ids(parents.size());
  std::iota(ids.begin(), ids.end(), 100);
  const std::vector<float> log_probs(parents.size(), -0.5f);
  const spec::TreeArrays tree{tokens.data(), above.data(), depths.data(), edges.data(),
                              paths.data(),  rows.data(),  words};
  const auto append = [&](int64_t size, int64_t count, const int64_t* given) {
    return spec::append_nodes(tree, size, count, given, ids.data() + size, log_probs.data() + size);
  };
  for (int64_t size = 1, stop; size < nodes; size = stop) {
    for (stop = size + 1; stop < nodes && parents[stop] < size;) ++stop;
    check(append(size, stop - size, parents.data() + size), "append_nodes accepts", nodes);
    if (stop < nodes) {
      check(!append(size, stop + 1 - size, parents.data() + size), "append_nodes refuses its own", nodes);
      check(above[stop] == -1 && tokens[stop] == 7, "append_nodes writes nothing then", nodes);
    }
  }
  check(above == parents && rows == ancestors, "append_nodes", nodes);
  for (int64_t i = 1; i < nodes; ++i) {
    check(tokens[i] == ids[i] && edges[i] == -0.5f, "append_nodes values", nodes);
    check(depths[i] == depths[parents[i]] + 1 && paths[i] == -0.5f * static_cast<float>(depths[i]), "depths", nodes);
  }
  if (nodes == 1) return;
  for (const int64_t wrong : {int64_t{-1}, nodes - 1})
    check(!append(nodes - 1, 1, &wrong) && above == parents, "append_nodes refuses", nodes);
}

}  // namespace

void test_tree() {
  for (const int64_t nodes : {1, 2, 63, 64, 65, 128, 129, 256}) {
    std::vector<int64_t> parents(static_cast<size_t>(nodes), -1);
    for (int64_t i = 1; i < nodes; ++i) parents[i] = below(i);
    const int64_t words = spec::words_for(nodes);
    std::vector<uint64_t> ancestors(static_cast<size_t>(nodes * words), ~uint64_t{0});
    check(spec::ancestor_words(parents.data(), nodes, words, ancestors.data()), "ancestor_words accepts", nodes);
    test_append_nodes(parents, ancestors, words);
    std::vector<uint8_t> mask(static_cast<size_t>(nodes * nodes), 7);
    spec::tree_mask(ancestors.data(), nodes, words, nodes, mask.data());
    for (int64_t node = 0; node < nodes; ++node) {
      std::vector<uint8_t> row(static_cast<size_t>(nodes), 0);
      for (int64_t up = node; up >= 0; up = parents[up]) row[up] = 1;
      check(std::equal(row.begin(), row.end(), mask.begin() + node * nodes), "ancestors", nodes);
    }

    std::vector<int64_t> tokens(static_cast<size_t>(nodes)), chosen(static_cast<size_t>(nodes));
    std::iota(tokens.begin(), tokens.end(), 100);
    std::vector<int64_t> expected;
    for (int64_t node = below(nodes); node >= 0; node = parents[node]) expected.insert(expected.begin(), node);
    for (size_t j = 1; j < expected.size(); ++j) chosen[expected[j - 1]] = tokens[expected[j]];
    std::vector<int64_t> path(static_cast<size_t>(nodes));
    path.resize(static_cast<size_t>(spec::walk(tokens.data(), parents.data(), chosen.data(), nodes, path.data())));
    check(path == expected, "walk", nodes);

    std::vector<int64_t> kept;
    for (int64_t node = 0; node < nodes; ++node)
      if (node == 0 || (below(3) != 0 && std::count(kept.begin(), kept.end(), parents[node]))) kept.push_back(node);
    for (const int64_t padding : {0, 1, 70}) test_subtree(parents, kept, ancestors, words, padding);

    parents.back() = nodes;
    check(!spec::ancestor_words(parents.data(), nodes, words, ancestors.data()), "ancestor_words refuses", nodes);
  }
}

}  // namespace spec_test
