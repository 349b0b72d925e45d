// Rows of inputs as integers: blocks of 32 inputs, of which each is the nearest multiple of a step, the largest 127 of them.

CPU_INLINE Record* records_of(uint8_t* scratch, int64_t blocks, int64_t tiles) {
  return reinterpret_cast<Record*>(scratch + integers_at(blocks, tiles));
}

// Records of W rows, [16 words][16 rows].
CPU_INLINE void quantize_rows(const float* from, uint32_t* to) {
  const auto put = [&](int word, vu value) __attribute__((always_inline)) {
    __builtin_memcpy(to + word * kRows, &value, sizeof value);
  };
  vi peak = {};
  for (int k = 0; k < kDepth; ++k) {
    const vi size = (vi)(as_bits(load(from + k * kRows)) & 0x7FFFFFFFu);
    peak = size > peak ? size : peak;
  }
  const vf largest = (vf)peak, nothing = {};
  const vi some = peak >= 0x0D800000, finite = peak < 0x7F800000;  // 2^-100, infinity
  const vf steps = some ? 127.0f / largest : nothing;
  const vf scale = finite ? (some ? largest * 0x1.020408p-7f : nothing) : set(__builtin_nanf(""));
  vi halves[2] = {};
  for (int i = 0; i < kWordsOfBlock; ++i) {
    vi q[4];
    for (int b = 0; b < 4; ++b) q[b] = nearest(load(from + (4 * i + b) * kRows) * steps) & finite;
    halves[i / (kWordsOfBlock / 2)] += (q[0] + q[1]) + (q[2] + q[3]);
    put(i, ((vu)q[0] & 255u) | ((vu)q[1] & 255u) << 8 | ((vu)q[2] & 255u) << 16 | (vu)q[3] << 24);
  }
  const vi sums[3] = {halves[0] + halves[1], halves[0], halves[1]};
  put(8, as_bits(scale));
  for (int i = 0; i < 3; ++i) {
    put(9 + i, as_bits(scale * __builtin_convertvector(sums[i], vf)));
    put(12 + i, (vu)-sums[i]);
  }
  put(15, vu{});
}

static void prepare_integers(const Input& in, int64_t blocks, int64_t rows, uint8_t* scratch) {
  const int64_t tiles = (rows + kRows - 1) / kRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const float* from = in.floats(t);
    const int64_t live = least(kRows, rows - t * kRows);
    Record* to = records_of(scratch, blocks, tiles) + t * blocks * kRows;
    for (int64_t b = 0; b < blocks; ++b, from += kDepth * kRows, to += live) {
      alignas(64) uint32_t turned[kRecordWords * kRows];
      for (int v = 0; v < vectors_of(live); ++v) quantize_rows(from + v * W, turned + v * W);
      turn_records(turned, live, reinterpret_cast<uint32_t*>(to));
    }
  }
}
