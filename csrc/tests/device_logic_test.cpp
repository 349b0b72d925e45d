// spec::step_on_lanes, which a device runs, in lock step on the host and in heap buffers of the exact size, against
// spec::step_queues. Exits with 1 and a line per failed check.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "spec/best_first.hpp"
#include "tests/check.hpp"
#include "tests/lanes.hpp"

namespace {

// The buffers of an owner of queues.
struct Owned {
  std::vector<float> accepted, scores, log_probs, bound{NAN}, drawn_log_probs;
  std::vector<int64_t> parents, depths, tokens, drawn_parents, drawn_tokens, expand;
  std::vector<int32_t> live = {-1, -1};

  Owned(size_t budget, size_t batch) {
    for (auto* part : {&accepted, &scores, &log_probs, &drawn_log_probs}) part->assign(budget, NAN);
    for (auto* part : {&parents, &depths, &tokens, &drawn_parents, &drawn_tokens}) part->assign(budget, -77);
    expand.assign(std::min(batch, budget), -77);
  }

  spec::QueueArrays queues() {
    return {accepted.data(), scores.data(), log_probs.data(), parents.data(),
            depths.data(),   tokens.data(), bound.data(),     static_cast<int64_t>(accepted.size())};
  }

  spec::DrawnArrays drawn() {
    return {drawn_parents.data(), drawn_tokens.data(), drawn_log_probs.data(), &live[0], expand.data(), &live[1]};
  }
};

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void check_same(const Owned& a, const Owned& b, int64_t budget) {
  check(same_bits(a.accepted, b.accepted), "accepted", budget);
  check(same_bits(a.scores, b.scores) && same_bits(a.log_probs, b.log_probs), "scores", budget);
  check(a.parents == b.parents && a.depths == b.depths && a.tokens == b.tokens, "queue", budget);
  check(same_bits(a.bound, b.bound), "bound", budget);
  check(a.live == b.live, "counts", budget);
  check(a.drawn_parents == b.drawn_parents && a.drawn_tokens == b.drawn_tokens, "drawn", budget);
  check(same_bits(a.drawn_log_probs, b.drawn_log_probs), "drawn edges", budget);
  check(a.expand == b.expand, "expand", budget);
}

struct Given {
  std::vector<int64_t> rows, columns, nodes, depths, token_ids;
  std::vector<float> log_probs, scores;

  spec::FoundArrays found(bool mapped) const {
    return {rows.data(),
            columns.data(),
            log_probs.data(),
            scores.data(),
            static_cast<int64_t>(scores.size()),
            nodes.data(),
            depths.data(),
            mapped ? token_ids.data() : nullptr};
  }
};

constexpr int64_t kNodes = 9, kColumns = 50;

// Coarse scores have ties; some are of -inf.
Given random_candidates(int64_t count, bool coarse) {
  Given out;
  for (int64_t i = 0; i < kNodes; ++i) out.nodes.push_back(below(kNodes)), out.depths.push_back(below(4));
  for (int64_t i = 0; i < kColumns; ++i) out.token_ids.push_back(below(1000));
  for (int64_t i = 0; i < count; ++i) {
    out.rows.push_back(below(kNodes));
    out.columns.push_back(below(kColumns));
    out.log_probs.push_back(-static_cast<float>(below(1000)) / 64);
    const float score = -static_cast<float>(below(coarse ? 12 : 100000)) / (coarse ? 1 : 16384);
    out.scores.push_back(below(10) ? score : -INFINITY);
  }
  if (below(2)) std::sort(out.scores.begin(), out.scores.end(), std::greater<float>());
  return out;
}

void test_search(int64_t budget, int64_t batch, bool coarse, bool fill) {
  Owned expected(static_cast<size_t>(budget), static_cast<size_t>(batch)), lanes = expected;
  const spec::Search search{batch, 2 + below(4), static_cast<double>(below(3)) * 0.30001, fill};
  for (int step = 0; step < 12; ++step) {
    const bool begins = step == 0 || below(9) == 0, going = below(8) != 0 || begins, mapped = below(2);
    Given given = random_candidates(below(8) ? below(2 * budget + 2) : 700, coarse);
    check(spec::step_queues(expected.queues(), given.found(mapped), going, begins, search, expected.drawn()),
          "step_queues", budget);
    for (float& score : given.scores)
      if (score == -INFINITY && below(2)) score = NAN;  // which never becomes a node
    step_on_host_lanes({lanes.queues(), given.found(mapped), search, lanes.drawn()}, going, begins);
    check_same(lanes, expected, budget);
  }
}

}  // namespace

int main() {
  for (const int64_t budget : {1, 2, 3, 10, 60, 255, 256})
    for (const int64_t batch : {1, 3, 10, 300})
      for (const bool coarse : {false, true})
        for (const bool fill : {false, true}) test_search(budget, batch, coarse, fill);
  return verdict();
}
