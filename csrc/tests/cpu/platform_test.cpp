// What cpu/platform.hpp reads from the CPU itself, against the compiler's own reading, and the memory that it takes.
#include "cpu/platform.hpp"

#include <algorithm>

#include "tests/cpu/common.hpp"

namespace cpu_test {

void test_platform() {
#if CPU_X86_64 && defined(__GNUC__) && !defined(_WIN32)
  using cpu::Feature;
#define SAME(name) check(cpu::cpu_has(Feature::name) == !!__builtin_cpu_supports(#name), "has " #name, 0)
  SAME(avx2), SAME(fma), SAME(avx512f), SAME(avx512bw), SAME(avx512dq), SAME(avx512vl), SAME(avx512vnni), SAME(avx512bf16);
#undef SAME
  check(cpu::cpu_has(Feature::avx2, Feature::fma) == (cpu::cpu_has(Feature::avx2) && cpu::cpu_has(Feature::fma)),
        "has both", 0);
#endif
  for (const size_t alignment : {64, 4096, 2 << 20}) {
    void* memory = cpu::allocate(alignment, 2 * alignment);
    check(memory && reinterpret_cast<uintptr_t>(memory) % alignment == 0, "aligned", static_cast<int64_t>(alignment));
    cpu::release(memory);
  }
  const size_t bytes = 3 * cpu::kLargePage;
  for (int time = 0; time < 2; ++time) {
    auto* pages = static_cast<uint8_t*>(cpu::allocate_pages(bytes));
    check(pages && reinterpret_cast<uintptr_t>(pages) % cpu::kLargePage == 0, "aligned pages", time);
    check(std::count(pages, pages + bytes, 0) == static_cast<int64_t>(bytes), "zeroed pages", time);
    std::fill(pages, pages + bytes, uint8_t{0xA5});
    cpu::release_pages(pages, bytes);
  }
}

}  // namespace cpu_test
