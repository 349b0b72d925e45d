// Philox4x32-10: random words as a pure function of (key, counter). Source: Salmon et al., SC 2011 (Random123).
#pragma once

#include <cstdint>

#include "spec/vector.hpp"

namespace spec {

struct PhiloxKey {
  uint32_t low, high;
};

// In place, for `kCount` counters side by side; words hold the counters before and the random words after.
template <int kCount>
SPEC_INLINE void philox(uint32_t (&words)[4][kCount], PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kCount; ++i) {
      const uint64_t product0 = uint64_t{words[0][i]} * 0xD2511F53u;
      const uint64_t product1 = uint64_t{words[2][i]} * 0xCD9E8D57u;
      words[0][i] = static_cast<uint32_t>(product1 >> 32) ^ words[1][i] ^ key.low;
      words[1][i] = static_cast<uint32_t>(product1);
      words[2][i] = static_cast<uint32_t>(product0 >> 32) ^ words[3][i] ^ key.high;
      words[3][i] = static_cast<uint32_t>(product0);
    }
    key.low += 0x9E3779B9u;
    key.high += 0xBB67AE85u;
  }
}

}  // namespace spec
