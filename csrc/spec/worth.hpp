// The worth of a search against its costs; see specengine/ops/worth.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "spec/outcomes.hpp"
#include "spec/tree.hpp"

namespace spec {

constexpr int64_t kRelations = 6;  // see specengine/ops/worth.py

struct LikelyChild {
  float path, edge;
  int64_t entry, cell;
};

// The `most` likeliest children, in the order of their entries; tokens, stated, sources: [rows, places] of `nodes`.
inline std::vector<LikelyChild> likely_children(const TreeArrays& tree, const int64_t* nodes, int64_t rows,
                                                int64_t places, const float* stated, const uint8_t* sources,
                                                const OutcomeCounts& counts, double least, int64_t most) {
  std::vector<LikelyChild> found;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t place = 0; place < places; ++place) {
      const int64_t entry = row * places + place, depth = tree.depths[nodes[row]] + 1;
      const int64_t cell = cell_of(counts.group, sources ? sources[entry] : 0, depth, place);
      const float edge = log_chance(stated[entry], counts.table + cell * kKnots, kKnots);
      const float path = tree.path_log_probs[nodes[row]] + edge;
      if (path > kLowest && static_cast<double>(path) >= least) found.push_back({path, edge, entry, cell});
    }
  if (const auto kept = static_cast<size_t>(most); found.size() > kept) {
    std::nth_element(found.begin(), found.begin() + most, found.end(), [](const LikelyChild& a, const LikelyChild& b) {
      return a.path > b.path || (a.path == b.path && a.entry < b.entry);
    });
    found.resize(kept);
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.entry < b.entry; });
  }
  return found;
}

inline void count_outcome(const OutcomeCounts& counts, int64_t cell, const Knot& at, bool hit) {
  for (int64_t side = 0; side < 2; ++side) {
    const int64_t knot = cell * kKnots + at.low + side;
    const float weight = side ? at.part : 1 - at.part;
    counts.tries[knot] += weight;
    if (hit) counts.hits[knot] += weight;
  }
}

// The target went down `path` through a tree of `size` nodes, choosing a token after each node.
inline void count_outcomes(const TreeArrays& tree, int64_t size, const int64_t* path, const int64_t* chosen,
                           int64_t length, const OutcomeCounts& counts, const SearchNotes& notes) {
  std::vector<int64_t> wanted(static_cast<size_t>(size), -1);
  for (int64_t i = 0; i < length; ++i) wanted[static_cast<size_t>(path[i])] = chosen[i];
  std::vector<int64_t> touched;
  for (int64_t node = 1; node < size; ++node) {
    const int64_t target = wanted[static_cast<size_t>(tree.parents[node])];
    if (target < 0) continue;
    const Knot at = knot_of(notes.stated[node], kKnots);
    count_outcome(counts, notes.cells[node], at, target == tree.tokens[node]);
    for (int64_t side = 0; side < 2; ++side) touched.push_back(notes.cells[node] * kKnots + at.low + side);
  }
  for (const int64_t knot : touched) forget_and_divide(counts, knot);
  const auto level = [&](int64_t node) { return node ? level_of(std::exp(tree.log_probs[node]), kLevels) : 0; };
  for (int64_t node = 0; node < size; ++node) {
    if (notes.drafted[node]) counts.passes[level(node)] += 1;
    if (node == 0 || !notes.drafted[tree.parents[node]]) continue;
    counts.gains[level(tree.parents[node]) * kPlaces + notes.places[node]] += std::exp(tree.log_probs[node]);
  }
  for (int64_t row = 0; row < kLevels; ++row) forget_and_divide_level(counts, row);
}

// For how many of the likeliest nodes the summed chances exceed their price, [nodes + 1], the most; at least 1.
inline int64_t worth_most(const float* paths, int64_t size, const float* price, int64_t most) {
  std::vector<float> best(paths, paths + size);
  const auto considered = std::min(most, size);
  std::partial_sort(best.begin(), best.begin() + considered, best.end(), std::greater<float>());
  std::vector<double> worth;
  double sum = 0;
  for (int64_t n = 0; n < considered && best[static_cast<size_t>(n)] > kLowest; ++n)
    worth.push_back((sum += std::exp(static_cast<double>(best[static_cast<size_t>(n)]))) - price[n + 1]);
  if (worth.empty()) return 1;
  const double least = *std::max_element(worth.begin(), worth.end()) - kWorth;
  return 1 + (std::find_if(worth.begin(), worth.end(), [&](double value) { return value >= least; }) - worth.begin());
}

// The relation of a node below the root to those before it; later: whether a sibling is among them.
inline int64_t relation_of(int64_t depth, bool later) { return 2 * std::clamp<int64_t>(depth, 1, kRelations / 2) - 2 + later; }

// The price of a row's experts, what share of all experts these are, and how much of them is new, by a node's relation over
// the share that no node before it has read: [kRelations].
struct ExpertPrices {
  double price, share;
  const float* ratios;

  double added(int64_t relation, double read) const {
    return std::min(1.0, static_cast<double>(ratios[relation]) * (1.0 - read));
  }
  int64_t least() const { return std::min_element(ratios, ratios + kRelations) - ratios; }
};

// The nodes that are worth verifying, ascending, at most `most`. price, [nodes + 1]: of so many whose relation is the least.
inline std::vector<int64_t> related_worth(const TreeArrays& tree, int64_t size, const float* price,
                                          const ExpertPrices& experts, int64_t most) {
  const auto chance = [&](int64_t node) { return std::exp(static_cast<double>(tree.path_log_probs[node])); };
  std::vector<bool> later(static_cast<size_t>(size));  // by parent: whether a child is taken
  std::vector<int64_t> taken{0}, waiting;
  const auto wait = [&](int64_t parent) {
    for (int64_t node = parent + 1; node < size; ++node)
      if (tree.parents[node] == parent) waiting.push_back(node);
  };
  const int64_t cheapest = experts.least();
  double sum = chance(0), read = experts.share, least = read;
  std::vector<double> worth{sum - price[1]};
  wait(0);
  while (!waiting.empty() && static_cast<int64_t>(taken.size()) < most) {
    const double usual = experts.added(cheapest, least);
    const auto added = [&](int64_t node) {
      return experts.added(relation_of(tree.depths[node], later[static_cast<size_t>(tree.parents[node])]), read);
    };
    const auto value = [&](int64_t node) { return chance(node) - experts.price * (added(node) - usual); };
    auto best = waiting.begin();
    double gain = value(*best);
    for (auto other = best + 1; other != waiting.end(); ++other)
      if (const double its = value(*other); its > gain || (its == gain && *other < *best)) best = other, gain = its;
    const int64_t node = *best;
    read += experts.share * added(node);
    least += experts.share * usual;
    waiting.erase(best);
    later[static_cast<size_t>(tree.parents[node])] = true;
    taken.push_back(node);
    wait(node);
    worth.push_back((sum += gain) - price[taken.size()]);
  }
  const double enough = *std::max_element(worth.begin(), worth.end()) - kWorth;
  const auto first = std::find_if(worth.begin(), worth.end(), [&](double one) { return one >= enough; });
  taken.resize(first == worth.end() ? 1 : static_cast<size_t>(first - worth.begin()) + 1);  // none is, of NaN
  std::sort(taken.begin(), taken.end());
  return taken;
}

// Enters a cycle, if one token or more was committed, and prices seconds at the rate of recent cycles.
inline void update_throughput(const Throughput& throughput, int64_t committed, float took, float memory) {
  enter_cycle(throughput, committed, took, memory);
  const float rate = rate_of(throughput);
  for (int64_t n = 0; n < throughput.verified; ++n) throughput.verify_price[n] = throughput.verify[n] * rate;
  for (int64_t n = 0; n < throughput.drafted; ++n) throughput.draft_price[n] = throughput.draft[n] * rate;
}

struct WaitingNode {
  double chance;
  int64_t level, id;
};

// A tree as a search plays it on: the chances of its likeliest nodes, descending, and the nodes to draft from.
class PlayedTree {
 public:
  PlayedTree(const SearchPrices& prices) : prices_(prices) {}

  void add(double chance) { chances_.push_back(chance); }
  void wait(const WaitingNode& node) { waiting_.push_back(node); }

  // Keeps what counts: as many chances as can be verified, and nodes as can be drafted from in so many passes.
  void settle(int64_t passes) {
    keep_best(chances_, 0, prices_.nodes, std::greater<double>());
    keep_best(waiting_, 0, prices_.width * passes, is_before);
  }

  double value() const {
    double sum = 0, best = kLowest;
    for (size_t n = 0; n < chances_.size() && chances_[n] > 0; ++n)
      best = std::max(best, (sum += chances_[n]) - prices_.verify[n + 1]);
    return best;
  }

  int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }
  const WaitingNode& next(int64_t i) const { return waiting_[static_cast<size_t>(i)]; }

  // A pass from the likeliest `width` nodes; `left` passes may follow.
  void play(int64_t width, const Profile& profile, int64_t left, int64_t* ids) {
    const auto drawn = std::min(width, waiting());
    const std::vector<WaitingNode> nodes(waiting_.begin(), waiting_.begin() + drawn);
    waiting_.erase(waiting_.begin(), waiting_.begin() + drawn);
    const size_t known = chances_.size(), left_over = waiting_.size();
    for (const WaitingNode& node : nodes) {
      const float* children = profile.at(node.level);
      for (int64_t place = 0; place < profile.places; ++place, ++*ids) {
        const double chance = node.chance * children[place];
        if (!(chance > 0)) continue;
        chances_.push_back(chance);
        if (left) waiting_.push_back({chance, level_of(children[place], profile.levels), *ids});
      }
    }
    keep_best(chances_, known, prices_.nodes, std::greater<double>());
    if (left) keep_best(waiting_, left_over, prices_.width * left, is_before);
  }

 private:
  static bool is_before(const WaitingNode& a, const WaitingNode& b) {
    return a.chance > b.chance || (a.chance == b.chance && a.id < b.id);
  }

  // Sorts and keeps the `most` first; the `known` first ones are sorted already.
  template <typename T, typename Order>
  static void keep_best(std::vector<T>& values, size_t known, int64_t most, Order order) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(known);
    std::sort(middle, values.end(), order);
    std::inplace_merge(values.begin(), middle, values.end(), order);
    values.resize(std::min(values.size(), static_cast<size_t>(most)));
  }

  SearchPrices prices_;
  std::vector<double> chances_;
  std::vector<WaitingNode> waiting_;
};

// The worth of a tree after the best number of passes from `width` nodes, 1 to `rounds`, less their cost.
inline double promise(PlayedTree tree, int64_t width, const Profile& profile, const SearchPrices& prices, int64_t rounds,
                      int64_t size) {
  double best = kLowest, spent = 0;
  for (int64_t left = rounds - 1; left >= 0; --left) {
    spent += prices.draft[std::min(width, tree.waiting())];
    tree.play(width, profile, left, &size);
    best = std::max(best, tree.value() - spent);
  }
  return best;
}

// The first pass of the best way to go on, ids ascending; empty where none pays.
inline std::vector<int64_t> next_pass(const float* paths, const float* edges, const bool* waiting, int64_t size,
                                      const Profile& profile, const SearchPrices& prices, int64_t rounds) {
  PlayedTree tree(prices);
  for (int64_t i = 0; i < size; ++i) {
    const double chance = std::exp(static_cast<double>(paths[i]));
    if (chance > 0) tree.add(chance);
    if (waiting[i]) tree.wait({chance, i ? level_of(std::exp(edges[i]), profile.levels) : 0, i});
  }
  tree.settle(rounds);
  std::vector<double> values;
  for (int64_t i = 0; i < prices.tried; ++i) values.push_back(promise(tree, prices.widths[i], profile, prices, rounds, size));
  const double best = *std::max_element(values.begin(), values.end());
  int64_t taken = 0;
  if (best > tree.value() + kWorth)
    taken = prices.widths[std::find_if(values.begin(), values.end(), [&](double value) { return value >= best - kWorth; }) -
                          values.begin()];
  std::vector<int64_t> found;
  for (int64_t i = 0; i < std::min(taken, tree.waiting()); ++i) found.push_back(tree.next(i).id);
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace spec
