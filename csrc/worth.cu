// The rule of a search that weighs worth against costs: one block and one launch per level, per choice of whom to verify,
// per tree of these and per outcome, capturable, without a host read. nvcc builds it at installation, NVRTC the kernels alone at run time
// (specengine/ops/_nvrtc.py); both without fused products and sums, which would not have the bits of spec/worth.hpp.
#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>

#include "spec/device_abi.hpp"
#endif

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

#ifndef __CUDACC_RTC__
namespace {

template <typename Args>
int start(void (*kernel)(Args), const void* args, void* stream) {
  const Args& given = *static_cast<const Args*>(args);
  const auto bytes = static_cast<int>(bytes_of(given));
  if (bytes > kMostShared) return cudaErrorInvalidValue;
  if (bytes > kPlainShared)
    if (const auto code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return code;
  kernel<<<1, kRuleLanes, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)>>>(given);
  return cudaGetLastError();
}

}  // namespace

int spec_worth_level(const void* args, void* stream) { return start(level_kernel, args, stream); }
int spec_worth_keep(const void* args, void* stream) { return start(keep_kernel, args, stream); }
int spec_worth_extract(const void* args, void* stream) { return start(extract_kernel, args, stream); }
int spec_worth_outcome(const void* args, void* stream) { return start(outcome_kernel, args, stream); }
#endif
