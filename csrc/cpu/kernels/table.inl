// The kernels that all sets write alike, and the table of them.

#include "cpu/kernels/norms.inl"
#include "cpu/kernels/activations.inl"
#include "cpu/kernels/rotary.inl"
#include "cpu/kernels/best.inl"
#include "cpu/kernels/cache.inl"
#include "cpu/kernels/mixers.inl"

// Made by the compiler: a CPU that has not the set must not run even this.
static constexpr Kernels table(const char* name, void (*attend)(const AttendTask&), const char* numerics = kBfloat16,
                               void (*expand)(const Matrix&, int64_t, float*) = weights) {
  return {name,   numerics, kPairs, begin,  end,  prepare, products, expand, norm,
          copy, gate,     rotate, attend, best, write,   add,      convolve, unit, update, skip};
}
