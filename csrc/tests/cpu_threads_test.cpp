// The part of cpu_test.cpp that the sanitizer for threads watches. It knows no threads after a fork, so there is none.
#include "tests/cpu/common.hpp"

int main() {
  cpu_test::test_threads();
  return verdict();
}
