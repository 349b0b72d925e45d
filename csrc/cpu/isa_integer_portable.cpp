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
CPU_INLINE vf fused(vf a, vf b, vf c) {
  typedef double vd __attribute__((vector_size(8 * W)));
  typedef int64_t vl __attribute__((vector_size(8 * W)));
  // The product is exact in double precision. What the sum loses is seen in its last bit, which is then odd: so the second
  // rounding goes where a single one would.
  const vd product = __builtin_convertvector(a, vd) * __builtin_convertvector(b, vd), other = __builtin_convertvector(c, vd);
  const vd sum = product + other, share = sum - product;
  const vd lost = (product - (sum - share)) + (other - share);
  const vl bits = (vl)sum, away = (vl)((vl)lost ^ bits) < 0 ? vl{} - 1 : vl{} + 1;
  const vl even = (vl)((lost > 0) | (lost < 0)) & ((bits & 1) - 1);
  return __builtin_convertvector((vd)(bits + (away & even)), vf);
}
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
