// The best-first queues as kernels of one block, capturable, without a host read.
#include <cuda_runtime.h>

#include "spec/device_abi.hpp"
#include "spec/device_best_first.hpp"

namespace {

using namespace spec;

__global__ void start_kernel(DeviceQueues* queues, int budget, int batch, int max_depth, float* bound) {
  start_queues(*queues, budget, batch, max_depth, bound);
}

__global__ void __launch_bounds__(kCapacity) push_kernel(DeviceQueues* queues, DeviceRun run, const int32_t* count,
                                                         float* bound, int32_t* refused) {
  __shared__ MergeScores scores;
  const int lane = threadIdx.x;
  if (count != nullptr) run.count = smaller(*count, run.count);
  if (__syncthreads_or(sees_nan(run, lane))) {
    if (lane == 0) *refused = 1;
    return;
  }
  for (int first = 0; first < run.count; first += kCapacity) {
    PushLane own;
    read_run(*queues, run, first, lane, own, scores);
    __syncthreads();
    write_queue(*queues, lane, own, scores);
    __syncthreads();
  }
  read_both(*queues, lane, scores);
  __syncthreads();
  write_bound(*queues, lane, scores, bound);
}

__global__ void __launch_bounds__(kCapacity) draw_kernel(DeviceQueues* queues, bool expands, double threshold,
                                                         DrawOutputs out) {
  __shared__ DrawScratch scratch;
  const int lane = threadIdx.x;
  DrawLane own;
  read_queue(*queues, expands, lane, own, scratch);
  __syncthreads();
  if (expands) find_last_of_batch(*queues, lane, scratch);
  __syncthreads();
  read_drawn(*queues, lane, own, scratch);
  __syncthreads();
  write_accepted(*queues, lane, own, scratch);
  __syncthreads();
  write_nodes(*queues, expands, lane, own, scratch, out);
  __syncthreads();
  write_expand(lane, scratch, out);
  for (int half = kCapacity / 2; half > 0; half /= 2) {
    fold_mass(half, lane, scratch);
    __syncthreads();
  }
  write_mass(threshold, lane, scratch, out);
}

}  // namespace

int64_t spec_queues_bytes() { return sizeof(DeviceQueues); }

int spec_queues_start(void* queues, int budget, int batch, int max_depth, float* bound, void* stream) {
  if (budget < 1 || budget > kCapacity || batch < 1 || max_depth < 1) return cudaErrorInvalidValue;
  start_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<DeviceQueues*>(queues), budget, batch,
                                                               max_depth, bound);
  return cudaGetLastError();
}

int spec_queues_push(void* queues, const int64_t* rows, const int64_t* nodes, const int64_t* depths_of_nodes,
                     const int64_t* tokens, const float* log_probs, const float* scores, const int32_t* count, int most,
                     float* bound, int32_t* refused, void* stream) {
  if (most < 0) return cudaErrorInvalidValue;
  const DeviceRun run{rows, nodes, depths_of_nodes, tokens, log_probs, scores, most};
  push_kernel<<<1, kCapacity, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<DeviceQueues*>(queues), run, count,
                                                                      bound, refused);
  return cudaGetLastError();
}

int spec_queues_draw(void* queues, int expands, double threshold, int64_t* parents, int64_t* tokens, float* log_probs,
                     int32_t* nodes, int64_t* expand, int32_t* expanded, double* mass, int32_t* alive, void* stream) {
  const DrawOutputs out{parents, tokens, log_probs, nodes, expand, expanded, mass, alive};
  draw_kernel<<<1, kCapacity, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<DeviceQueues*>(queues), expands != 0,
                                                                      threshold, out);
  return cudaGetLastError();
}
