// Integer products on AVX512 as Skylake has it.
#include <cstdint>
#include <type_traits>

#include "cpu/isa.hpp"
#include "cpu/isa_region.hpp"
#include "cpu/packing.hpp"
#include "cpu/platform.hpp"

#if CPU_X86_64

namespace cpu {
namespace {

bool supported() {
  return cpu_has(Feature::avx512f, Feature::avx512bw, Feature::avx512dq, Feature::avx512vl);
}

}  // namespace

CPU_ISA_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace integer_avx512_set {
#include "cpu/kernels/lanes_16.inl"
#include "cpu/kernels/numbers.inl"
#include "cpu/kernels/weights.inl"
#include "cpu/kernels/floats.inl"
#include "cpu/kernels/integer_lanes_16.inl"
#include "cpu/kernels/integer_formats.inl"
#include "cpu/kernels/integer_maddubs_16.inl"
#include "cpu/kernels/integer_rows.inl"
#include "cpu/kernels/integer_floats.inl"
#include "cpu/kernels/integer_products.inl"
#include "cpu/kernels/queries_16.inl"
#include "cpu/kernels/attention.inl"
#include "cpu/kernels/table.inl"
}  // namespace integer_avx512_set
CPU_ISA_END

namespace {

const Kernels* find() {
  static constexpr Kernels kernels = integer_avx512_set::table(
      "avx512", integer_avx512_set::attend_in_order, kInteger, integer_avx512_set::expand_output);
  return supported() ? &kernels : nullptr;
}

const InstructionSet registered(find, 130);

}  // namespace
}  // namespace cpu
#endif
