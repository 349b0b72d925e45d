// The gate of a network between its products.

constexpr int kByChannels = W == 16 ? 2 : 1;  // rows whose channels fill lanes better than rows do

// activation(gate) * up. GELU's (1 + tanh(u)) / 2, u = sqrt(2 / pi) * (x + 0.044715 x^3), is the sigmoid of 2 u.
template <Activation Of>
CPU_INLINE vf activated(vf gate, vf up) {
  if (Of == Activation::silu) return gated(gate, gate, up);
  if (Of == Activation::clamped) {  // NaN stays
    const vf most = set(7.0f);
    gate = gate > most ? most : gate;
    up = up > most ? most : up;
    up = up < -most ? -most : up;
    return gated(gate, gate * 1.702f, up + 1.0f);
  }
  if (Of == Activation::sigmoid) return gated(set(1.0f), gate, up);
  if (Of == Activation::relu) return (gate < 0.0f ? set(0.0f) : gate) * up;
  return gated(gate, gate * mac(gate * gate, 0.0713548163f, 1.59576912f), up);
}

// A row's channels in lanes.
template <Activation Of>
CPU_INLINE void gate_row(const float* gates, const float* ups, float* to) {
  for (int c = 0; c < kOutputs; c += W) {
    vf gate, up;
    for (int i = 0; i < W; ++i) gate[i] = gates[(c + i) * kRows], up[i] = ups[(c + i) * kRows];
    const vf found = activated<Of>(gate, up);
    for (int i = 0; i < W; ++i) to[(c + i) * kRows] = found[i];
  }
}

template <Activation Of>
static void gate_by(const float* gates, const float* ups, const Input& out, int64_t tile, int64_t first_channel) {
  const int64_t rows = out.rows_of(tile);
  if (!kPairs && rows <= kByChannels) {
    for (int64_t r = 0; r < rows; ++r) gate_row<Of>(gates + r, ups + r, out.floats(tile) + first_channel * kRows + r);
    return;
  }
  const int live = vectors_of(rows);
  for (int c = 0; c < kOutputs; c += 2)
    for (int v = 0; v < live; ++v) {
      const int at = c * kRows + v * W, next = at + kRows;
      put_pair(out, tile, first_channel + c, v, activated<Of>(load(gates + at), load(ups + at)),
               activated<Of>(load(gates + next), load(ups + next)));
    }
}

static void gate(const float* gates, const float* ups, const Input& out, int64_t tile, int64_t first_channel,
                 Activation activation) {
  if (activation == Activation::silu) return gate_by<Activation::silu>(gates, ups, out, tile, first_channel);
  if (activation == Activation::clamped) return gate_by<Activation::clamped>(gates, ups, out, tile, first_channel);
  if (activation == Activation::sigmoid) return gate_by<Activation::sigmoid>(gates, ups, out, tile, first_channel);
  if (activation == Activation::relu) return gate_by<Activation::relu>(gates, ups, out, tile, first_channel);
  gate_by<Activation::gelu_tanh>(gates, ups, out, tile, first_channel);
}
