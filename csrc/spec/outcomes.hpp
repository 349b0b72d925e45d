// Chances of drafted tokens as tables count them, and the prices of cycles, for the host and for a device; see
// specengine/ops/worth.py. NVRTC reads it too: it has no standard headers, so minima and maxima are written out.
#pragma once

#include <cmath>
#include <cstdint>

#include "spec/lowest.hpp"
#include "spec/vector.hpp"

namespace spec {

constexpr double kWorth = 1e-9;  // tokens: by so little rounding can make equal values differ
constexpr float kOdds = 7.0f;    // the greatest log-odds that a table of chances tells apart
constexpr int64_t kSources = 8, kDepths = 4, kRanks = 5, kKnots = 15, kPlaces = 10, kLevels = 8;
constexpr float kMinChance = 1e-4f, kMaxChance = 0.999f;  // chances
constexpr float kWindow = 150.0f, kPasses = 60.0f;  // tries that a knot remembers, nodes that a level of a profile does

// Where on the knots of a table a log-probability stands: `part` of the way from knot `low` to the next.
struct Knot {
  int64_t low;
  float part;
};

SPEC_HD inline Knot knot_of(float log_prob, int64_t knots) {
  const float odds = log_prob - logf(-expm1f(log_prob));  // NaN above 0, as far as rounding takes a certain one
  const float shown = odds < kOdds ? (odds < -kOdds ? -kOdds : odds) : kOdds;
  const float at = (shown + kOdds) * (static_cast<float>(knots - 1) / (2 * kOdds));
  const auto below = static_cast<int64_t>(at), low = below < knots - 2 ? below : knots - 2;
  return {low, at - static_cast<float>(low)};
}

// The log-chance of a stated log-probability by its cell's row of a table.
SPEC_HD inline float log_chance(float stated, const float* row, int64_t knots) {
  if (!(stated > kLowest)) return stated;
  const Knot at = knot_of(stated, knots);
  return logf(row[at.low] + at.part * (row[at.low + 1] - row[at.low]));
}

// The cell of a node, by group, source, depth and place among its siblings.
SPEC_HD inline int64_t cell_of(int64_t group, int64_t source, int64_t depth, int64_t place) {
  const int64_t deep = depth < 1 ? 0 : depth < kDepths ? depth - 1 : kDepths - 1, rank = place - (place > 3);
  return ((group * kSources + source) * kDepths + deep) * kRanks + (rank < kRanks - 1 ? rank : kRanks - 1);
}

// The level, in a profile of `levels` levels, of a node whose edge has this chance, 0 to 1; the root has level 0.
SPEC_HD inline int64_t level_of(float chance, int64_t levels) {
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

SPEC_HD inline void forget_and_divide(const OutcomeCounts& counts, int64_t knot) {
  const float left = kWindow / counts.tries[knot], kept = left < 1.0f ? left : 1.0f;
  counts.tries[knot] *= kept;
  counts.hits[knot] *= kept;
  const float chance = counts.hits[knot] / counts.tries[knot];
  counts.table[knot] = chance < kMinChance ? kMinChance : chance > kMaxChance ? kMaxChance : chance;
}

// Forgets what a level of a profile had beyond kPasses nodes, and divides its gains by what is left.
SPEC_HD inline void forget_and_divide_level(const OutcomeCounts& counts, int64_t level) {
  const float left = kPasses / counts.passes[level], kept = left < 1.0f ? left : 1.0f;
  counts.passes[level] *= kept;
  for (int64_t at = level * kPlaces; at < (level + 1) * kPlaces; ++at) {
    counts.gains[at] *= kept;
    counts.profile[at] = counts.gains[at] / counts.passes[level];
  }
}

// [verified] and [drafted] seconds and prices; recent: tokens, seconds.
struct Throughput {
  const float *verify, *draft;
  float *verify_price, *draft_price, *recent;
  int64_t verified, drafted;
};

// Enters a cycle, if one token or more was committed.
SPEC_HD inline void enter_cycle(const Throughput& throughput, int64_t committed, float took, float memory) {
  if (committed < 1) return;
  throughput.recent[0] = throughput.recent[0] * memory + static_cast<float>(committed);
  throughput.recent[1] = throughput.recent[1] * memory + took;
}

// The rate of recent cycles, at least that of decoding one token after the other: tokens a second.
SPEC_HD inline float rate_of(const Throughput& throughput) {
  const float recent = throughput.recent[0] / throughput.recent[1], plain = 1 / throughput.verify[1];
  return recent < plain ? plain : recent;
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

  SPEC_HD const float* at(int64_t level) const { return chances + level * places; }
};

}  // namespace spec
