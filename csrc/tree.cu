// Appending nodes to a tree in device memory, and the walk down the chosen tokens, as kernels of one block.
#include <cuda_runtime.h>

#include "spec/device_abi.hpp"
#include "spec/device_tree.hpp"

namespace {

using namespace spec;

constexpr int kBlockSize = 256;

__global__ void __launch_bounds__(kBlockSize)
    append_kernel(DeviceTree tree, NewNodes made, const int32_t* count, Frontier frontier, const int32_t* expanded,
                  int32_t* refused) {
  const int lane = threadIdx.x, start = *tree.size;
  made.count = *count;
  frontier.expanded = frontier.width > 0 ? *expanded : 0;
  if (start + made.count > tree.capacity) {
    if (lane == 0) *refused = 1;
    made.count = frontier.expanded = 0;
  }
  append_nodes(tree, made, start, lane, kBlockSize);
  __syncthreads();
  write_frontier(tree, frontier, start, lane, kBlockSize);
  if (lane == 0) *tree.size = start + made.count;
}

__global__ void __launch_bounds__(kBlockSize)
    walk_kernel(const int64_t* tokens, const int64_t* parents, const int64_t* chosen, const int32_t* size, int most,
                int64_t* path, int32_t* count, int64_t* bonus) {
  __shared__ int32_t chosen_child[kMostWalked];
  const int nodes = size == nullptr || *size > most ? most : *size;
  for (int node = threadIdx.x; node < nodes; node += kBlockSize) chosen_child[node] = kNoChild;
  __syncthreads();
  for (int node = threadIdx.x; node < nodes; node += kBlockSize)
    if (is_chosen(tokens, parents, chosen, node)) atomicMin(&chosen_child[parents[node]], node);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int length = follow(chosen_child, path);
  *count = length;
  *bonus = chosen[path[length - 1]];
}

}  // namespace

int spec_tree_append(int64_t* tokens, int64_t* parents, int64_t* depths, float* log_probs, float* path_log_probs,
                     int64_t* ancestors, int32_t* size, int capacity, int words, const int64_t* new_parents,
                     const int64_t* new_tokens, const float* new_log_probs, const int32_t* count, const int64_t* expand,
                     const int32_t* expanded, int width, int64_t* frontier, int64_t* frontier_depths,
                     float* frontier_scores, int32_t* refused, void* stream) {
  if (capacity < 1 || words < (capacity + 63) / 64 || width < 0) return cudaErrorInvalidValue;
  const DeviceTree tree{tokens,         parents, depths,   log_probs,
                        path_log_probs, reinterpret_cast<uint64_t*>(ancestors), size, capacity, words};
  const NewNodes made{new_parents, new_tokens, new_log_probs, 0};
  const Frontier out{expand, 0, width, frontier, frontier_depths, frontier_scores};
  append_kernel<<<1, kBlockSize, 0, static_cast<cudaStream_t>(stream)>>>(tree, made, count, out, expanded, refused);
  return cudaGetLastError();
}

int spec_walk(const int64_t* tokens, const int64_t* parents, const int64_t* chosen, const int32_t* size, int most,
              int64_t* path, int32_t* count, int64_t* bonus, void* stream) {
  if (most < 1 || most > kMostWalked) return cudaErrorInvalidValue;
  walk_kernel<<<1, kBlockSize, 0, static_cast<cudaStream_t>(stream)>>>(tokens, parents, chosen, size, most, path, count,
                                                                       bonus);
  return cudaGetLastError();
}
