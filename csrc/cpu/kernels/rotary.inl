// Rotary positions.

static void rotate(float* head, const float* cosines, const float* sines, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t d = 0; d < half; ++d)
    for (int v = 0; v < V; ++v) {
      float *first = head + d * kRows + v * W, *second = first + half * kRows;
      const vf a = load(first), b = load(second);
      const vf cosine = load(cosines + d * kRows + v * W), sine = load(sines + d * kRows + v * W);
      store(first, mac(a, cosine, -(b * sine)));
      store(second, mac(b, cosine, a * sine));
    }
}
