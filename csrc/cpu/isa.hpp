// The instruction sets that this build has and this CPU runs, the fastest first.
#pragma once

#include <vector>

#include "cpu/kernels.hpp"

namespace cpu {

inline std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found;
  for (const Kernels* one : {amx_kernels(), avx512bf16_kernels(), avx512_kernels(), avx2_kernels(), portable_kernels()})
    if (one) found.push_back(one);
  return found;
}

}  // namespace cpu
