// Queues of a best-first search, against all candidates that were ever pushed.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "spec/best_first.hpp"
#include "tests/spec/common.hpp"

namespace spec_test {
namespace {

// Every candidate ever pushed with its number, instead of arrays.
struct Known {
  float score, log_prob;
  int64_t number, parent, token, depth;
};

bool before(const Known& a, const Known& b) {
  return a.score > b.score || (a.score == b.score && a.number < b.number);
}

void keep_best(std::vector<Known>& known, int64_t count) {
  std::sort(known.begin(), known.end(), before);
  if (static_cast<int64_t>(known.size()) > count) known.resize(static_cast<size_t>(count));
}

void test_draw(spec::BestFirst& queue, std::vector<Known>& accepted, std::vector<Known>& queued, bool expands) {
  spec::BestFirstState& state = queue.state;
  const int64_t count = expands ? spec::pop_count(state) : spec::fill_count(state);
  const int64_t room = state.budget - static_cast<int64_t>(accepted.size());
  int64_t wanted = expands ? 0 : std::min(room, static_cast<int64_t>(queued.size()));
  for (int64_t inner = 0; expands && wanted < static_cast<int64_t>(queued.size()) && inner < state.batch; ++wanted)
    inner += queued[static_cast<size_t>(wanted)].depth < state.max_depth;
  check(count == wanted, "best_first count", state.budget);
  const auto size = static_cast<size_t>(count);
  std::vector<int64_t> parents(size, -7), tokens(size, -7), expand(size, -7);
  std::vector<float> log_probs(size, NAN);
  const spec::Drawn drawn =
      spec::draw(state, count, expands, parents.data(), tokens.data(), log_probs.data(), expand.data());

  const std::vector<Known> taken(queued.begin(), queued.begin() + count);
  queued.erase(queued.begin(), queued.begin() + count);
  accepted.insert(accepted.end(), taken.begin(), taken.end());
  keep_best(accepted, state.budget);
  const bool full = static_cast<int64_t>(accepted.size()) == state.budget;
  int64_t nodes = 0, expanded = 0;
  double mass = 0.0;
  for (const Known& known : taken) {
    const auto same = [&](const Known& other) { return other.number == known.number; };
    if (!std::any_of(accepted.begin(), accepted.end(), same)) continue;
    check(parents[nodes] == known.parent && tokens[nodes] == known.token && log_probs[nodes] == known.log_prob,
          "best_first nodes", state.budget);
    if (expands && (full ? known.score > accepted.back().score : known.score > -INFINITY) &&
        known.depth < state.max_depth) {
      check(expand[expanded] == nodes, "best_first expand", state.budget);
      ++expanded;
      mass += std::exp(static_cast<double>(known.score));
    }
    ++nodes;
  }
  check(drawn.nodes == nodes && drawn.expanded == expanded, "best_first counts", state.budget);
  check(std::fabs(drawn.mass - mass) <= 1e-12 * (1.0 + mass), "best_first mass", state.budget);
}

// The queues in their owner's arrays.
struct Arrays {
  std::vector<float> accepted, scores, log_probs;
  std::vector<int64_t> parents, depths, tokens;
  float bound = NAN;

  explicit Arrays(int64_t budget) {
    for (auto* floats : {&accepted, &scores, &log_probs}) floats->assign(static_cast<size_t>(budget), NAN);
    for (auto* whole : {&parents, &depths, &tokens}) whole->assign(static_cast<size_t>(budget), int64_t{1} << 62);
  }
  spec::QueueArrays at() {
    return {accepted.data(), scores.data(), log_probs.data(), parents.data(),
            depths.data(),   tokens.data(), &bound,           static_cast<int64_t>(accepted.size())};
  }
  bool operator==(const Arrays& other) const {
    return scores == other.scores && accepted == other.accepted && log_probs == other.log_probs &&
           parents == other.parents && depths == other.depths && tokens == other.tokens && bound == other.bound;
  }
};

// The outputs of a step, in buffers of the exact size.
struct Outputs {
  std::vector<int64_t> parents, tokens, expand;
  std::vector<float> log_probs;
  int32_t nodes = -7, expanded = -7;

  Outputs(int64_t budget, int64_t batch)
      : parents(static_cast<size_t>(budget), -7),
        tokens(parents),
        expand(static_cast<size_t>(std::min(budget, batch)), -7),
        log_probs(static_cast<size_t>(budget), NAN) {}
  spec::DrawnArrays at() {
    return {parents.data(), tokens.data(), log_probs.data(), &nodes, expand.data(), &expanded};
  }
};

// Check one step against push and draw, which test_best_first checks against every candidate known.
void check_step(const spec::BestFirst& before, const spec::FoundArrays& found, const spec::Search& search,
                Arrays& arrays) {
  const int64_t budget = before.state.budget;
  spec::BestFirst queue(budget, search.batch, search.max_depth);
  std::copy_n(before.state.accepted, before.state.accepted_count, queue.state.accepted);
  std::copy_n(before.state.queue, before.state.queue_count, queue.state.queue);
  queue.state.accepted_count = before.state.accepted_count, queue.state.queue_count = before.state.queue_count;
  std::vector<int64_t> parents, depths, tokens;
  for (int64_t i = 0; i < found.count; ++i) {
    parents.push_back(found.nodes[found.rows[i]]), depths.push_back(found.depths[parents.back()]);
    tokens.push_back(found.token_ids ? found.token_ids[found.columns[i]] : found.columns[i]);
  }
  spec::push(queue.state, parents.data(), depths.data(), tokens.data(), found.log_probs, found.scores, found.count);
  Outputs wanted(budget, budget), got(budget, search.batch);
  spec::Drawn drawn = spec::draw(queue.state, spec::pop_count(queue.state), true, wanted.parents.data(),
                                 wanted.tokens.data(), wanted.log_probs.data(), wanted.expand.data());
  if (drawn.mass < search.threshold) drawn.expanded = 0;
  const int64_t accepted = queue.state.accepted_count, queued = queue.state.queue_count;
  const float bound = spec::best_first_bound(queue.state);
  check(spec::step_queues(arrays.at(), found, true, false, search, got.at()), "step_queues accepts", budget);
  check(arrays.bound == bound, "step_queues bound", budget);
  for (int64_t i = 0; i < budget; ++i) {
    check(arrays.accepted[i] == (i < accepted ? queue.state.accepted[i] : -INFINITY), "step_queues accepted", budget);
    const spec::QueueEntry entry = i < queued ? queue.state.queue[i] : spec::QueueEntry{-INFINITY, 0.0f, 0, 0, 0};
    check(arrays.scores[i] == entry.score && arrays.log_probs[i] == entry.log_prob && arrays.tokens[i] == entry.token &&
              arrays.parents[i] == entry.parent && arrays.depths[i] == entry.depth,
          "step_queues queue", budget);
  }
  if (search.fill && drawn.expanded == 0)
    for (int64_t i = 0; i < spec::fill_count(queue.state); ++i, ++drawn.nodes) {
      const spec::QueueEntry& entry = queue.state.queue[i];
      wanted.parents[drawn.nodes] = entry.parent, wanted.tokens[drawn.nodes] = entry.token;
      wanted.log_probs[drawn.nodes] = entry.log_prob;
    }
  check(got.nodes == drawn.nodes && got.expanded == drawn.expanded, "step_queues counts", budget);
  for (int64_t i = 0; i < budget; ++i) {
    const bool there = i < drawn.nodes;
    check(got.parents[i] == (there ? wanted.parents[i] : 0) && got.tokens[i] == (there ? wanted.tokens[i] : 0) &&
              got.log_probs[i] == (there ? wanted.log_probs[i] : 0.0f),
          "step_queues nodes", budget);
  }
  for (size_t i = 0; i < got.expand.size(); ++i)
    check(got.expand[i] == (static_cast<int64_t>(i) < drawn.expanded ? wanted.expand[i] : 0), "step_queues expand",
          budget);
}

}  // namespace

void test_best_first() {
  for (const int64_t budget : {1, 2, 3, 10, 60, 256})
    for (const int64_t batch : {1, 3, 10, 300})
      for (int kind = 0; kind < 4; ++kind) {
        spec::BestFirst queue(budget, batch, 4);
        std::vector<Known> accepted{{0.0f, 0.0f, 0, -1, -1, 0}}, queued;
        int64_t number = 0;
        for (int step = 0; step < 25; ++step) {
          const int64_t count = below(kind & 2 ? 3 * budget + 2 : 5);
          auto scores = random_scores(count, kind & 1, false);
          for (float& score : scores) score = below(10) ? -std::fabs(score) : -INFINITY;
          if (below(2)) std::sort(scores.begin(), scores.end(), std::greater<float>());
          const auto log_probs = random_scores(count, false, false);
          std::vector<int64_t> parents(scores.size()), depths(scores.size()), tokens(scores.size());
          for (int64_t i = 0; i < count; ++i) {
            parents[i] = below(1000), depths[i] = below(5), tokens[i] = below(1000);
            ++number;
            if (scores[i] > -INFINITY)
              queued.push_back({scores[i], log_probs[i], number, parents[i], tokens[i], depths[i] + 1});
          }
          keep_best(queued, budget);
          check(spec::push(queue.state, parents.data(), depths.data(), tokens.data(), log_probs.data(), scores.data(),
                           count),
                "best_first push", budget);
          std::vector<Known> all = accepted;
          all.insert(all.end(), queued.begin(), queued.end());
          std::sort(all.begin(), all.end(), before);
          const bool full = static_cast<int64_t>(all.size()) >= budget;
          check(spec::best_first_bound(queue.state) == (full ? all[budget - 1].score : -INFINITY), "best_first bound",
                budget);
          if (below(3)) test_draw(queue, accepted, queued, below(8) != 0);
        }
      }
  spec::BestFirst queue(3, 1, 3);
  const int64_t zeros[] = {0, 0};
  const float good[] = {-1.0f, -2.0f}, bad[] = {-1.0f, NAN};
  check(!spec::push(queue.state, zeros, zeros, zeros, good, bad, 2), "best_first refuses NaN", 3);
  check(queue.state.queue_count == 0, "best_first adds nothing then", 3);
}

void test_step_queues() {
  for (const int64_t budget : {1, 2, 3, 10, 60, 256})
    for (const int64_t batch : {1, 3, 10, 300})
      for (int kind = 0; kind < 8; ++kind) {
        Arrays arrays(budget);
        const double thresholds[] = {0.0, 0.05, 9.0};
        for (int step = 0; step < 12; ++step) {
          const int64_t rows = 1 + below(5), count = below(kind & 2 ? 3 * budget + 2 : 5), columns = 30;
          auto scores = random_scores(count, kind & 1, false);
          for (float& score : scores) score = below(10) ? -std::fabs(score) : -INFINITY;
          if (below(2)) std::sort(scores.begin(), scores.end(), std::greater<float>());
          const auto log_probs = random_scores(count, false, false);
          std::vector<int64_t> places(scores.size()), tokens(scores.size()), nodes(static_cast<size_t>(rows)),
              depths(40), ids(static_cast<size_t>(columns));
          for (int64_t& place : places) place = below(rows);
          for (int64_t& token : tokens) token = below(columns);
          for (int64_t& node : nodes) node = below(40);
          for (int64_t& depth : depths) depth = below(5);
          for (int64_t& id : ids) id = below(1000);
          const int64_t* token_ids = kind & 4 ? ids.data() : nullptr;
          const spec::FoundArrays found{places.data(), tokens.data(), log_probs.data(), scores.data(),
                                        count,         nodes.data(),  depths.data(),    token_ids};
          const spec::Search search{batch, 4, thresholds[below(3)], below(2) == 1};
          Outputs out(budget, batch);
          if (step == 0) {  // after another search, as where there was none
            Arrays fresh(budget);
            fresh.scores.assign(fresh.scores.size(), -1.0f), fresh.accepted = fresh.scores;
            Outputs again(budget, batch);
            check(spec::step_queues(arrays.at(), found, true, true, search, out.at()) &&
                      spec::step_queues(fresh.at(), found, true, true, search, again.at()),
                  "step_queues begins", budget);
            check(arrays == fresh && out.parents == again.parents && out.nodes == again.nodes, "begins anew", budget);
            continue;
          }
          const Arrays before = arrays;
          check(spec::step_queues(arrays.at(), found, false, below(2) == 1, search, out.at()), "no frontier", budget);
          const auto zero = [](const std::vector<int64_t>& all) {
            return std::all_of(all.begin(), all.end(), [](int64_t value) { return value == 0; });
          };
          check(out.nodes == 0 && out.expanded == 0 && arrays == before && zero(out.parents) && zero(out.tokens) &&
                    zero(out.expand),
                "step_queues of no frontier", budget);
          if (count > 0) {
            std::vector<float> bad = scores;
            bad[below(count)] = NAN;
            spec::FoundArrays wrong = found;
            wrong.scores = bad.data();
            check(!spec::step_queues(arrays.at(), wrong, true, false, search, out.at()) && arrays == before,
                  "step_queues refuses NaN", budget);
          }
          spec::BestFirst queue(budget, batch, 4);
          spec::load(arrays.at(), queue.state);
          check_step(queue, found, search, arrays);
        }
      }
}

}  // namespace spec_test
