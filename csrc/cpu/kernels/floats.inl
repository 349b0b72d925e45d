// Products read rows as floats.

constexpr bool kPairs = false;

// Channels 2 i and 2 i + 1 of a tile.
CPU_INLINE void put_pair(const Input& out, int64_t tile, int64_t channel, int v, vf even, vf odd) {
  float* at = out.floats(tile) + channel * kRows + v * W;
  store(at, even);
  store(at + kRows, odd);
}

// Two channels of attention's sums, by lanes of a group.
template <typename Lanes>
CPU_INLINE void scatter_pair(const Lanes& lanes, const AttendTask& task, int64_t d, vf even, vf odd) {
  float* to = task.out->floats(task.tile) + (task.channel + d) * kRows;
  lanes.scatter((vu)even, to, task.size * kRows);
  lanes.scatter((vu)odd, to + kRows, task.size * kRows);
}

// gate * sigmoid(of) * up
CPU_INLINE vf gated(vf gate, vf of, vf up) { return gate / (1.0f + exponential(-of)) * up; }
