// A checksum of a tensor's bytes, as fast as memory gives them: whether weights are still what they were.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "cpu/threads.hpp"

namespace cpu {

// The checksum of one block and its number. Each step is a bijection of a lane, so one changed word always shows.
inline uint64_t checksum_block(const unsigned char* bytes, int64_t count, int64_t number) {
  constexpr int kLanes = 8;
  constexpr uint64_t kPrime = 0x9E3779B97F4A7C15ull;
  const auto step = [](uint64_t lane, uint64_t word) {
    lane ^= word;
    return ((lane << 29) | (lane >> 35)) * kPrime;
  };
  uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = kPrime * static_cast<uint64_t>(number * kLanes + i + 1) + static_cast<uint64_t>(count);
  int64_t at = 0;
  for (; at + kLanes * 8 <= count; at += kLanes * 8) {
    uint64_t words[kLanes];
    std::memcpy(words, bytes + at, sizeof words);
    for (int i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], words[i]);
  }
  for (int i = 0; at < count; ++i, at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, static_cast<size_t>(std::min<int64_t>(8, count - at)));
    lanes[i] = step(lanes[i], word);
  }
  uint64_t sum = 0;
  for (const uint64_t lane : lanes) sum = step(sum, lane ^ (lane >> 32));
  return sum ^ (sum >> 31);
}

// The same for any number of threads.
inline uint64_t checksum(const unsigned char* bytes, int64_t count, int threads) {
  constexpr int64_t kBlock = 1 << 16;
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  std::atomic<uint64_t> sum{0};
  Pool::shared().run(blocks < 8 ? 1 : threads, [&](const Team& team) {
    team.each(blocks, 1, [&](Pieces& pieces) {
      uint64_t part = 0;
      while (pieces.next())
        for (int64_t block = pieces.first; block < pieces.last; ++block) {
          const int64_t first = block * kBlock;
          part += checksum_block(bytes + first, std::min(kBlock, count - first), block);
        }
      sum.fetch_add(part);
    });
  });
  return sum.load();
}

}  // namespace cpu
