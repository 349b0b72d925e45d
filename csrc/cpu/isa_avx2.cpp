// AVX2 with FMA.
#include <cstdint>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/packing.hpp"
#include "cpu/target.hpp"

#if CPU_X86
#include <immintrin.h>

namespace cpu {
namespace {

bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace

CPU_TARGET_BEGIN("avx2,fma,f16c")
namespace avx2_set {
#define CPU_LANES 8
#define CPU_PAIRS 0
#define CPU_AMX 0
#include "cpu/kernels.inl"
}  // namespace avx2_set
CPU_TARGET_END

const Kernels* avx2_kernels() {
  static const Kernels kernels = avx2_set::table("avx2");
  return supported() ? &kernels : nullptr;
}

}  // namespace cpu
#else
namespace cpu {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace cpu
#endif
