// The queues of a best-first search: one block, one launch per pass, capturable, without a host read. NVRTC compiles it
// at run time (specengine/ops/cuda.py).
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
