// Products of float32 and bfloat16 matrices, in an order of sixteen lanes whatever the width of the vectors: lane j sums
// inputs k with k % 16 == j by fused multiply-adds, and add_up_16 adds the lanes in its own order. Rows: one behind the other.

constexpr int kLanes = 16;

static void prepare_floats(const Input& in, int64_t blocks, int64_t rows, uint8_t* scratch) {
  const int64_t words = blocks * kDepth;
  uint32_t* to = reinterpret_cast<uint32_t*>(scratch + made_bytes(blocks));
  for (int64_t first = 0; first < rows; first += kRows, to += kRows * words)
    turn_rows(in.pairs(first / kRows), words, least(kRows, rows - first), to);
}

// Sums of outputs [o, o + Of) by `Rows` rows, to found: [rows][16 outputs][16 lanes].
template <bool Half, int Rows, int Of>
CPU_INLINE void multiply_lanes(const uint8_t* panel, const float* rows, int64_t blocks, int o, float* found) {
  constexpr int kParts = kLanes / W, kStride = kDepth * (Half ? 2 : 4);
  const int64_t words = blocks * kDepth;
  vf lanes[Rows * Of * kParts];
#pragma GCC unroll 16
  for (int i = 0; i < Rows * Of * kParts; ++i) lanes[i] = vf{};
  for (int64_t b = 0; b < blocks; ++b, panel += kOutputs * kStride, rows += kDepth) {
    if (o == 0) ask_for(panel + kAhead, kOutputs * kStride);
#pragma GCC unroll 8
    for (int k = 0; k < kDepth; k += W) {
      const int part = k % kLanes / W;
#pragma GCC unroll 16
      for (int i = 0; i < Of; ++i) {
        const uint8_t* at = panel + (o + i) * kStride;
        const vf w = Half ? load_half(reinterpret_cast<const uint16_t*>(at) + k) : load(reinterpret_cast<const float*>(at) + k);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          vf& sum = lanes[(r * Of + i) * kParts + part];
          sum = fused(w, load(rows + r * words + k), sum);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < Of; ++i)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p)
        store(found + (r * kOutputs + o + i) * kLanes + p * W, lanes[(r * Of + i) * kParts + p]);
}

template <bool Half>
static void multiply_floats_by(const uint8_t* panel, int64_t blocks, int64_t tiles, int64_t rows, float* sums,
                               const uint8_t* scratch) {
  constexpr int kFew = 16 * W / kLanes;  // sums that stand in registers
  __builtin_memset(sums, 0, static_cast<size_t>(tiles * kOutputs * kRows) * sizeof(float));
  const float* x = reinterpret_cast<const float*>(scratch + made_bytes(blocks));
  alignas(64) float lanes[2 * kOutputs * kLanes], found[kOutputs];
  for (int64_t r = 0; r < rows;) {
    const int together = rows - r >= 2 && r % kRows != kRows - 1 ? 2 : 1;
    if (together == 2)
      for (int o = 0; o < kOutputs; o += kFew / 2) multiply_lanes<Half, 2, kFew / 2>(panel, x + r * blocks * kDepth, blocks, o, lanes);
    else
      for (int o = 0; o < kOutputs; o += kFew) multiply_lanes<Half, 1, kFew>(panel, x + r * blocks * kDepth, blocks, o, lanes);
    for (int i = 0; i < together; ++i, ++r) {
      add_up_16(lanes + i * kOutputs * kLanes, found);
      float* to = sums + r / kRows * kOutputs * kRows + r % kRows;
      for (int o = 0; o < kOutputs; ++o) to[o * kRows] = found[o];
    }
  }
}

static void multiply_floats(const Matrix& m, int64_t panel, int64_t tiles, int64_t rows, float* sums, const uint8_t* scratch) {
  if (m.kind == Kind::bf16)
    multiply_floats_by<true>(panel_of(m, panel), m.blocks, tiles, rows, sums, scratch);
  else
    multiply_floats_by<false>(panel_of(m, panel), m.blocks, tiles, rows, sums, scratch);
}
