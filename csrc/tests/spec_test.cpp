// Runs csrc/spec against brute force on random inputs in heap buffers of the exact size, so that the sanitizers see
// every read and write that leaves them. Exits with 1 and a line per failed check.
#include "tests/spec/common.hpp"

int main() {
  spec_test::test_philox();
  spec_test::test_gumbel();
  spec_test::test_coupling();
  spec_test::test_tree();
  spec_test::test_select_best();
  spec_test::test_rows();
  spec_test::test_classifier();
  spec_test::test_decisions();
  spec_test::test_strict_attention();
  spec_test::test_best_first();
  spec_test::test_step_queues();
  spec_test::test_compact_rows();
  spec_test::test_worth();
  spec_test::test_copies();
  return verdict();
}
