// Runs the logic of the CUDA kernels on the host: every lane of a block in random order between two barriers, in heap
// buffers of the exact size, against the functions for the CPU. Exits with 1 and a line per failed check.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "spec/best_first.hpp"
#include "spec/compaction.hpp"
#include "spec/device_best_first.hpp"
#include "spec/device_compaction.hpp"
#include "spec/device_tree.hpp"
#include "spec/tree.hpp"
#include "tests/check.hpp"

namespace {

// What all lanes do up to the next barrier; a race shows as a result that depends on their order.
void lanes(int count, const std::function<void(int)>& work) {
  std::vector<int> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), generator);
  for (const int lane : order) work(lane);
}

void lanes(const std::function<void(int)>& work) { lanes(spec::kCapacity, work); }

// ---- best-first queues

struct Candidates {
  std::vector<int64_t> rows, nodes, depths, tokens;
  std::vector<float> log_probs, scores;

  spec::DeviceRun run(bool with_rows) const {
    return {with_rows ? rows.data() : nullptr, nodes.data(),  depths.data(),
            tokens.data(),                     log_probs.data(), scores.data(),
            static_cast<int>(scores.size())};
  }
};

Candidates random_candidates(int64_t count, bool coarse, bool with_rows) {
  Candidates out;
  const int64_t parents = with_rows ? 7 : count;
  for (int64_t i = 0; i < parents; ++i) {
    out.nodes.push_back(below(1000));
    out.depths.push_back(below(5));
  }
  for (int64_t i = 0; i < count; ++i) {
    out.rows.push_back(below(std::max<int64_t>(parents, 1)));
    out.tokens.push_back(below(1000));
    out.log_probs.push_back(-static_cast<float>(below(1000)) / 64);
    const float score = -static_cast<float>(below(coarse ? 12 : 100000)) / (coarse ? 1 : 1024);
    out.scores.push_back(below(10) ? score : -INFINITY);
  }
  if (below(2)) std::sort(out.scores.begin(), out.scores.end(), std::greater<float>());
  return out;
}

// As the kernels: the same phases in the same order.
bool push(spec::DeviceQueues& queues, const spec::DeviceRun& run, float* bound) {
  bool refused = false;
  lanes([&](int lane) { refused |= spec::sees_nan(run, lane); });
  if (refused) return false;
  const auto scores = std::make_unique<spec::MergeScores>();
  std::vector<spec::PushLane> own(spec::kCapacity);
  for (int first = 0; first < run.count; first += spec::kCapacity) {
    lanes([&](int lane) { spec::read_run(queues, run, first, lane, own[lane], *scores); });
    lanes([&](int lane) { spec::write_queue(queues, lane, own[lane], *scores); });
  }
  lanes([&](int lane) { spec::read_both(queues, lane, *scores); });
  lanes([&](int lane) { spec::write_bound(queues, lane, *scores, bound); });
  return true;
}

void draw(spec::DeviceQueues& queues, bool expands, double threshold, const spec::DrawOutputs& out) {
  const auto scratch = std::make_unique<spec::DrawScratch>();
  std::vector<spec::DrawLane> own(spec::kCapacity);
  lanes([&](int lane) { spec::read_queue(queues, expands, lane, own[lane], *scratch); });
  if (expands) lanes([&](int lane) { spec::find_last_of_batch(queues, lane, *scratch); });
  lanes([&](int lane) { spec::read_drawn(queues, lane, own[lane], *scratch); });
  lanes([&](int lane) { spec::write_accepted(queues, lane, own[lane], *scratch); });
  lanes([&](int lane) { spec::write_nodes(queues, expands, lane, own[lane], *scratch, out); });
  lanes([&](int lane) { spec::write_expand(lane, *scratch, out); });
  for (int half = spec::kCapacity / 2; half > 0; half /= 2)
    lanes([&](int lane) { spec::fold_mass(half, lane, *scratch); });
  lanes([&](int lane) { spec::write_mass(threshold, lane, *scratch, out); });
}

void test_same_push(spec::DeviceQueues& queues, spec::BestFirst& expected, int64_t count, bool coarse) {
  const bool with_rows = below(2);
  const Candidates made = random_candidates(count, coarse, with_rows);
  std::vector<int64_t> parents = made.nodes, depths = made.depths;
  if (with_rows) {
    parents.clear(), depths.clear();
    for (const int64_t row : made.rows) parents.push_back(made.nodes[row]), depths.push_back(made.depths[row]);
  }
  float bound = NAN;
  check(push(queues, made.run(with_rows), &bound), "push", count);
  check(spec::push(expected.state, parents.data(), depths.data(), made.tokens.data(), made.log_probs.data(),
                   made.scores.data(), count),
        "push on the CPU", count);
  check(bound == spec::best_first_bound(expected.state), "bound", count);
  check(queues.queue_count == expected.state.queue_count, "queue count", count);
  for (int64_t i = 0; i < expected.state.queue_count; ++i) {
    const spec::QueueEntry &a = queues.queue[i], &b = expected.state.queue[i];
    check(a.score == b.score && a.log_prob == b.log_prob && a.parent == b.parent && a.token == b.token &&
              a.depth == b.depth,
          "queue", count);
  }
}

void test_same_draw(spec::DeviceQueues& queues, spec::BestFirst& expected, bool expands) {
  const auto most = static_cast<size_t>(spec::kCapacity);
  std::vector<int64_t> parents(most), tokens(most), expand(most), parents2(most), tokens2(most), expand2(most);
  std::vector<float> log_probs(most), log_probs2(most);
  int32_t nodes = -1, expanded = -1, alive = -1;
  double mass = NAN;
  const int64_t budget = expected.state.budget;
  const double threshold = static_cast<double>(below(3)) * 0.3;
  draw(queues, expands, threshold,
       {parents.data(), tokens.data(), log_probs.data(), &nodes, expand.data(), &expanded, &mass, &alive});
  const int64_t count = expands ? spec::pop_count(expected.state) : spec::fill_count(expected.state);
  const spec::Drawn drawn = spec::draw(expected.state, count, expands, parents2.data(), tokens2.data(),
                                       log_probs2.data(), expand2.data());
  check(nodes == drawn.nodes && expanded == drawn.expanded, "draw counts", budget);
  check(std::fabs(mass - drawn.mass) <= 1e-12 * (1.0 + drawn.mass), "mass", budget);
  check(alive == (drawn.expanded > 0 && mass >= threshold), "alive", budget);
  check(std::equal(parents2.begin(), parents2.begin() + drawn.nodes, parents.begin()), "draw parents", budget);
  check(std::equal(tokens2.begin(), tokens2.begin() + drawn.nodes, tokens.begin()), "draw tokens", budget);
  check(std::equal(log_probs2.begin(), log_probs2.begin() + drawn.nodes, log_probs.begin()), "draw edges", budget);
  check(std::equal(expand2.begin(), expand2.begin() + drawn.expanded, expand.begin()), "draw expand", budget);
  check(queues.accepted_count == expected.state.accepted_count, "accepted count", budget);
  check(std::equal(expected.state.accepted, expected.state.accepted + expected.state.accepted_count, queues.accepted),
        "accepted", budget);
}

void test_best_first() {
  for (const int64_t budget : {1, 2, 3, 10, 60, 255, 256})
    for (const int64_t batch : {1, 3, 10, 300})
      for (const bool coarse : {false, true}) {
        spec::BestFirst expected(budget, batch, 4);
        const auto queues = std::make_unique<spec::DeviceQueues>();
        float bound = NAN;
        spec::start_queues(*queues, static_cast<int>(budget), static_cast<int>(batch), 4, &bound);
        check(bound == spec::best_first_bound(expected.state), "bound at the start", budget);
        for (int step = 0; step < 12; ++step) {
          test_same_push(*queues, expected, below(8) ? below(2 * budget + 2) : 700, coarse);
          if (below(4)) test_same_draw(*queues, expected, below(5) != 0);
        }
      }
  Candidates bad = random_candidates(300, false, true);
  bad.scores[299] = NAN;
  spec::DeviceQueues queues;
  float bound = NAN;
  spec::start_queues(queues, 3, 1, 3, &bound);
  check(!push(queues, bad.run(true), &bound) && queues.queue_count == 0, "push refuses NaN", 300);
}

// ---- tree

std::vector<int64_t> random_parents(int64_t nodes) {
  std::vector<int64_t> parents{-1};
  for (int64_t node = 1; node < nodes; ++node) parents.push_back(below(2) ? node - 1 : below(node));
  return parents;
}

struct TreeArrays {
  std::vector<int64_t> tokens, parents, depths;
  std::vector<float> log_probs, path_log_probs;
  std::vector<uint64_t> ancestors;
  int32_t size = 1;
  spec::DeviceTree tree;

  TreeArrays(int capacity, int words) {
    const auto most = static_cast<size_t>(capacity);
    tokens.resize(most), parents.resize(most), depths.resize(most);
    log_probs.resize(most), path_log_probs.resize(most), ancestors.resize(most * static_cast<size_t>(words));
    parents[0] = -1;
    ancestors[0] = 1;
    tree = {tokens.data(),         parents.data(),   depths.data(), log_probs.data(),
            path_log_probs.data(), ancestors.data(), &size,         capacity,
            words};
  }
};

void test_append() {
  for (const int capacity : {1, 2, 63, 64, 65, 129, 700}) {
    const int words = static_cast<int>(spec::words_for(capacity));
    const auto parents = random_parents(capacity);
    TreeArrays device(capacity, words);
    for (int start = 1; start < capacity;) {
      int count = 0;  // those whose parents are there already
      while (start + count < capacity && parents[start + count] < start) ++count;
      const std::vector<int64_t> tokens(static_cast<size_t>(count), start);
      const std::vector<float> edges(static_cast<size_t>(count), -0.5f);
      const spec::NewNodes made{parents.data() + start, tokens.data(), edges.data(), count};
      lanes(256, [&](int lane) { spec::append_nodes(device.tree, made, start, lane, 256); });

      const int width = static_cast<int>(below(300)), expanded = std::min(width, count);
      const auto room = static_cast<size_t>(width);
      std::vector<int64_t> expand(static_cast<size_t>(expanded)), nodes(room), depths(room);
      std::vector<float> scores(room);
      for (int64_t& i : expand) i = below(count);
      const spec::Frontier out{expand.data(), expanded, width, nodes.data(), depths.data(), scores.data()};
      lanes(256, [&](int lane) { spec::write_frontier(device.tree, out, start, lane, 256); });
      for (int i = 0; i < width; ++i) {
        const int64_t node = i < expanded ? start + expand[i] : 0;
        check(nodes[i] == node && depths[i] == device.depths[node], "frontier", capacity);
        check(scores[i] == (i < expanded ? -0.5f * static_cast<float>(depths[i]) : -INFINITY), "frontier scores",
              capacity);
      }
      start += count;
    }
    std::vector<uint64_t> ancestors(device.ancestors.size());
    check(spec::ancestor_words(parents.data(), capacity, ancestors.data()), "ancestor_words", capacity);
    check(ancestors == device.ancestors, "appended ancestors", capacity);
    check(parents == device.parents, "appended parents", capacity);
    for (int node = 1; node < capacity; ++node)
      check(device.depths[node] == device.depths[parents[node]] + 1 &&
                device.path_log_probs[node] == -0.5f * static_cast<float>(device.depths[node]),
            "appended depths", capacity);
  }
}

void test_walk() {
  for (const int64_t nodes : {1, 2, 3, 64, 65, 300, 1024})
    for (int round = 0; round < 20; ++round) {
      const auto parents = random_parents(nodes);
      std::vector<int64_t> tokens(static_cast<size_t>(nodes)), chosen(static_cast<size_t>(nodes));
      for (int64_t node = 0; node < nodes; ++node) tokens[node] = node, chosen[node] = below(nodes);
      for (int64_t node = below(nodes); node > 0; node = parents[node]) chosen[parents[node]] = tokens[node];
      std::vector<int32_t> chosen_child(static_cast<size_t>(nodes), spec::kNoChild);
      lanes(static_cast<int>(nodes), [&](int node) {
        if (spec::is_chosen(tokens.data(), parents.data(), chosen.data(), node))
          chosen_child[parents[node]] = std::min(chosen_child[parents[node]], node);
      });
      std::vector<int64_t> path(static_cast<size_t>(nodes));
      path.resize(static_cast<size_t>(spec::follow(chosen_child.data(), path.data())));
      check(path == spec::walk(tokens.data(), parents.data(), chosen.data(), nodes), "walk", nodes);
    }
}

// ---- key-value rows

template <typename Piece>
void test_compaction(const char* what) {
  for (const int64_t size : {1, 2, 8, 9, 30}) {
    const int64_t planes = 3, row_pieces = 2, prefix = 4, slots = prefix + 2 * size;
    std::vector<Piece> slab(static_cast<size_t>(planes * slots * row_pieces));
    for (Piece& piece : slab) piece = static_cast<Piece>(below(1 << 30));
    std::vector<int64_t> path(static_cast<size_t>(2 * size));
    std::iota(path.begin(), path.end(), 0);
    std::shuffle(path.begin() + 1, path.end(), generator);
    path.resize(static_cast<size_t>(size));
    std::sort(path.begin(), path.end());
    std::vector<Piece> expected = slab;
    const int64_t row_bytes = row_pieces * static_cast<int64_t>(sizeof(Piece));
    spec::compact_rows(reinterpret_cast<char*>(expected.data()), planes, slots * row_bytes, row_bytes, prefix, path);
    lanes(static_cast<int>(planes * row_pieces), [&](int lane) {
      Piece* column = slab.data() + (lane / row_pieces * slots + prefix) * row_pieces + lane % row_pieces;
      spec::move_column(column, row_pieces, path.data(), static_cast<int>(size));
    });
    check(slab == expected, what, size);
  }
}

}  // namespace

int main() {
  test_best_first();
  test_append();
  test_walk();
  test_compaction<uint8_t>("move_column of bytes");
  test_compaction<uint64_t>("move_column of words");
  return verdict();
}
