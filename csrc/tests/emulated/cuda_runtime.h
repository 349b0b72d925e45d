// As much of CUDA as runs the kernels of csrc/*.cu on a CPU, in place of the toolkit's header. A thread is a fiber,
// and a barrier is where fibers change, in an order that is another one each time. A launch is to be written
// `emulated::launch(kernel, ...)(...)`.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#define __global__
#define __shared__ static  // and so of any content at first, as on the device
#define __launch_bounds__(threads)

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct Index {
  unsigned x;
};

inline Index threadIdx, blockIdx;

namespace emulated {

constexpr size_t kStackBytes = 1 << 16;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  bool done = false;
};

inline ucontext_t scheduler;
inline Fiber* current;
inline const std::function<void()>* body;
inline int votes, decided;
inline std::mt19937 generator(1);

inline void enter() {
  (*body)();
  current->done = true;
}

inline void barrier() { swapcontext(&current->context, &scheduler); }

inline void run_block(unsigned threads) {
  std::vector<Fiber> fibers(threads);
  std::vector<unsigned> order(threads);
  for (unsigned i = 0; i < threads; ++i) {
    order[i] = i;
    getcontext(&fibers[i].context);
    fibers[i].context.uc_stack.ss_sp = fibers[i].stack.data();
    fibers[i].context.uc_stack.ss_size = kStackBytes;
    fibers[i].context.uc_link = &scheduler;
    makecontext(&fibers[i].context, enter, 0);
  }
  for (bool some = true; some;) {
    some = false;
    std::shuffle(order.begin(), order.end(), generator);
    for (const unsigned i : order) {
      if (fibers[i].done) continue;
      current = &fibers[i];
      threadIdx.x = i;
      swapcontext(&scheduler, &current->context);
      some |= !fibers[i].done;
    }
    decided = votes;
    votes = 0;
  }
}

template <typename... Parameters>
auto launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t, cudaStream_t) {
  return [=](auto... arguments) {
    const std::function<void()> work = [&] { kernel(arguments...); };
    body = &work;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) run_block(threads);
  };
}

}  // namespace emulated

inline void __syncthreads() { emulated::barrier(); }

inline int __syncthreads_or(int vote) {
  emulated::votes |= vote;
  emulated::barrier();
  return emulated::decided;
}

inline int atomicMin(int* address, int value) {
  const int before = *address;
  *address = std::min(before, value);
  return before;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
