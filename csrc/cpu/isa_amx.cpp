// AMX: tiles of 16 x 16 sums, as Sapphire Rapids has it.
#include <cstdint>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/packing.hpp"
#include "cpu/target.hpp"

#if CPU_X86
#include <immintrin.h>

#if defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cpu {
namespace {

#if defined(__linux__)
// The CPU has them, and Linux lets this process use them: their state is large, so a process asks once.
bool ask_for_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_tiles() {
  static const bool has = ask_for_tiles();
  return has;
}
#else
bool has_tiles() { return false; }
#endif

bool supported() { return has_tiles() && avx512bf16_kernels() != nullptr; }

}  // namespace

CPU_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16,amx-int8")
namespace amx_set {
#define CPU_LANES 16
#define CPU_PAIRS 1
#define CPU_AMX 1
#include "cpu/kernels.inl"
}  // namespace amx_set
CPU_TARGET_END

const Kernels* amx_kernels() {
  static const Kernels kernels = amx_set::table("amx");
  return supported() ? &kernels : nullptr;
}

}  // namespace cpu
#else
namespace cpu {
const Kernels* amx_kernels() { return nullptr; }
}  // namespace cpu
#endif
