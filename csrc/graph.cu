// A captured loop: a conditional WHILE node whose body is a given graph and whose condition is a flag in device memory.
#include <cuda_runtime.h>

#include "spec/device_abi.hpp"

#if CUDART_VERSION < 12040
#error "conditional graph nodes need CUDA 12.4 or later"
#endif

namespace {

// `first` before the loop, not `first` at the end of each round.
__global__ void condition_kernel(cudaGraphConditionalHandle handle, const int32_t* flag, int32_t* rounds, int limit,
                                 bool first) {
  const int32_t done = first ? 0 : *rounds + 1;
  *rounds = done;
  cudaGraphSetConditional(handle, *flag != 0 && done < limit ? 1 : 0);
}

struct Condition {
  cudaGraphConditionalHandle handle;
  const int32_t* flag;
  int32_t* rounds;
  int limit;
};

// Nodes of a graph, each behind the one before. After a failure nothing more is added, and `error` says why.
struct Chain {
  cudaGraph_t graph;
  cudaGraphNode_t last = nullptr;
  cudaError_t error = cudaSuccess;

  const cudaGraphNode_t* before() const { return last == nullptr ? nullptr : &last; }
  size_t count_before() const { return last == nullptr ? 0 : 1; }

  void added(cudaError_t result, cudaGraphNode_t node) {
    error = result;
    if (result == cudaSuccess) last = node;
  }

  void child(void* graph_to_copy) {
    if (error != cudaSuccess || graph_to_copy == nullptr) return;
    cudaGraphNode_t node;
    added(cudaGraphAddChildGraphNode(&node, graph, before(), count_before(), static_cast<cudaGraph_t>(graph_to_copy)),
          node);
  }

  void condition(Condition condition, bool first) {
    if (error != cudaSuccess) return;
    void* arguments[] = {&condition.handle, &condition.flag, &condition.rounds, &condition.limit, &first};
    cudaKernelNodeParams kernel{};
    kernel.func = reinterpret_cast<void*>(condition_kernel);
    kernel.gridDim = kernel.blockDim = dim3(1);
    kernel.kernelParams = arguments;
    cudaGraphNode_t node;
    added(cudaGraphAddKernelNode(&node, graph, before(), count_before(), &kernel), node);
  }

  // Returns the graph that is to be filled with the body.
  cudaGraph_t loop(cudaGraphConditionalHandle handle) {
    if (error != cudaSuccess) return nullptr;
    cudaGraphNodeParams params{};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = handle;
    params.conditional.type = cudaGraphCondTypeWhile;
    params.conditional.size = 1;
    cudaGraphNode_t node;
#if CUDART_VERSION >= 13000
    added(cudaGraphAddNode(&node, graph, before(), nullptr, count_before(), &params), node);
#else
    added(cudaGraphAddNode(&node, graph, before(), count_before(), &params), node);
#endif
    return error == cudaSuccess ? params.conditional.phGraph_out[0] : nullptr;
  }
};

cudaError_t fill(cudaGraph_t graph, void* before, void* body, void* after, Condition condition) {
  const cudaError_t made = cudaGraphConditionalHandleCreate(&condition.handle, graph, 0, 0);
  if (made != cudaSuccess) return made;
  Chain outer{graph};
  outer.child(before);
  outer.condition(condition, true);
  Chain inner{outer.loop(condition.handle)};
  if (outer.error != cudaSuccess) return outer.error;
  inner.child(body);
  inner.condition(condition, false);
  outer.child(after);
  return inner.error != cudaSuccess ? inner.error : outer.error;
}

}  // namespace

int spec_loop_create(void* before, void* body, void* after, const int32_t* flag, int32_t* rounds, int limit,
                     void** loop) {
  if (body == nullptr || flag == nullptr || rounds == nullptr || limit < 1 || loop == nullptr)
    return cudaErrorInvalidValue;
  cudaGraph_t graph;
  cudaError_t error = cudaGraphCreate(&graph, 0);
  if (error != cudaSuccess) return error;
  error = fill(graph, before, body, after, {0, flag, rounds, limit});
  cudaGraphExec_t made = nullptr;
  if (error == cudaSuccess) error = cudaGraphInstantiate(&made, graph, 0);
  cudaGraphDestroy(graph);  // what was instantiated stands on its own
  if (error == cudaSuccess) *loop = made;
  return error;
}

int spec_loop_launch(void* loop, void* stream) {
  return cudaGraphLaunch(static_cast<cudaGraphExec_t>(loop), static_cast<cudaStream_t>(stream));
}

int spec_loop_destroy(void* loop) { return cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(loop)); }
