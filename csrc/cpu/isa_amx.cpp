// AMX: tiles of 16 x 16 sums, as Sapphire Rapids has it.
#include <cstdint>
#include <type_traits>

#include "cpu/isa.hpp"
#include "cpu/isa_region.hpp"
#include "cpu/packing.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
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

bool supported() {
  return has_tiles() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}

}  // namespace

CPU_ISA_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16,amx-int8")
namespace amx_set {
#include "cpu/kernels/lanes_16.inl"
#include "cpu/kernels/denormals.inl"
#include "cpu/kernels/numbers.inl"
#include "cpu/kernels/weights.inl"
#include "cpu/kernels/pairs.inl"
#include "cpu/kernels/products.inl"
#include "cpu/kernels/tiles.inl"
#include "cpu/kernels/queries_16.inl"
#include "cpu/kernels/attention_by_tiles.inl"
#include "cpu/kernels/table.inl"
}  // namespace amx_set
CPU_ISA_END

namespace {

const Kernels* find() {
  static constexpr Kernels kernels = amx_set::table("amx", amx_set::attend_by_tiles_or_in_order);
  return supported() ? &kernels : nullptr;
}

const InstructionSet registered(find, 50);

}  // namespace
}  // namespace cpu
#endif
