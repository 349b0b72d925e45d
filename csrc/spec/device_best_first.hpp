// The queues of best_first.hpp in device memory, worked on by one block with one lane per element. Each function is
// what a lane does between two barriers; places are found by counting the better ones, so that lanes do not depend on
// each other.
#pragma once

#include <cmath>
#include <cstdint>

#include "spec/best_first.hpp"

namespace spec {

constexpr int kCapacity = 256;  // elements of a queue, and lanes of the block

struct DeviceQueues {
  int32_t budget, batch, max_depth;  // budget <= kCapacity
  int32_t accepted_count, queue_count;
  float accepted[kCapacity];    // G, best first
  QueueEntry queue[kCapacity];  // Q, best first
};

// Candidates in order of creation. The parent of candidate i is nodes[rows[i]], or nodes[i] where rows is null.
struct DeviceRun {
  const int64_t *rows, *nodes, *depths_of_nodes, *tokens;
  const float *log_probs, *scores;
  int count;
};

// Two runs that are merged; from their counts on -inf. Of equal scores those of `made` come later.
struct MergeScores {
  int ranked_count, made_count;
  float ranked[kCapacity], made[kCapacity];
};

SPEC_HD inline int place_of_ranked(const MergeScores& scores, int lane) {
  const float own = scores.ranked[lane];
  int place = lane;
  for (int other = 0; other < scores.made_count; ++other) place += scores.made[other] > own;
  return place;
}

SPEC_HD inline int place_of_made(const MergeScores& scores, int lane) {
  const float own = scores.made[lane];
  int place = 0;
  for (int other = 0; other < scores.ranked_count; ++other) place += scores.ranked[other] >= own;
  for (int other = 0; other < scores.made_count; ++other) {
    const float made = scores.made[other];
    place += made > own || (made == own && other < lane);
  }
  return place;
}

SPEC_HD inline int smaller(int a, int b) { return a < b ? a : b; }

SPEC_HD inline int count_before(const int32_t* flags, int lane) {
  int count = 0;
  for (int other = 0; other < lane; ++other) count += flags[other] != 0;
  return count;
}

// ---- start

SPEC_HD inline void start_queues(DeviceQueues& queues, int budget, int batch, int max_depth, float* bound) {
  queues.budget = budget;
  queues.batch = batch;
  queues.max_depth = max_depth;
  queues.accepted[0] = 0.0f;  // the root
  queues.accepted_count = 1;
  queues.queue_count = 0;
  *bound = budget == 1 ? 0.0f : kLowest;
}

// ---- push: candidates kCapacity at a time

struct PushLane {
  QueueEntry queued, made;
  int queue_count;
};

SPEC_HD inline bool sees_nan(const DeviceRun& run, int lane) {
  bool found = false;
  for (int i = lane; i < run.count; i += kCapacity) found |= run.scores[i] != run.scores[i];
  return found;
}

SPEC_HD inline void read_run(const DeviceQueues& queues, const DeviceRun& run, int first, int lane, PushLane& own,
                             MergeScores& scores) {
  own.queue_count = queues.queue_count;
  scores.ranked[lane] = scores.made[lane] = kLowest;
  if (lane == 0) scores.ranked_count = own.queue_count;
  if (lane == 0) scores.made_count = smaller(run.count - first, kCapacity);
  if (lane < own.queue_count) {
    own.queued = queues.queue[lane];
    scores.ranked[lane] = own.queued.score;
  }
  const int i = first + lane;
  if (i < run.count && run.scores[i] > kLowest) {
    const int64_t place = run.rows == nullptr ? i : run.rows[i];
    own.made = {run.scores[i], run.log_probs[i], run.nodes[place], run.tokens[i], run.depths_of_nodes[place] + 1};
    scores.made[lane] = own.made.score;
  }
}

SPEC_HD inline void write_queue(DeviceQueues& queues, int lane, const PushLane& own, const MergeScores& scores) {
  if (lane < own.queue_count) {
    const int place = place_of_ranked(scores, lane);
    if (place < queues.budget) queues.queue[place] = own.queued;
  }
  if (scores.made[lane] > kLowest) {
    const int place = place_of_made(scores, lane);
    if (place < queues.budget) queues.queue[place] = own.made;
  }
  if (lane == 0) {
    int made = 0;
    for (int other = 0; other < scores.made_count; ++other) made += scores.made[other] > kLowest;
    queues.queue_count = smaller(queues.budget, own.queue_count + made);
  }
}

SPEC_HD inline void read_both(const DeviceQueues& queues, int lane, MergeScores& scores) {
  if (lane == 0) scores.ranked_count = queues.accepted_count;
  if (lane == 0) scores.made_count = queues.queue_count;
  scores.ranked[lane] = lane < queues.accepted_count ? queues.accepted[lane] : kLowest;
  scores.made[lane] = lane < queues.queue_count ? queues.queue[lane].score : kLowest;
}

// As best_first_bound.
SPEC_HD inline void write_bound(const DeviceQueues& queues, int lane, const MergeScores& scores, float* bound) {
  const int last = queues.budget - 1;
  if (lane == 0 && queues.accepted_count + queues.queue_count <= last) *bound = kLowest;
  if (lane < queues.accepted_count && place_of_ranked(scores, lane) == last) *bound = scores.ranked[lane];
  if (lane < queues.queue_count && place_of_made(scores, lane) == last) *bound = scores.made[lane];
}

// ---- pop and fill

struct DrawScratch {
  MergeScores scores;
  double mass[kCapacity];
  int32_t inner[kCapacity], kept[kCapacity], expands[kCapacity];
  int count;  // drawn from Q
};

struct DrawLane {
  QueueEntry entry;
  int queue_count, accepted_count;
};

// Each list has room for kCapacity; what they hold from their counts on is undefined.
struct DrawOutputs {
  int64_t *parents, *tokens;
  float* log_probs;
  int32_t* nodes;
  int64_t* expand;
  int32_t* expanded;
  double* mass;    // sum of the path probabilities of those expanded
  int32_t* alive;  // whether there are such and their mass reaches the threshold
};

SPEC_HD inline void read_queue(const DeviceQueues& queues, bool expands, int lane, DrawLane& own,
                               DrawScratch& scratch) {
  own.queue_count = queues.queue_count;
  own.accepted_count = queues.accepted_count;
  scratch.inner[lane] = 0;
  if (lane < own.queue_count) {
    own.entry = queues.queue[lane];
    scratch.inner[lane] = own.entry.depth < queues.max_depth;
  }
  const int room = expands ? kCapacity : queues.budget - own.accepted_count;
  if (lane == 0) scratch.count = smaller(room, own.queue_count);
}

// As pop_count: as far as the batch-th above the greatest depth.
SPEC_HD inline void find_last_of_batch(const DeviceQueues& queues, int lane, DrawScratch& scratch) {
  if (scratch.inner[lane] && count_before(scratch.inner, lane) == queues.batch - 1) scratch.count = lane + 1;
}

SPEC_HD inline void read_drawn(const DeviceQueues& queues, int lane, const DrawLane& own, DrawScratch& scratch) {
  if (lane == 0) scratch.scores.ranked_count = own.accepted_count;
  if (lane == 0) scratch.scores.made_count = scratch.count;
  scratch.scores.ranked[lane] = lane < own.accepted_count ? queues.accepted[lane] : kLowest;
  scratch.scores.made[lane] = lane < scratch.count ? own.entry.score : kLowest;
}

SPEC_HD inline void write_accepted(DeviceQueues& queues, int lane, const DrawLane& own, DrawScratch& scratch) {
  if (lane < own.accepted_count) {
    const int place = place_of_ranked(scratch.scores, lane);
    if (place < queues.budget) queues.accepted[place] = scratch.scores.ranked[lane];
  }
  const int place = lane < scratch.count ? place_of_made(scratch.scores, lane) : kCapacity;
  scratch.kept[lane] = place < queues.budget;  // of those drawn, the first ones, as they come best first
  if (scratch.kept[lane]) queues.accepted[place] = own.entry.score;
  if (lane >= scratch.count && lane < own.queue_count) queues.queue[lane - scratch.count] = own.entry;
  if (lane == 0) {
    queues.accepted_count = smaller(queues.budget, own.accepted_count + scratch.count);
    queues.queue_count = own.queue_count - scratch.count;
  }
}

SPEC_HD inline void write_nodes(const DeviceQueues& queues, bool expands, int lane, const DrawLane& own,
                                DrawScratch& scratch, const DrawOutputs& out) {
  const float worst = queues.accepted_count == queues.budget ? queues.accepted[queues.budget - 1] : kLowest;
  scratch.expands[lane] = expands && scratch.kept[lane] && scratch.inner[lane] && own.entry.score > worst;
  scratch.mass[lane] = scratch.expands[lane] ? std::exp(static_cast<double>(own.entry.score)) : 0.0;
  if (!scratch.kept[lane]) return;
  out.parents[lane] = own.entry.parent;
  out.tokens[lane] = own.entry.token;
  out.log_probs[lane] = own.entry.log_prob;
}

SPEC_HD inline void write_expand(int lane, const DrawScratch& scratch, const DrawOutputs& out) {
  if (scratch.expands[lane]) out.expand[count_before(scratch.expands, lane)] = lane;
  if (lane == 0) *out.nodes = count_before(scratch.kept, scratch.count);
  if (lane == 0) *out.expanded = count_before(scratch.expands, scratch.count);
}

// To be called with half = kCapacity / 2, / 4, ... 1: a sum in an order of its own, the same in every run.
SPEC_HD inline void fold_mass(int half, int lane, DrawScratch& scratch) {
  if (lane < half) scratch.mass[lane] += scratch.mass[lane + half];
}

SPEC_HD inline void write_mass(double threshold, int lane, const DrawScratch& scratch, const DrawOutputs& out) {
  if (lane != 0) return;
  *out.mass = scratch.mass[0];
  *out.alive = *out.expanded > 0 && scratch.mass[0] >= threshold;
}

}  // namespace spec
