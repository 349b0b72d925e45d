// The bounded queues of a best-first search over one draft tree: fixed-capacity sorted arrays, no allocation.
// Ranking: score descending, order of creation ascending. Source: SALF Alg. 2.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "spec/queues.hpp"

namespace spec {

// Over arrays of `budget` elements each, which the owner provides.
struct BestFirstState {
  int64_t budget, batch, max_depth;
  float* accepted;    // G: scores of the nodes, best first
  QueueEntry* queue;  // Q: scored, not yet drawn, best first
  int64_t accepted_count, queue_count;
};

struct Drawn {
  int64_t nodes, expanded;
  double mass;  // sum of the path probabilities of those expanded
};

inline float score_of(float score) { return score; }
inline float score_of(const QueueEntry& entry) { return entry.score; }

// Merges a best-first run, made after all that `ranked` holds, into it, and keeps the `capacity` best. Of equal scores
// the run's come later, which is the order of creation, so that order is not stored. run(j): element j. Returns how
// many of the run, its first ones, were kept.
template <typename T, typename Run>
inline int64_t merge_best(T* ranked, int64_t* count, int64_t capacity, int64_t run_count, Run run) {
  int64_t old = *count, kept = run_count;
  while (old + kept > capacity) {
    if (old == 0 || (kept > 0 && score_of(run(kept - 1)) <= score_of(ranked[old - 1])))
      --kept;
    else
      --old;
  }
  *count = old + kept;
  for (int64_t left = kept, place = *count; left > 0;) {
    if (old > 0 && score_of(ranked[old - 1]) < score_of(run(left - 1)))
      ranked[--place] = ranked[--old];
    else
      ranked[--place] = run(--left);
  }
  return kept;
}

inline void start(BestFirstState& state) {
  state.accepted[0] = 0.0f;  // the root
  state.accepted_count = 1;
  state.queue_count = 0;
}

// The `budget`-th best score of G and Q together; -inf while they hold fewer.
inline float best_first_bound(const BestFirstState& state) {
  if (state.accepted_count + state.queue_count < state.budget) return kLowest;
  float score = kLowest;
  for (int64_t taken = 0, accepted = 0, queued = 0; taken < state.budget; ++taken) {
    const bool from_queue = accepted == state.accepted_count ||
                            (queued < state.queue_count && state.queue[queued].score > state.accepted[accepted]);
    score = from_queue ? state.queue[queued++].score : state.accepted[accepted++];
  }
  return score;
}

// Adds `count` candidates in order of creation, but for those of -inf. False, and nothing is added, where a score is
// NaN. A run of descending scores, such as one parent's children, is merged at once.
inline bool push(BestFirstState& state, const int64_t* parents, const int64_t* depths_of_parents,
                         const int64_t* tokens, const float* log_probs, const float* scores, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (scores[i] != scores[i]) return false;
  for (int64_t first = 0, last; first < count; first = last) {
    last = first + 1;
    if (scores[first] == kLowest) continue;
    while (last < count && scores[last] <= scores[last - 1] && scores[last] > kLowest) ++last;
    if (state.queue_count == state.budget && scores[first] <= state.queue[state.budget - 1].score) continue;
    merge_best(state.queue, &state.queue_count, state.budget, last - first, [&](int64_t j) {
      const int64_t i = first + j;
      return QueueEntry{scores[i], log_probs[i], parents[i], tokens[i], depths_of_parents[i] + 1};
    });
  }
  return true;
}

// Moves the `count` best of Q (it has as many) into G. Those that G keeps become nodes: written to parents, tokens and
// log_probs, best first. Where `expands`, those above the worst of a full G and above the greatest depth are drafted
// from: written to `expand` as indices into the nodes. Each output has room for `count`.
inline Drawn draw(BestFirstState& state, int64_t count, bool expands, int64_t* parents, int64_t* tokens,
                          float* log_probs, int64_t* expand) {
  const QueueEntry* drawn = state.queue;
  Drawn out{0, 0, 0.0};
  out.nodes = merge_best(state.accepted, &state.accepted_count, state.budget, count,
                         [&](int64_t j) { return drawn[j].score; });
  const float worst = state.accepted_count == state.budget ? state.accepted[state.budget - 1] : kLowest;
  for (int64_t i = 0; i < out.nodes; ++i) {
    parents[i] = drawn[i].parent;
    tokens[i] = drawn[i].token;
    log_probs[i] = drawn[i].log_prob;
    if (expands && drawn[i].score > worst && drawn[i].depth < state.max_depth) {
      expand[out.expanded++] = i;
      out.mass += std::exp(static_cast<double>(drawn[i].score));
    }
  }
  state.queue_count -= count;
  for (int64_t i = 0; i < state.queue_count; ++i) state.queue[i] = state.queue[i + count];
  return out;
}

// The number of entries that `pop` draws: up to the batch-th above the greatest depth; the others cost no draft pass.
inline int64_t pop_count(const BestFirstState& state) {
  for (int64_t i = 0, found = 0; i < state.queue_count; ++i)
    if (state.queue[i].depth < state.max_depth && ++found == state.batch) return i + 1;
  return state.queue_count;
}

inline int64_t fill_count(const BestFirstState& state) {
  const int64_t room = state.budget - state.accepted_count;
  return room < state.queue_count ? room : state.queue_count;
}

// The state with its storage, on the host.
class BestFirst {
 public:
  BestFirst(int64_t budget, int64_t batch, int64_t max_depth)
      : accepted_(static_cast<size_t>(budget)), queue_(static_cast<size_t>(budget)) {
    state = {budget, batch, max_depth, accepted_.data(), queue_.data(), 0, 0};
    start(state);
  }
  BestFirst(const BestFirst&) = delete;
  BestFirst& operator=(const BestFirst&) = delete;

  BestFirstState state;

 private:
  std::vector<float> accepted_;
  std::vector<QueueEntry> queue_;
};

inline void load(const QueueArrays& arrays, BestFirstState& state) {
  for (int64_t i = 0; i < arrays.budget && arrays.accepted[i] > kLowest; ++i)
    state.accepted[i] = arrays.accepted[i], state.accepted_count = i + 1;
  for (int64_t i = 0; i < arrays.budget && arrays.scores[i] > kLowest; ++i) {
    state.queue[i] = read_entry(arrays, i);
    state.queue_count = i + 1;
  }
}

inline void store(const BestFirstState& state, const QueueArrays& arrays) {
  for (int64_t i = 0; i < arrays.budget; ++i) {
    arrays.accepted[i] = i < state.accepted_count ? state.accepted[i] : kLowest;
    write_entry(arrays, i, i < state.queue_count ? state.queue[i] : no_entry());
  }
  *arrays.bound = best_first_bound(state);
}

inline bool push(BestFirstState& state, const FoundArrays& found) {
  std::vector<int64_t> parents, depths, tokens;
  for (int64_t i = 0; i < found.count; ++i) {
    const QueueEntry entry = candidate(found, i);
    parents.push_back(entry.parent);
    depths.push_back(entry.depth - 1);
    tokens.push_back(entry.token);
  }
  return push(state, parents.data(), depths.data(), tokens.data(), found.log_probs, found.scores, found.count);
}

// One pass of the search: push what was found, draw a batch; where nothing is drafted from and `fill`, draw the rest.
// begins: the queues are started anew. Where not `going` nothing changes and nothing is drawn. False on NaN scores.
inline bool step_queues(const QueueArrays& arrays, const FoundArrays& found, bool going, bool begins,
                        const Search& search, const DrawnArrays& out) {
  const int64_t budget = arrays.budget, width = search.batch < budget ? search.batch : budget;
  Drawn drawn{0, 0, 0.0};
  if (going) {
    BestFirst queue(budget, search.batch, search.max_depth);
    if (!begins) load(arrays, queue.state);
    if (!push(queue.state, found)) return false;
    std::vector<int64_t> expand(static_cast<size_t>(budget));
    drawn = draw(queue.state, pop_count(queue.state), true, out.parents, out.tokens, out.log_probs, expand.data());
    if (drawn.mass < search.threshold) drawn.expanded = 0;
    for (int64_t i = 0; i < drawn.expanded; ++i) out.expand[i] = expand[static_cast<size_t>(i)];
    store(queue.state, arrays);
    if (drawn.expanded == 0 && search.fill)  // for the last time: the queues are not needed after it
      drawn.nodes += draw(queue.state, fill_count(queue.state), false, out.parents + drawn.nodes,
                          out.tokens + drawn.nodes, out.log_probs + drawn.nodes, nullptr)
                         .nodes;
  }
  for (int64_t i = drawn.nodes; i < budget; ++i) out.parents[i] = 0, out.tokens[i] = 0, out.log_probs[i] = 0.0f;
  for (int64_t i = drawn.expanded; i < width; ++i) out.expand[i] = 0;
  *out.nodes = static_cast<int32_t>(drawn.nodes);
  *out.expanded = static_cast<int32_t>(drawn.expanded);
  return true;
}

}  // namespace spec
