// What a search promises against what it costs; see specengine/ops/worth.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "spec/lowest.hpp"

namespace spec {

constexpr float kOdds = 7.0f;      // the greatest log-odds that a table of chances tells apart
constexpr double kWorth = 1e-9;    // tokens: by so little rounding can make equal values differ

// Log-chances by a table [cells, knots], linear between its knots.
inline void chances(const float* log_probs, const int64_t* cells, int64_t count, const float* table, int64_t knots,
                    float* out) {
  const float steps = static_cast<float>(knots - 1) / (2 * kOdds);
  for (int64_t i = 0; i < count; ++i) {
    if (!(log_probs[i] > kLowest)) {
      out[i] = log_probs[i];
      continue;
    }
    const float odds = log_probs[i] - std::log1p(-std::exp(log_probs[i]));
    const float at = (std::clamp(odds, -kOdds, kOdds) + kOdds) * steps;
    const int64_t low = std::min(static_cast<int64_t>(at), knots - 2);
    const float *row = table + cells[i] * knots + low, part = at - static_cast<float>(low);
    out[i] = std::log(row[0] + part * (row[1] - row[0]));
  }
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

  const float* at(int64_t depth) const { return chances + std::clamp<int64_t>(depth, 0, levels - 1) * places; }
};

struct WaitingNode {
  double chance;
  int64_t depth, id;
};

// A tree as a search plays it on: the chances of its likeliest nodes, descending, and the nodes to draft from.
class PlayedTree {
 public:
  PlayedTree(const SearchPrices& prices) : prices_(prices) {}

  void add(double chance) { chances_.push_back(chance); }
  void wait(const WaitingNode& node) { waiting_.push_back(node); }

  // Keeps what counts: as many chances as can be verified, and nodes as can be drafted from in so many passes.
  void settle(int64_t passes) {
    keep_best(chances_, prices_.nodes, std::greater<double>());
    keep_best(waiting_, prices_.width * passes, [](const WaitingNode& a, const WaitingNode& b) {
      return a.chance > b.chance || (a.chance == b.chance && a.id < b.id);
    });
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
    for (const WaitingNode& node : nodes) {
      const float* children = profile.at(node.depth);
      for (int64_t place = 0; place < profile.places; ++place, ++*ids) {
        const double chance = node.chance * children[place];
        if (!(chance > 0)) continue;
        chances_.push_back(chance);
        if (left) waiting_.push_back({chance, node.depth + 1, *ids});
      }
    }
    settle(std::max<int64_t>(left, 1));
  }

 private:
  template <typename T, typename Order>
  static void keep_best(std::vector<T>& values, int64_t most, Order order) {
    const auto kept = std::min(values.size(), static_cast<size_t>(most));
    std::partial_sort(values.begin(), values.begin() + static_cast<int64_t>(kept), values.end(), order);
    values.resize(kept);
  }

  SearchPrices prices_;
  std::vector<double> chances_;
  std::vector<WaitingNode> waiting_;
};

// What a tree is worth after the best number of passes from so many nodes, 1 to `rounds`, less what they cost.
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
inline std::vector<int64_t> next_pass(const float* paths, const int64_t* depths, const bool* waiting, int64_t size,
                                      const Profile& profile, const SearchPrices& prices, int64_t rounds) {
  PlayedTree tree(prices);
  for (int64_t i = 0; i < size; ++i) {
    const double chance = std::exp(static_cast<double>(paths[i]));
    if (chance > 0) tree.add(chance);
    if (waiting[i]) tree.wait({chance, depths[i], i});
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
