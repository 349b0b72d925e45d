// Integer products on AVX2 with AVX-VNNI, as Alder Lake and Zen 5 have it.
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
  return cpu_has(Feature::avxvnni, Feature::avx2, Feature::fma, Feature::f16c);
}

}  // namespace

CPU_ISA_BEGIN("avx2,fma,f16c,avxvnni")
namespace integer_avxvnni_set {
#include "cpu/kernels/lanes_8.inl"
#include "cpu/kernels/numbers.inl"
#include "cpu/kernels/weights.inl"
#include "cpu/kernels/floats.inl"
#include "cpu/kernels/integer_lanes_8.inl"
#include "cpu/kernels/integer_formats.inl"
#include "cpu/kernels/integer_vnni_8.inl"
#include "cpu/kernels/integer_rows.inl"
#include "cpu/kernels/integer_floats.inl"
#include "cpu/kernels/integer_products.inl"
#include "cpu/kernels/queries.inl"
#include "cpu/kernels/attention.inl"
#include "cpu/kernels/table.inl"
}  // namespace integer_avxvnni_set
CPU_ISA_END

namespace {

const Kernels* find() {
  static constexpr Kernels kernels = integer_avxvnni_set::table(
      "avxvnni", integer_avxvnni_set::attend_in_order, kInteger, integer_avxvnni_set::expand_output);
  return supported() ? &kernels : nullptr;
}

const InstructionSet registered(find, 120);

}  // namespace
}  // namespace cpu
#endif
