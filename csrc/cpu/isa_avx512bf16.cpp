// AVX512 with products of bfloat16 pairs, as Zen 4 and Cooper Lake have it.
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
  return cpu_has(Feature::avx512f, Feature::avx512bw, Feature::avx512dq, Feature::avx512vl, Feature::avx512bf16);
}

}  // namespace

CPU_ISA_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
namespace avx512bf16_set {
#include "cpu/kernels/lanes_16.inl"
#include "cpu/kernels/denormals.inl"
#include "cpu/kernels/numbers.inl"
#include "cpu/kernels/weights.inl"
#include "cpu/kernels/pairs.inl"
#include "cpu/kernels/products.inl"
#include "cpu/kernels/rows_of_pairs.inl"
#include "cpu/kernels/rows.inl"
#include "cpu/kernels/queries_16.inl"
#include "cpu/kernels/attention.inl"
#include "cpu/kernels/table.inl"
}  // namespace avx512bf16_set
CPU_ISA_END

namespace {

const Kernels* find() {
  static constexpr Kernels kernels = avx512bf16_set::table("avx512bf16", avx512bf16_set::attend_in_order);
  return supported() ? &kernels : nullptr;
}

const InstructionSet registered(find, 40);

}  // namespace
}  // namespace cpu
#endif
