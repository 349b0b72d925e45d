// Runs csrc/cpu on every instruction set of this machine against what is computed without it: packing, the kernels,
// Decoder and Eagle, threads. Exits with 1 and a line per failed check. The argument `without-forks` leaves forks out,
// which qemu does not survive where there are threads.
#include "tests/cpu/common.hpp"

int main(int count, char** arguments) {
  cpu_test::test_platform();
  cpu_test::test_threads();
  if (count < 2 || std::string(arguments[1]) != "without-forks") {
    cpu_test::test_walls();
    cpu_test::test_fork();
  }
  cpu_test::test_packing();
  cpu_test::test_products();
  cpu_test::test_integers();
  cpu_test::test_states();
  cpu_test::test_attend();
  cpu_test::test_fused();
  cpu_test::test_angles();
  cpu_test::test_order();
  cpu_test::test_decoder();
  cpu_test::test_mixers();
  cpu_test::test_eagle();
  cpu_test::test_block_heads();
  for (const char* numerics : {cpu::kBfloat16, cpu::kInteger}) {
    std::printf("instruction sets of %s:", numerics);
    for (const cpu::Kernels* kernels : cpu::available_kernels(numerics)) std::printf(" %s", kernels->name);
    std::puts("");
  }
  return verdict();
}
