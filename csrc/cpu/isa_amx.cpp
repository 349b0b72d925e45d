// AMX: tiles of 16 x 16 sums, as Sapphire Rapids has it.
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
  return cpu_has(Feature::amx, Feature::avx512f, Feature::avx512bw, Feature::avx512dq, Feature::avx512vl,
                 Feature::avx512bf16) &&
         may_use_tiles();
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
