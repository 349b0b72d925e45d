// RMSNorm, and states as they are, into inputs of products.

static void copy(const float* x, int64_t channels, const Input& out, int64_t tile, int64_t first_channel) {
  const int live = vectors_of(out.rows_of(tile));
  for (int64_t c = 0; c < channels; c += 2)
    for (int v = 0; v < live; ++v)
      put_pair(out, tile, first_channel + c, v, load(x + c * kRows + v * W), load(x + (c + 1) * kRows + v * W));
}

static void norm(const float* x, const float* weight, int64_t channels, float eps, const Input* out, int64_t tile,
                 int64_t first_channel, float* plain) {
  const int live = out ? vectors_of(out->rows_of(tile)) : V;
  for (int v = 0; v < live; ++v) {
    const float* at = x + v * W;
    vf squares[2] = {};
    for (int64_t c = 0; c < channels; c += 2) {
      const vf a = load(at + c * kRows), b = load(at + (c + 1) * kRows);
      squares[0] = mac(a, a, squares[0]);
      squares[1] = mac(b, b, squares[1]);
    }
    vf root = (squares[0] + squares[1]) / static_cast<float>(channels) + eps;
    for (int i = 0; i < W; ++i) root[i] = 1.0f / __builtin_sqrtf(root[i]);
    for (int64_t c = 0; c < channels; c += 2) {
      const vf even = load(at + c * kRows) * root * weight[c], odd = load(at + (c + 1) * kRows) * root * weight[c + 1];
      if (out) put_pair(*out, tile, first_channel + c, v, even, odd);
      if (plain) {
        store(plain + c * kRows + v * W, even);
        store(plain + (c + 1) * kRows + v * W, odd);
      }
    }
  }
}
