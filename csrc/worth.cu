// The rule of a search that weighs worth against costs: one block and one launch per level, per choice of whom to verify,
// per tree of these and per outcome, capturable, without a host read. NVRTC compiles it at run time
// (specengine/ops/cuda.py), without fused products and sums, which would not have the bits of spec/worth.hpp.
#include "spec/device_worth.hpp"

namespace {

using namespace spec;

struct BlockLanes {
  template <typename Work>
  __device__ void operator()(Work work) {
    work(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
};

extern __shared__ double block_memory[];

}  // namespace

extern "C" __global__ void __launch_bounds__(kRuleLanes) level_kernel(const LevelArgs args) {
  BlockLanes lanes;
  level_on_lanes(args, reinterpret_cast<char*>(block_memory), lanes);
}

extern "C" __global__ void __launch_bounds__(kRuleLanes) keep_kernel(const KeepArgs args) {
  BlockLanes lanes;
  keep_on_lanes(args, reinterpret_cast<char*>(block_memory), lanes);
}

extern "C" __global__ void __launch_bounds__(kRuleLanes) extract_kernel(const ExtractArgs args) {
  BlockLanes lanes;
  extract_on_lanes(args, reinterpret_cast<char*>(block_memory), lanes);
}

extern "C" __global__ void __launch_bounds__(kRuleLanes) outcome_kernel(const OutcomeArgs args) {
  BlockLanes lanes;
  outcome_on_lanes(args, reinterpret_cast<char*>(block_memory), lanes);
}
