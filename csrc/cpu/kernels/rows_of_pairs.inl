// A block of rows.inl by rows of bfloat16 pairs.

#include "cpu/kernels/halves.inl"

constexpr int64_t kWords = kDepth / 2;  // of a row's block
constexpr int64_t kPart = 64;           // blocks
constexpr int64_t kAtMostAsItIs = 4;    // rows that read weights where these stand
constexpr bool kMadeForOne = true;      // one row takes weights as they are made

// Adds the products of a block's first `Of` outputs with `Rows` rows, `words` words apart, to lanes [Of][Rows].
template <bool Half, int Rows, int Of>
CPU_INLINE void add_block(const Weights& weights, const uint32_t* rows, int64_t words, vf* lanes) {
  constexpr int kStride = kDepth * 2;
  __m512bh x[Rows];
  for (int r = 0; r < Rows; ++r) x[r] = (__m512bh)_mm512_loadu_si512(rows + r * words);
#pragma GCC unroll 16
  for (int o = 0; o < Of; ++o) {
    const __m512bh w = (__m512bh)_mm512_loadu_si512(weights.data + o / 4 * weights.group + o % 4 * kStride);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) lanes[o * Rows + r] = (vf)_mm512_dpbf16_ps((__m512)lanes[o * Rows + r], w, x[r]);
  }
}

// A block's weights to [4][4 outputs][32], `group` bytes from four outputs to the next four.
template <typename F>
CPU_INLINE void make_block(const Block& block, int64_t group, uint8_t* to) {
  half_block<F>(block, [&](int o, __m512i weights) __attribute__((always_inline)) {
    _mm512_store_si512(to + o / 4 * group + o % 4 * 64, weights);
  });
}

// All outputs of a panel by one row, its weights as they are made.
template <typename F>
CPU_INLINE void multiply_made(const uint8_t* panel, int64_t blocks, const uint32_t* x, Ahead ahead, float* sums) {
  vf lanes[kOutputs];
#pragma GCC unroll 16
  for (int o = 0; o < kOutputs; ++o) lanes[o] = vf{};
  for (int64_t b = 0; b < blocks; ++b, x += kWords, ahead.from += ahead.bytes) {
    ask_for(ahead.from, ahead.bytes);
    const __m512bh row = (__m512bh)_mm512_loadu_si512(x);
    half_block<F>(block_of<F>(panel, b), [&](int o, __m512i weights) __attribute__((always_inline)) {
      lanes[o] = (vf)_mm512_dpbf16_ps((__m512)lanes[o], (__m512bh)weights, row);
    });
  }
  alignas(64) float found[kOutputs];
  add_up(lanes, found);
  for (int o = 0; o < kOutputs; ++o) sums[o * kRows] = found[o];
}
