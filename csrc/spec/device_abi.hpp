// What specengine/_cuda.so exports. Every pointer is one of device memory unless it says otherwise; `stream` is a
// cudaStream_t, a graph a cudaGraph_t. Functions return 0 or a CUDA error code, do not wait, allocate nothing (but for
// spec_loop_create) and can be captured. Shapes are fixed; how much of an array is used is read from the device.
#pragma once

#include <cstdint>

#define SPEC_ABI_VERSION 1  // as in specengine/cuda.py

#if defined(__GNUC__)
#define SPEC_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define SPEC_EXPORT extern "C"
#endif

SPEC_EXPORT int spec_abi_version();
SPEC_EXPORT const char* spec_error(int code);  // on the host
SPEC_EXPORT int spec_driver_version(int* version);  // on the host; 0 without a driver

// ---- best-first queues (SALF Alg. 2). queues: spec_queues_bytes() bytes, 16-byte aligned; budget <= 256.

SPEC_EXPORT int64_t spec_queues_bytes();
SPEC_EXPORT int spec_queues_start(void* queues, int budget, int batch, int max_depth, float* bound, void* stream);

// Adds min(*count, most) candidates in order of creation; count may be null for `most`. The parent of candidate i is
// nodes[rows[i]], at depth depths_of_nodes[rows[i]]; rows may be null for i itself. -inf is passed over; where a score
// is NaN nothing is added and *refused becomes 1. bound [1]: the budget-th best of both queues, -inf while they are
// fewer.
SPEC_EXPORT int spec_queues_push(void* queues, const int64_t* rows, const int64_t* nodes,
                                 const int64_t* depths_of_nodes, const int64_t* tokens, const float* log_probs,
                                 const float* scores, const int32_t* count, int most, float* bound, int32_t* refused,
                                 void* stream);

// Draws a batch (expands) or fills up. parents, tokens, log_probs, expand: room for 256 each; nodes, expanded, mass,
// alive: [1]. alive: whether some are expanded and their mass reaches the threshold.
SPEC_EXPORT int spec_queues_draw(void* queues, int expands, double threshold, int64_t* parents, int64_t* tokens,
                                 float* log_probs, int32_t* nodes, int64_t* expand, int32_t* expanded, double* mass,
                                 int32_t* alive, void* stream);

// ---- tree

// Appends *count nodes whose parents the tree has, and writes the frontier [width] of those in `expand`; width may be
// 0, its pointers null then. Where they do not fit nothing is appended and *refused becomes 1.
SPEC_EXPORT int spec_tree_append(int64_t* tokens, int64_t* parents, int64_t* depths, float* log_probs,
                                 float* path_log_probs, int64_t* ancestors, int32_t* size, int capacity, int words,
                                 const int64_t* new_parents, const int64_t* new_tokens, const float* new_log_probs,
                                 const int32_t* count, const int64_t* expand, const int32_t* expanded, int width,
                                 int64_t* frontier, int64_t* frontier_depths, float* frontier_scores, int32_t* refused,
                                 void* stream);

// tokens, parents, chosen: [most], of which min(*size, most) count, or all where size is null; *size >= 1 and
// 1 <= most <= 1024.
// path [most], count [1], bonus [1].
SPEC_EXPORT int spec_walk(const int64_t* tokens, const int64_t* parents, const int64_t* chosen, const int32_t* size,
                          int most, int64_t* path, int32_t* count, int64_t* bonus, void* stream);

// ---- key-value rows

// Row *prefix + path[j] of each plane becomes row *prefix + j, j < *count; slab: [planes, slots, row_bytes], dense.
SPEC_EXPORT int spec_compact_kv(void* slab, int64_t planes, int64_t slots, int64_t row_bytes, const int64_t* path,
                                const int32_t* count, const int32_t* prefix, void* stream);

// ---- captured loop

// before; while (*flag != 0 and *rounds < limit) { body; ++*rounds }; after. *rounds is set to 0 after `before`. The
// graphs are copied; before and after may be null. The body may hold kernels, copies, memsets, child graphs and
// conditional nodes only.
// loop (host): for spec_loop_launch, until spec_loop_destroy. Needs a driver of CUDA 12.4 or later.
SPEC_EXPORT int spec_loop_create(void* before, void* body, void* after, const int32_t* flag, int32_t* rounds, int limit,
                                 void** loop);
SPEC_EXPORT int spec_loop_launch(void* loop, void* stream);
SPEC_EXPORT int spec_loop_destroy(void* loop);
