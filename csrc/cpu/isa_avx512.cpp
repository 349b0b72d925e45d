// AVX512 as Skylake has it.
#include <cstdint>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/packing.hpp"
#include "cpu/target.hpp"

#if CPU_X86
#include <immintrin.h>

namespace cpu {
namespace {

bool supported() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl"); }

}  // namespace

CPU_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace avx512_set {
#define CPU_LANES 16
#define CPU_PAIRS 0
#define CPU_AMX 0
#include "cpu/kernels.inl"
}  // namespace avx512_set
CPU_TARGET_END

const Kernels* avx512_kernels() {
  static const Kernels kernels = avx512_set::table("avx512");
  return supported() ? &kernels : nullptr;
}

}  // namespace cpu
#else
namespace cpu {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace cpu
#endif
