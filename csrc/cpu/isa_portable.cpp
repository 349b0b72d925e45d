// The compiler's own vectors of four floats: SSE2 on x86, NEON on aarch64. The table of formats for packing is here as well.
#include <cstdint>
#include <type_traits>

#include "cpu/isa.hpp"
#include "cpu/isa_region.hpp"
#include "cpu/packing.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace cpu {

namespace portable_set {
#include "cpu/kernels/lanes_4.inl"

// a * b + c, rounded once where the set can.
#if defined(__aarch64__)
constexpr int kRegisters = 32;
constexpr const char* kName = "neon";
CPU_INLINE vf fused(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
constexpr int kRegisters = 16;
constexpr const char* kName = "portable";
CPU_INLINE vf fused(vf a, vf b, vf c) { return a * b + c; }
#endif

#if defined(__SSE2__)
#include "cpu/kernels/denormals.inl"
#else
static void flush_denormals() {}
static void restore_denormals() {}
#endif

#include "cpu/kernels/numbers.inl"
#include "cpu/kernels/weights.inl"
#include "cpu/kernels/floats.inl"
#include "cpu/kernels/products.inl"
#include "cpu/kernels/rows_of_floats.inl"
#include "cpu/kernels/rows.inl"
#include "cpu/kernels/queries.inl"
#include "cpu/kernels/attention.inl"
#include "cpu/kernels/table.inl"
}  // namespace portable_set

const Kernels* portable_kernels() {
  static constexpr Kernels kernels = portable_set::table(portable_set::kName, portable_set::attend_in_order);
  return &kernels;
}

namespace {
const InstructionSet registered(portable_kernels, 0);
}

const Stored& stored_as(Kind kind) {
  using namespace portable_set::formats;
  static const Stored known[] = {
#define CPU_STORED(name) \
  {#name, name::kLayout, name::kFileInputs, name::kFileBytes, name::kMostInputs, name::put, name::quantize},
      CPU_FORMATS(CPU_STORED)
#undef CPU_STORED
  };
  const int index = static_cast<int>(kind);
  return has_integers(kind) ? stored_integers(index - kFloatKinds) : known[index];
}

}  // namespace cpu
