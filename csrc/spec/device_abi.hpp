// The exports of specengine/_cuda.so. Pointers are to device memory unless stated otherwise; `stream` is a
// cudaStream_t. Functions return 0 or a CUDA error code, do not wait, allocate nothing and can be captured. Shapes are fixed; how much of an array is used is read from the device.
#pragma once

#include <cstdint>

#define SPEC_ABI_VERSION 4  // as in specengine/ops/cuda.py

#if defined(__GNUC__)
#define SPEC_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define SPEC_EXPORT extern "C"
#endif

SPEC_EXPORT int spec_abi_version();
SPEC_EXPORT const char* spec_error(int code);  // on the host
SPEC_EXPORT int spec_driver_version(int* version);  // on the host; 0 without a driver

// ---- best-first queues (SALF Alg. 2)

// One pass of a search, as spec::step_queues (best_first.hpp) does it over the same arrays; a score of NaN counts as
// -inf. accepted to tokens: [budget], 1 <= budget <= 256; rows to found_scores: [most], of which min(*found_live, most)
// count; token_ids may be null. Where *frontier_live is 0 nothing changes and nothing is drawn; where *passes is 1 the
// queues begin anew. drawn_parents to drawn_log_probs: [budget]; expand: [min(batch, budget)]; from their counts on 0.
SPEC_EXPORT int spec_queues_step(float* accepted, float* scores, float* log_probs, int64_t* parents, int64_t* depths,
                                 int64_t* tokens, float* bound, int budget, const int64_t* rows,
                                 const int64_t* columns, const float* found_log_probs, const float* found_scores,
                                 const int32_t* found_live, int most, const int64_t* nodes,
                                 const int32_t* frontier_live, const int64_t* depths_of_nodes,
                                 const int64_t* token_ids, const int32_t* passes, int64_t batch, int64_t max_depth,
                                 double threshold, int fill, int64_t* drawn_parents, int64_t* drawn_tokens,
                                 float* drawn_log_probs, int32_t* drawn_live, int64_t* expand, int32_t* expand_live,
                                 void* stream);


// ---- the rule of a search that weighs worth against costs (spec/device_worth.hpp)

// args: on the host, LevelArgs, KeepArgs, ExtractArgs and OutcomeArgs. An error where the block has not the memory that they need.
SPEC_EXPORT int spec_worth_level(const void* args, void* stream);
SPEC_EXPORT int spec_worth_keep(const void* args, void* stream);
SPEC_EXPORT int spec_worth_extract(const void* args, void* stream);
SPEC_EXPORT int spec_worth_outcome(const void* args, void* stream);
