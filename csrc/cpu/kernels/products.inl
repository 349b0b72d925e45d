// Parts that all products share.

// Scales and bias; sums: [16 outputs][16 rows].
CPU_INLINE void finish(const Matrix& m, int64_t panel, float* sums) {
  if (!m.scales && !m.bias) return;
  for (int o = 0; o < kOutputs; ++o) {
    const vf scale = set(m.scales ? m.scales[panel * kOutputs + o] : 1.0f);
    const vf bias = set(m.bias ? m.bias[panel * kOutputs + o] : 0.0f);
    for (int v = 0; v < V; ++v) {
      float* at = sums + o * kRows + v * W;
      store(at, m.scales ? mac(load(at), scale, bias) : load(at) + bias);
    }
  }
}

constexpr int64_t kAhead = 16384;  // bytes that are asked for ahead of their use

CPU_INLINE void ask_for(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Weights [blocks][16 outputs][32], bfloat16 or float: where they stand, and the bytes from block to block and from four
// outputs to the next four.
struct Weights {
  const uint8_t* data;
  int64_t block, group;
};

// Memory that is asked for meanwhile: so many bytes for each block.
struct Ahead {
  const uint8_t* from;
  int64_t bytes;
};

// True if these kernels multiply by such a matrix.
template <typename F>
constexpr bool kMultiplies = !(kPairs && std::is_same_v<F, formats::f32>);
