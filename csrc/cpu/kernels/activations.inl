// The gate of a network between its products.

static void gate(const float* gates, const float* ups, const Input& out, int64_t tile, int64_t first_channel) {
  for (int c = 0; c < kOutputs; c += 2)
    for (int v = 0; v < V; ++v) {
      const int at = c * kRows + v * W, next = at + kRows;
      put_pair(out, tile, first_channel + c, v, gated(load(gates + at), load(ups + at)),
               gated(load(gates + next), load(ups + next)));
    }
}
