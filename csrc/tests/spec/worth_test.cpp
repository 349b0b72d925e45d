// Tests of a search's promise, against trying every width, node count and continuation; and of its counts.
#include "spec/worth.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "tests/spec/common.hpp"

namespace spec_test {
namespace {

std::vector<float> uniform(int64_t size, float most) {
  std::uniform_real_distribution<float> draw(0.0f, most);
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) value = draw(generator);
  return values;
}

double worth_of(std::vector<double> found, const std::vector<float>& price) {
  std::sort(found.begin(), found.end(), std::greater<double>());
  double sum = 0, best = -INFINITY;
  for (size_t n = 0; n < found.size() && n + 1 < price.size() && found[n] > 0; ++n)
    best = std::max(best, (sum += found[n]) - price[n + 1]);
  return best;
}

struct Search {
  std::vector<float> verify, draft, profile;
  int64_t levels, places;

  // The best of a tree after `left` or fewer passes from `width` nodes.
  double best(std::vector<double> chances, std::vector<spec::WaitingNode> waiting, int64_t width, int64_t left,
              double spent) const {
    std::stable_sort(waiting.begin(), waiting.end(), [](const auto& a, const auto& b) {
      return a.chance > b.chance || (a.chance == b.chance && a.id < b.id);
    });
    const auto drawn = std::min<int64_t>(width, static_cast<int64_t>(waiting.size()));
    std::vector<spec::WaitingNode> rest(waiting.begin() + drawn, waiting.end());
    for (int64_t i = 0; i < drawn; ++i)
      for (int64_t place = 0; place < places; ++place) {
        const float edge = profile[waiting[i].level * places + place];
        const double chance = waiting[i].chance * edge;
        chances.push_back(chance);
        const auto id = static_cast<int64_t>(chances.size()) - 1;
        if (chance > 0) rest.push_back({chance, spec::level_of(edge, levels), id});
      }
    spent += draft[drawn];
    const double now = worth_of(chances, verify) - spent;
    return left == 1 ? now : std::max(now, best(chances, rest, width, left - 1, spent));
  }
};

void test_next_pass() {
  for (int trial = 0; trial < 400; ++trial) {
    const int64_t size = 1 + below(12), levels = 1 + below(8), places = 1 + below(4), nodes = 1 + below(10),
                  width = 1 + below(5), rounds = 1 + below(3);
    Search search{uniform(nodes + 1, 0.3f), uniform(width + 1, trial & 1 ? 0.05f : 0.5f), {}, levels, places};
    search.draft[0] = 0;
    for (int64_t level = 0; level < levels; ++level) {
      auto row = uniform(places, 0.9f);
      std::sort(row.begin(), row.end(), std::greater<float>());
      search.profile.insert(search.profile.end(), row.begin(), row.end());
    }
    auto paths = uniform(size, 3.0f), edges = uniform(size, 2.0f);
    const auto waiting = std::make_unique<bool[]>(static_cast<size_t>(size));
    std::vector<double> chances;
    std::vector<spec::WaitingNode> there;
    for (int64_t i = 0; i < size; ++i) {
      paths[i] = trial & 2 ? -std::round(paths[i]) : -paths[i];
      edges[i] = -edges[i];
      waiting[i] = below(2) == 0;
      chances.push_back(std::exp(static_cast<double>(paths[i])));
      if (waiting[i]) there.push_back({chances.back(), i ? spec::level_of(std::exp(edges[i]), levels) : 0, i});
    }
    std::vector<int64_t> widths(static_cast<size_t>(width));
    std::iota(widths.begin(), widths.end(), 1);
    std::vector<double> values;
    for (const int64_t tried : widths) values.push_back(search.best(chances, there, tried, rounds, 0));
    const double best = *std::max_element(values.begin(), values.end());
    std::vector<int64_t> expected;
    if (best > worth_of(chances, search.verify) + spec::kWorth) {
      int64_t taken = 0;
      while (values[taken] < best - spec::kWorth) ++taken;
      std::stable_sort(there.begin(), there.end(), [](const auto& a, const auto& b) { return a.chance > b.chance; });
      for (int64_t i = 0; i < std::min<int64_t>(taken + 1, static_cast<int64_t>(there.size())); ++i)
        expected.push_back(there[i].id);
      std::sort(expected.begin(), expected.end());
    }
    const spec::SearchPrices prices{search.verify.data(), search.draft.data(), nodes, width, widths.data(), width};
    const spec::Profile profile{search.profile.data(), levels, places};
    check(spec::next_pass(paths.data(), edges.data(), waiting.get(), size, profile, prices, rounds) == expected,
          "next pass", trial);
  }
}

void test_worth_most() {
  for (int trial = 0; trial < 400; ++trial) {
    const int64_t size = 1 + below(20), most = 1 + below(25);
    auto paths = uniform(size, 4.0f);
    for (float& path : paths) path = trial & 1 ? -std::round(path) : -path;
    if (trial & 2) paths.back() = -INFINITY;
    const auto price = uniform(most + 1, trial & 4 ? 0.4f : 3.0f);
    std::vector<float> sorted = paths;
    std::sort(sorted.begin(), sorted.end(), std::greater<float>());
    double sum = 0, best = -INFINITY;
    std::vector<double> values;
    for (int64_t n = 0; n < std::min(size, most) && sorted[n] > -INFINITY; ++n) {
      values.push_back((sum += std::exp(static_cast<double>(sorted[n]))) - price[n + 1]);
      best = std::max(best, values.back());
    }
    int64_t expected = 1;
    while (!values.empty() && values[expected - 1] < best - spec::kWorth) ++expected;
    check(spec::worth_most(paths.data(), size, price.data(), most) == expected, "worth", trial);
  }
}

// A tree in buffers of the exact size, and counts of one group.
struct Counted {
  std::vector<int64_t> tokens, parents, depths, cells, places;
  std::vector<float> edges, paths, stated;
  std::vector<uint64_t> words;
  std::unique_ptr<bool[]> waiting, drafted;
  std::vector<float> hits, tries, table, gains, passes, profile;

  explicit Counted(int64_t size)
      : tokens(size), parents(size, -1), depths(size), cells(size), places(size), edges(size), paths(size),
        stated(size), words(size), waiting(new bool[size]()), drafted(new bool[size]()),
        hits(spec::kSources * spec::kDepths * spec::kRanks * spec::kKnots, 1.0f), tries(hits.size(), 2.0f),
        table(hits.size(), 0.5f), gains(spec::kLevels * spec::kPlaces, 0.25f), passes(spec::kLevels, 1.0f),
        profile(gains) {}

  spec::TreeArrays tree() {
    return {tokens.data(), parents.data(), depths.data(), edges.data(), paths.data(), words.data(), 1};
  }
  spec::OutcomeCounts counts() {
    return {hits.data(), tries.data(), table.data(), gains.data(), passes.data(), profile.data(), 0};
  }
  spec::SearchNotes notes() {
    return {stated.data(), cells.data(), places.data(), waiting.get(), drafted.get()};
  }
};

void test_counting() {
  for (int trial = 0; trial < 100; ++trial) {
    const int64_t size = 1 + below(20), cells = spec::kSources * spec::kDepths * spec::kRanks;
    Counted found(size);
    for (int64_t i = 0; i < size; ++i) {
      found.parents[i] = i ? below(i) : -1;
      found.tokens[i] = i;
      found.edges[i] = i ? -std::fabs(random_scores(1, false, false)[0]) : 0.0f;
      found.stated[i] = -std::fabs(random_scores(1, false, false)[0]) * (trial & 1 ? 0.001f : 1.0f);
      found.cells[i] = below(cells);
      found.places[i] = below(spec::kPlaces);
      found.drafted[i] = below(2) == 0;
    }
    std::vector<int64_t> path{0}, chosen;
    for (int64_t i = 1; i < size; ++i)
      if (found.parents[i] == path.back() && below(2)) path.push_back(i);
    for (size_t i = 1; i < path.size(); ++i) chosen.push_back(path[i]);
    chosen.push_back(size);
    double tried = 0, given = 0, asked = 0;
    for (int64_t i = 1; i < size; ++i) {
      tried += std::count(path.begin(), path.end(), found.parents[i]);
      if (found.drafted[found.parents[i]]) given += std::exp(static_cast<double>(found.edges[i]));
    }
    for (int64_t i = 0; i < size; ++i) asked += found.drafted[i];
    const auto hit = static_cast<double>(path.size() - 1);
    const auto total = [](const std::vector<float>& all) { return std::accumulate(all.begin(), all.end(), 0.0); };
    const double tries = total(found.tries), hits = total(found.hits), gains = total(found.gains);
    spec::count_outcomes(found.tree(), size, path.data(), chosen.data(), static_cast<int64_t>(path.size()),
                         found.counts(), found.notes());
    check(std::fabs(total(found.tries) - tries - tried) < 1e-3, "tries", trial);
    check(std::fabs(total(found.hits) - hits - hit) < 1e-3, "hits", trial);
    check(std::fabs(total(found.gains) - gains - given) < 1e-3, "gains", trial);
    check(std::fabs(total(found.passes) - spec::kLevels - asked) < 1e-3, "passes", trial);
    for (size_t i = 0; i < found.table.size(); ++i)
      check(std::fabs(found.table[i] - found.hits[i] / found.tries[i]) < 1e-5f, "table", trial);
  }
}

void test_likely_children() {
  const float stated[] = {std::log(0.6f), std::log(0.3f), 0.0f, -INFINITY};  // a certain one stands at the last knot
  Counted found(3);
  found.parents[1] = 0;
  found.paths[1] = -1.0f;
  const int64_t nodes[] = {1, 0};
  for (size_t i = 0; i < found.table.size(); ++i) found.table[i] = 0.1f + 0.05f * static_cast<float>(i % spec::kKnots);
  auto children = spec::likely_children(found.tree(), nodes, 2, 2, stated, nullptr, found.counts(), -100.0, 9);
  check(children.size() == 3 && children[0].entry == 0 && children[2].entry == 2, "all but what is not proposed", 0);
  check(std::fabs(children[2].edge - std::log(0.8f)) < 1e-5f, "the last knot", 0);
  check(children[0].path == found.paths[1] + children[0].edge, "paths", 0);
  children = spec::likely_children(found.tree(), nodes, 2, 2, stated, nullptr, found.counts(), -100.0, 2);
  check(children.size() == 2 && children[0].entry == 0 && children[1].entry == 2, "the likeliest, by entry", 0);
  children = spec::likely_children(found.tree(), nodes, 2, 2, stated, nullptr, found.counts(), -0.5, 9);
  check(children.size() == 1 && children[0].entry == 2, "least", 0);
}

}  // namespace

void test_worth() {
  test_next_pass();
  test_worth_most();
  test_counting();
  test_likely_children();
}

}  // namespace spec_test
