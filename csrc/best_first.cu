// The queues of a best-first search: one block, one launch per pass, capturable, without a host read. nvcc builds it at
// installation, NVRTC the kernel alone at run time (specengine/ops/_nvrtc.py).
#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>

#include "spec/device_abi.hpp"
#endif

#include "spec/device_best_first.hpp"

namespace {

using namespace spec;

struct BlockLanes {
  StepLane own;

  template <typename Work>
  __device__ void operator()(Work work) {
    work(static_cast<int>(threadIdx.x), own);
    __syncthreads();
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kCapacity)
    step_kernel(Step step, const int32_t* found_live, const int32_t* frontier_live, const int32_t* passes) {
  __shared__ StepShared shared;
  BlockLanes lanes;
  if (*found_live < step.found.count) step.found.count = *found_live;
  step_on_lanes(step, *frontier_live > 0, *passes == 1, shared, lanes);
}

#ifndef __CUDACC_RTC__
int spec_queues_step(float* accepted, float* scores, float* log_probs, int64_t* parents, int64_t* depths,
                     int64_t* tokens, float* bound, int budget, const int64_t* rows, const int64_t* columns,
                     const float* found_log_probs, const float* found_scores, const int32_t* found_live, int most,
                     const int64_t* nodes, const int32_t* frontier_live, const int64_t* depths_of_nodes,
                     const int64_t* token_ids, const int32_t* passes, int64_t batch, int64_t max_depth,
                     double threshold, int fill, int64_t* drawn_parents, int64_t* drawn_tokens, float* drawn_log_probs,
                     int32_t* drawn_live, int64_t* expand, int32_t* expand_live, void* stream) {
  if (budget < 1 || budget > kCapacity || most < 0 || batch < 1 || max_depth < 1) return cudaErrorInvalidValue;
  const Step step{{accepted, scores, log_probs, parents, depths, tokens, bound, budget},
                  {rows, columns, found_log_probs, found_scores, most, nodes, depths_of_nodes, token_ids},
                  {batch, max_depth, threshold, fill != 0},
                  {drawn_parents, drawn_tokens, drawn_log_probs, drawn_live, expand, expand_live}};
  step_kernel<<<1, kCapacity, 0, static_cast<cudaStream_t>(stream)>>>(step, found_live, frontier_live, passes);
  return cudaGetLastError();
}
#endif
