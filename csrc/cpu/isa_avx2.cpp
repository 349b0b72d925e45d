// AVX2 with FMA.
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
  return cpu_has(Feature::avx2, Feature::fma, Feature::f16c);
}

}  // namespace

CPU_ISA_BEGIN("avx2,fma,f16c")
namespace avx2_set {
#include "cpu/kernels/lanes_8.inl"
#include "cpu/kernels/denormals.inl"
#include "cpu/kernels/numbers.inl"
#include "cpu/kernels/weights.inl"
#include "cpu/kernels/floats.inl"
#include "cpu/kernels/products.inl"
#include "cpu/kernels/rows_of_floats.inl"
#include "cpu/kernels/rows.inl"
#include "cpu/kernels/queries.inl"
#include "cpu/kernels/attention.inl"
#include "cpu/kernels/table.inl"
}  // namespace avx2_set
CPU_ISA_END

namespace {

const Kernels* find() {
  static constexpr Kernels kernels = avx2_set::table("avx2", avx2_set::attend_in_order);
  return supported() ? &kernels : nullptr;
}

const InstructionSet registered(find, 20);

}  // namespace
}  // namespace cpu
#endif
