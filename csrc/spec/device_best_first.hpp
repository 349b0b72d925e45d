// spec::step_queues by one block with one lane per entry. What the lanes do between two barriers is one function, and
// step_on_lanes says in which order they come, for the block of a device and for the tests on a host alike. Places are
// found by counting the better ones, so that lanes do not wait for each other.
#pragma once

#include <cmath>
#include <cstdint>

#include "spec/queues.hpp"

#ifdef __CUDACC__
#define SPEC_DEVICE __device__
#else
#define SPEC_DEVICE
#endif

namespace spec {

constexpr int kCapacity = 256;  // largest budget, and lanes of the block

struct Step {
  QueueArrays queues;  // budget <= kCapacity
  FoundArrays found;
  Search search;
  DrawnArrays out;
};

static_assert(sizeof(Step) == 26 * 8, "as in specengine/ops/cuda.py");

// Memory of a block. Merged runs have -inf in empty places; of equal scores those of `made` come later.
struct StepShared {
  float ranked[kCapacity], made[kCapacity];
  double mass[kCapacity];
  int32_t inner[kCapacity], kept[kCapacity], expands[kCapacity];
};

// Registers of a lane: entry `lane` of G and of Q, and a candidate.
struct StepLane {
  float accepted;
  QueueEntry queued, made;
  bool taken, kept;
  int drawn;  // from Q, by all lanes
};

SPEC_DEVICE inline int count_before(const int32_t* flags, int end) {
  int count = 0;
  for (int lane = 0; lane < end; ++lane) count += flags[lane] != 0;
  return count;
}

SPEC_DEVICE inline int count_of(const float* scores, int end) {
  int count = 0;
  for (int lane = 0; lane < end; ++lane) count += scores[lane] > kLowest;
  return count;
}

SPEC_DEVICE inline int place_of_ranked(const StepShared& shared, int made, int lane) {
  int place = lane;
  for (int other = 0; other < made; ++other) place += shared.made[other] > shared.ranked[lane];
  return place;
}

SPEC_DEVICE inline int place_of_made(const StepShared& shared, int ranked, int made, int lane) {
  const float own = shared.made[lane];
  int place = 0;
  for (int other = 0; other < ranked; ++other) place += shared.ranked[other] >= own;
  for (int other = 0; other < made; ++other)
    place += shared.made[other] > own || (shared.made[other] == own && other < lane);
  return place;
}

// ---- what was found into Q, kCapacity candidates at a time

SPEC_DEVICE inline void read_queues(const QueueArrays& queues, bool begins, int lane, StepLane& own) {
  const bool there = lane < queues.budget && !begins;
  own.accepted = there ? queues.accepted[lane] : begins && lane == 0 ? 0.0f : kLowest;  // the root
  own.queued = there && queues.scores[lane] > kLowest ? read_entry(queues, lane) : no_entry();
}

// Candidates of -inf are passed over, and those of NaN are not above it.
SPEC_DEVICE inline void offer(const FoundArrays& found, int64_t first, int lane, StepLane& own, StepShared& shared) {
  const int64_t i = first + lane;
  own.made = i < found.count && found.scores[i] > kLowest ? candidate(found, i) : no_entry();
  shared.ranked[lane] = own.queued.score;
  shared.made[lane] = own.made.score;
}

SPEC_DEVICE inline void merge(const QueueArrays& queues, int lane, const StepLane& own, const StepShared& shared) {
  const int budget = static_cast<int>(queues.budget);
  if (own.queued.score > kLowest) {
    const int place = place_of_ranked(shared, kCapacity, lane);
    if (place < budget) write_entry(queues, place, own.queued);
  }
  if (own.made.score > kLowest) {
    const int place = place_of_made(shared, budget, kCapacity, lane);
    if (place < budget) write_entry(queues, place, own.made);
  }
  if (lane < budget && lane >= count_of(shared.ranked, budget) + count_of(shared.made, kCapacity))
    write_entry(queues, lane, no_entry());
}

SPEC_DEVICE inline void read_merged(const QueueArrays& queues, int lane, StepLane& own) {
  own.queued = lane < queues.budget ? read_entry(queues, lane) : no_entry();
}

// ---- the batch into G

SPEC_DEVICE inline void find_inner(const Search& search, int lane, const StepLane& own, StepShared& shared) {
  shared.inner[lane] = own.queued.score > kLowest && own.queued.depth < search.max_depth;
}

// Take entries as pop_count does: up to the batch-th above the greatest depth.
SPEC_DEVICE inline void take(const Search& search, int lane, StepLane& own, StepShared& shared) {
  own.taken = own.queued.score > kLowest && count_before(shared.inner, lane) < search.batch;
  shared.ranked[lane] = own.accepted;
  shared.made[lane] = own.taken ? own.queued.score : kLowest;
}

SPEC_DEVICE inline void accept(const QueueArrays& queues, int lane, StepLane& own, StepShared& shared) {
  const int budget = static_cast<int>(queues.budget);
  own.drawn = count_of(shared.made, budget);
  if (own.accepted > kLowest) {
    const int place = place_of_ranked(shared, budget, lane);
    if (place < budget) queues.accepted[place] = own.accepted;
  }
  const int place = own.taken ? place_of_made(shared, budget, budget, lane) : budget;
  own.kept = place < budget;  // the first of those taken, as they come best first
  shared.kept[lane] = own.kept;
  if (own.kept) queues.accepted[place] = own.queued.score;
  if (lane >= budget) return;
  if (lane >= count_of(shared.ranked, budget) + own.drawn) queues.accepted[lane] = kLowest;
  if (lane >= own.drawn) write_entry(queues, lane - own.drawn, own.queued);
  if (lane >= budget - own.drawn) write_entry(queues, lane, no_entry());
}

SPEC_DEVICE inline void find_expanded(const QueueArrays& queues, int lane, const StepLane& own, StepShared& shared) {
  const float worst = queues.accepted[queues.budget - 1];  // -inf where G is not full
  const bool expands = own.kept && shared.inner[lane] && own.queued.score > worst;
  shared.expands[lane] = expands;
  shared.mass[lane] = expands ? exp(static_cast<double>(own.queued.score)) : 0.0;
  shared.ranked[lane] = lane < queues.budget ? queues.accepted[lane] : kLowest;
  shared.made[lane] = lane < queues.budget ? queues.scores[lane] : kLowest;
}

// For half = kCapacity / 2, / 4, ... 1: a sum in an order of its own, the same in every run.
SPEC_DEVICE inline void fold_mass(int half, int lane, StepShared& shared) {
  if (lane < half) shared.mass[lane] += shared.mass[lane + half];
}

// ---- what comes out

// Write the bound as best_first_bound does.
SPEC_DEVICE inline void write_bound(const QueueArrays& queues, int lane, const StepShared& shared) {
  const int budget = static_cast<int>(queues.budget), last = budget - 1;
  if (lane == 0 && count_of(shared.ranked, budget) + count_of(shared.made, budget) < budget) *queues.bound = kLowest;
  if (shared.ranked[lane] > kLowest && place_of_ranked(shared, budget, lane) == last)
    *queues.bound = shared.ranked[lane];
  if (shared.made[lane] > kLowest && place_of_made(shared, budget, budget, lane) == last)
    *queues.bound = shared.made[lane];
}

SPEC_DEVICE inline void write_drawn(const Step& step, int lane, const StepLane& own, const StepShared& shared) {
  const int budget = static_cast<int>(step.queues.budget);
  const int nodes = count_before(shared.kept, budget);
  const int expanded = shared.mass[0] >= step.search.threshold ? count_before(shared.expands, budget) : 0;
  int filled = 0;
  if (expanded == 0 && step.search.fill) {  // as fill_count: of those that wait, as far as G has room
    const int room = budget - count_of(shared.ranked, budget), waiting = count_of(shared.made, budget);
    filled = room < waiting ? room : waiting;
  }
  if (lane == 0) *step.out.nodes = nodes + filled;
  if (lane == 0) *step.out.expanded = expanded;
  if (lane >= budget) return;
  if (own.kept) write_node(step.out, lane, own.queued);
  if (lane >= own.drawn && lane - own.drawn < filled) write_node(step.out, nodes + lane - own.drawn, own.queued);
  if (lane >= nodes + filled) step.out.parents[lane] = 0, step.out.tokens[lane] = 0, step.out.log_probs[lane] = 0.0f;
  if (expanded > 0 && shared.expands[lane]) step.out.expand[count_before(shared.expands, lane)] = lane;
  if (lane >= expanded && lane < step.search.batch) step.out.expand[lane] = 0;
}

SPEC_DEVICE inline void write_nothing(const Step& step, int lane) {
  if (lane == 0) *step.out.nodes = *step.out.expanded = 0;
  if (lane >= step.queues.budget) return;
  step.out.parents[lane] = 0, step.out.tokens[lane] = 0, step.out.log_probs[lane] = 0.0f;
  if (lane < step.search.batch) step.out.expand[lane] = 0;
}

// Step as step_queues does, but NaN counts as -inf. lanes(work): work(lane, own) by every lane, and a barrier.
template <typename Lanes>
SPEC_DEVICE inline void step_on_lanes(const Step& step, bool going, bool begins, StepShared& shared, Lanes& lanes) {
  if (!going) {
    lanes([&](int lane, StepLane&) { write_nothing(step, lane); });
    return;
  }
  lanes([&](int lane, StepLane& own) { read_queues(step.queues, begins, lane, own); });
  for (int64_t first = 0; first < step.found.count; first += kCapacity) {
    lanes([&](int lane, StepLane& own) { offer(step.found, first, lane, own, shared); });
    lanes([&](int lane, StepLane& own) { merge(step.queues, lane, own, shared); });
    lanes([&](int lane, StepLane& own) { read_merged(step.queues, lane, own); });
  }
  lanes([&](int lane, StepLane& own) { find_inner(step.search, lane, own, shared); });
  lanes([&](int lane, StepLane& own) { take(step.search, lane, own, shared); });
  lanes([&](int lane, StepLane& own) { accept(step.queues, lane, own, shared); });
  lanes([&](int lane, StepLane& own) { find_expanded(step.queues, lane, own, shared); });
  for (int half = kCapacity / 2; half > 0; half /= 2)
    lanes([&](int lane, StepLane&) { fold_mass(half, lane, shared); });
  lanes([&](int lane, StepLane& own) {
    write_bound(step.queues, lane, shared);
    write_drawn(step, lane, own, shared);
  });
}

}  // namespace spec
