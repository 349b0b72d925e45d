// The worth of a search against its costs; see specengine/ops/worth.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "spec/lowest.hpp"
#include "spec/tree.hpp"

namespace spec {

constexpr double kWorth = 1e-9;  // tokens: by so little rounding can make equal values differ
constexpr float kOdds = 7.0f;    // the greatest log-odds that a table of chances tells apart
constexpr int64_t kRelations = 6;  // see specengine/ops/worth.py
constexpr int64_t kSources = 8, kDepths = 4, kRanks = 5, kKnots = 15, kPlaces = 10, kLevels = 8;
constexpr float kMinChance = 1e-4f, kMaxChance = 0.999f;    // chances
constexpr float kWindow = 150.0f, kPasses = 60.0f;  // tries that a knot remembers, nodes that a level of a profile does

// Where on the knots of a table a log-probability stands: `part` of the way from knot `low` to the next.
struct Knot {
  int64_t low;
  float part;
};

inline Knot knot_of(float log_prob, int64_t knots) {
  const float odds = log_prob - std::log(-std::expm1(log_prob));  // NaN above 0, as far as rounding takes a certain one
  const float shown = odds < kOdds ? std::max(odds, -kOdds) : kOdds;
  const float at = (shown + kOdds) * (static_cast<float>(knots - 1) / (2 * kOdds));
  const int64_t low = std::min(static_cast<int64_t>(at), knots - 2);
  return {low, at - static_cast<float>(low)};
}

// The log-chance of a stated log-probability by its cell's row of a table.
inline float log_chance(float stated, const float* row, int64_t knots) {
  if (!(stated > kLowest)) return stated;
  const Knot at = knot_of(stated, knots);
  return std::log(row[at.low] + at.part * (row[at.low + 1] - row[at.low]));
}

// The cell of a node, by group, source, depth and place among its siblings.
inline int64_t cell_of(int64_t group, int64_t source, int64_t depth, int64_t place) {
  const int64_t deep = std::clamp<int64_t>(depth - 1, 0, kDepths - 1);
  return ((group * kSources + source) * kDepths + deep) * kRanks + std::min(place - (place > 3), kRanks - 1);
}

// The level, in a profile of `levels` levels, of a node whose edge has this chance, 0 to 1; the root has level 0.
inline int64_t level_of(float chance, int64_t levels) {
  if (levels < 2) return 0;
  const float at = chance * static_cast<float>(levels - 1);
  return !(at > 0) ? 1 : at < static_cast<float>(levels - 2) ? static_cast<int64_t>(at) + 1 : levels - 1;
}

// [cells, kKnots] x 3, [kLevels, kPlaces], [kLevels], [kLevels, kPlaces]; outcomes of drafted tokens.
struct OutcomeCounts {
  float *hits, *tries, *table, *gains, *passes, *profile;
  int64_t group;
};

// By node, and in the entry behind the last one what padding writes.
struct SearchNotes {
  float* stated;
  int64_t *cells, *places;
  bool *waiting, *drafted;
};

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

inline void forget_and_divide(const OutcomeCounts& counts, int64_t knot) {
  const float kept = std::min(kWindow / counts.tries[knot], 1.0f);
  counts.tries[knot] *= kept;
  counts.hits[knot] *= kept;
  counts.table[knot] = std::clamp(counts.hits[knot] / counts.tries[knot], kMinChance, kMaxChance);
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
  for (int64_t row = 0; row < kLevels; ++row) {
    const float kept = std::min(kPasses / counts.passes[row], 1.0f);
    counts.passes[row] *= kept;
    for (int64_t at = row * kPlaces; at < (row + 1) * kPlaces; ++at) {
      counts.gains[at] *= kept;
      counts.profile[at] = counts.gains[at] / counts.passes[row];
    }
  }
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
  if (first != worth.end()) taken.resize(static_cast<size_t>(first - worth.begin()) + 1);  // else there is NaN
  std::sort(taken.begin(), taken.end());
  return taken;
}

// [verified] and [drafted] seconds and prices; recent: tokens, seconds.
struct Throughput {
  const float *verify, *draft;
  float *verify_price, *draft_price, *recent;
  int64_t verified, drafted;
};

// Enters a cycle, if one token or more was committed, and prices seconds at the rate of recent cycles.
inline void update_throughput(const Throughput& throughput, int64_t committed, float took, float memory) {
  if (committed > 0) {
    throughput.recent[0] = throughput.recent[0] * memory + static_cast<float>(committed);
    throughput.recent[1] = throughput.recent[1] * memory + took;
  }
  const float rate = std::max(throughput.recent[0] / throughput.recent[1], 1 / throughput.verify[1]);
  for (int64_t n = 0; n < throughput.verified; ++n) throughput.verify_price[n] = throughput.verify[n] * rate;
  for (int64_t n = 0; n < throughput.drafted; ++n) throughput.draft_price[n] = throughput.draft[n] * rate;
}

struct SearchPrices {
  const float *verify, *draft;  // [nodes + 1], [width + 1]
  int64_t nodes, width;
  const int64_t* widths;  // of passes that are thought of, ascending
  int64_t tried;
};

struct Profile {
  const float* chances;  // [levels, places], best first
  int64_t levels, places;

  const float* at(int64_t level) const { return chances + level * places; }
};

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
