// Rows of states to where the cache keeps them, and sums of states.

static void write(const float* states, int64_t size, int64_t rows, void* to, int64_t stride, bool half) {
  int64_t done = write_vectors(states, size, rows, to, stride, half);
  for (int64_t lane = 0; lane < rows; ++lane)
    for (int64_t d = done; d < size; ++d)
      if (half)
        static_cast<uint16_t*>(to)[lane * stride + d] = half_of(states[d * kRows + lane]);
      else
        static_cast<float*>(to)[lane * stride + d] = states[d * kRows + lane];
}

static void add(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += W) store(to + i, load(to + i) + load(from + i));
}
