// The compiler's own vectors of four floats: SSE2 on x86, NEON on aarch64.
#include <cstdint>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/packing.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace cpu {

namespace portable_set {
#define CPU_LANES 4
#define CPU_PAIRS 0
#define CPU_AMX 0
#include "cpu/kernels.inl"
}  // namespace portable_set

const Kernels* portable_kernels() {
#if defined(__aarch64__)
  static const Kernels kernels = portable_set::table("neon");
#else
  static const Kernels kernels = portable_set::table("portable");
#endif
  return &kernels;
}

}  // namespace cpu
