// Helpers of the test programs: checks that are counted, random numbers, and the verdict at the end.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

inline int failures = 0;

inline void check(bool holds, const char* what, int64_t size) {
  if (holds) return;
  std::printf("failed: %s (size %lld)\n", what, static_cast<long long>(size));
  ++failures;
}

inline std::mt19937_64 generator(1);

inline int64_t below(int64_t bound) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(bound)); }

// The exit status of the program.
inline int verdict() {
  if (failures == 0) std::puts("all checks passed");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
