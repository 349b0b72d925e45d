// A block of rows.inl by rows of floats.

constexpr int64_t kWords = kDepth;     // of a row's block
constexpr int64_t kPart = 12;          // blocks
constexpr int64_t kAtMostAsItIs = 2;   // rows that read weights where these stand
constexpr bool kMadeForOne = false;    // one row takes weights as they are made

// Adds the products of a block's first `Of` outputs with `Rows` rows, `words` words apart, to lanes [Of][Rows].
template <bool Half, int Rows, int Of>
CPU_INLINE void add_block(const Weights& weights, const uint32_t* rows, int64_t words, vf* lanes) {
  constexpr int kStride = kDepth * (Half ? 2 : 4);
#pragma GCC unroll 8
  for (int k = 0; k < kDepth; k += W) {
    vf x[Rows];
    for (int r = 0; r < Rows; ++r) x[r] = load(reinterpret_cast<const float*>(rows + r * words) + k);
#pragma GCC unroll 16
    for (int o = 0; o < Of; ++o) {
      const uint8_t* at = weights.data + o / 4 * weights.group + o % 4 * kStride;
      const vf w = Half ? load_half(reinterpret_cast<const uint16_t*>(at) + k) : load(reinterpret_cast<const float*>(at) + k);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) lanes[o * Rows + r] = fused(w, x[r], lanes[o * Rows + r]);
    }
  }
}

// A block's weights to [4][4 outputs][32], `group` bytes from four outputs to the next four.
template <typename F>
CPU_INLINE void make_block(const Block& block, int64_t group, uint8_t* to) {
  for (int o = 0; o < kOutputs; ++o)
    F::weights(block, o, reinterpret_cast<float*>(to + o / 4 * group) + o % 4 * kDepth);
}

template <typename F>
CPU_INLINE void multiply_made(const uint8_t*, int64_t, const uint32_t*, const Ahead&, float*) {}
