// The gate of a network between its products.

constexpr int kByChannels = W == 16 ? 2 : 1;  // rows whose channels fill lanes better than rows do

// A row's channels in lanes.
CPU_INLINE void gate_row(const float* gates, const float* ups, float* to) {
  for (int c = 0; c < kOutputs; c += W) {
    vf gate, up;
    for (int i = 0; i < W; ++i) gate[i] = gates[(c + i) * kRows], up[i] = ups[(c + i) * kRows];
    const vf found = gated(gate, up);
    for (int i = 0; i < W; ++i) to[(c + i) * kRows] = found[i];
  }
}

static void gate(const float* gates, const float* ups, const Input& out, int64_t tile, int64_t first_channel) {
  const int64_t rows = out.rows_of(tile);
  if (!kPairs && rows <= kByChannels) {
    for (int64_t r = 0; r < rows; ++r) gate_row(gates + r, ups + r, out.floats(tile) + first_channel * kRows + r);
    return;
  }
  const int live = vectors_of(rows);
  for (int c = 0; c < kOutputs; c += 2)
    for (int v = 0; v < live; ++v) {
      const int at = c * kRows + v * W, next = at + kRows;
      put_pair(out, tile, first_channel + c, v, gated(load(gates + at), load(ups + at)),
               gated(load(gates + next), load(ups + next)));
    }
}
