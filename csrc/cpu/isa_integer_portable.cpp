// Integer products in the compiler's own vectors of four: SSE2 on x86, NEON on aarch64. The table of these formats for packing
// is here as well.
#include <cstdint>
#include <type_traits>

#include "cpu/isa.hpp"
#include "cpu/isa_region.hpp"
#include "cpu/packing.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace cpu {

namespace integer_portable_set {
#include "cpu/kernels/lanes_4.inl"

// a * b + c, rounded once.
#if defined(__aarch64__)
constexpr int kRegisters = 32;
constexpr const char* kName = "neon";
CPU_INLINE vf fused(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
constexpr int kRegisters = 16;
constexpr const char* kName = "portable";
#include "cpu/kernels/fused_by_doubles.inl"
CPU_INLINE vf fused(vf a, vf b, vf c) { return fused_by_doubles(a, b, c); }
#endif

#include "cpu/kernels/numbers.inl"
#include "cpu/kernels/weights.inl"
#include "cpu/kernels/floats.inl"
#include "cpu/kernels/integer_lanes_4.inl"
#include "cpu/kernels/integer_formats.inl"
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "cpu/kernels/integer_dot_4.inl"
#else
#include "cpu/kernels/integer_words_4.inl"
#endif
#include "cpu/kernels/integer_rows.inl"
#include "cpu/kernels/integer_floats.inl"
#include "cpu/kernels/integer_products.inl"
#include "cpu/kernels/queries.inl"
#include "cpu/kernels/attention.inl"
#include "cpu/kernels/table.inl"
}  // namespace integer_portable_set

namespace {

const Kernels* find() {
  static constexpr Kernels kernels = integer_portable_set::table(
      integer_portable_set::kName, integer_portable_set::attend_in_order, kInteger, integer_portable_set::expand_output);
  return &kernels;
}

const InstructionSet registered(find, 100);

}  // namespace

const Stored& stored_integers(int index) {
  using namespace integer_portable_set::integers;
  static const Stored known[] = {
#define CPU_STORED(name) \
  {"int_" #name, name::kLayout, name::kFileInputs, name::kFileBytes, name::kMostInputs, name::put, name::quantize},
      CPU_INTEGERS(CPU_STORED)
#undef CPU_STORED
  };
  return known[index];
}

}  // namespace cpu
