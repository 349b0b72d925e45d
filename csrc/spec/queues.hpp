// The queues of a best-first search as their owner keeps them, for the host and for a device. Source: SALF Alg. 2.
#pragma once

#include <cstdint>

#include "spec/lowest.hpp"
#include "spec/vector.hpp"

namespace spec {

struct QueueEntry {
  float score;     // path log-probability
  float log_prob;  // of the edge
  int64_t parent, token, depth;
};

// Best first, behind their ends -inf: accepted, of G, the others, of Q. [budget] each; bound: one number.
struct QueueArrays {
  float *accepted, *scores, *log_probs;
  int64_t *parents, *depths, *tokens;
  float* bound;
  int64_t budget;
};

// Candidates, best first. The parent of candidate i is nodes[rows[i]], its depth one more than depths[parent], its token
// token_ids[columns[i]], or columns[i] where token_ids is null.
struct FoundArrays {
  const int64_t *rows, *columns;
  const float *log_probs, *scores;
  int64_t count;
  const int64_t *nodes, *depths, *token_ids;
};

struct Search {
  int64_t batch, max_depth;
  double threshold;  // least mass of a batch that is drafted from
  bool fill;
};

// [budget] each, from the counts on 0; expand: [min(batch, budget)].
struct DrawnArrays {
  int64_t *parents, *tokens;
  float* log_probs;
  int32_t* nodes;
  int64_t* expand;
  int32_t* expanded;
};

SPEC_HD inline QueueEntry no_entry() { return {kLowest, 0.0f, 0, 0, 0}; }

SPEC_HD inline QueueEntry read_entry(const QueueArrays& arrays, int64_t i) {
  return {arrays.scores[i], arrays.log_probs[i], arrays.parents[i], arrays.tokens[i], arrays.depths[i]};
}

SPEC_HD inline void write_entry(const QueueArrays& arrays, int64_t i, const QueueEntry& entry) {
  arrays.scores[i] = entry.score;
  arrays.log_probs[i] = entry.log_prob;
  arrays.parents[i] = entry.parent;
  arrays.depths[i] = entry.depth;
  arrays.tokens[i] = entry.token;
}

SPEC_HD inline QueueEntry candidate(const FoundArrays& found, int64_t i) {
  const int64_t parent = found.nodes[found.rows[i]], column = found.columns[i];
  const int64_t token = found.token_ids == nullptr ? column : found.token_ids[column];
  return {found.scores[i], found.log_probs[i], parent, token, found.depths[parent] + 1};
}

SPEC_HD inline void write_node(const DrawnArrays& out, int64_t i, const QueueEntry& entry) {
  out.parents[i] = entry.parent;
  out.tokens[i] = entry.token;
  out.log_probs[i] = entry.log_prob;
}

}  // namespace spec
