// Products of packed blocks by rows of integers. Integer sums are exact, so that they have no order; what follows is in that
// of the inputs, one or two fused multiply-adds a group. So a row's bits depend neither on the other rows nor on the width
// of the vectors.

// The sums of `Rows` rows by W outputs of a panel, from output `o` on, to found: [rows][16]. live: rows of the tile. A word of
// weights is unpacked once for all these rows: more of them than vectors keep the sums of, whose spills cost less.
template <typename F, int Rows, bool Ask>
CPU_INLINE void multiply(const uint8_t* panel, int64_t blocks, const Record* rows, int64_t live, int o, float* found) {
  constexpr int kWords = kWordsOfBlock / F::kGroups;
  vf sums[Rows];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) sums[r] = vf{};
  for (int64_t b = 0; b < blocks; ++b, rows += live) {
    const Block block = block_of<F>(panel, b);
    if (Ask) ask_for(block.at + kAhead, F::kLayout.bytes);
#pragma GCC unroll 2
    for (int g = 0; g < F::kGroups; ++g) {
      const int part = F::kGroups == 1 ? 0 : 1 + g;
      Sum<F> sum[Rows];
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) sum[r].begin(rows[r].negated + part);
#pragma GCC unroll 8
      for (int k = 0; k < kWords; ++k) {
        const Word<F> word(F::word(block, g * kWords + k, o));
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) sum[r].add(word, k, rows[r].words + g * kWords + k);
      }
      vf scale, low;
      if constexpr (F::kScaled) scale = F::scale(block, g, o);
      if constexpr (F::kLow) low = F::low(block, g, o);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        vf step = set(rows[r].scale);
        if constexpr (F::kScaled) step = scale * step;
        sums[r] = fused(sum[r].end(), step, sums[r]);
        if constexpr (F::kLow) sums[r] = fused(low, set(rows[r].sums[part]), sums[r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) store(found + r * kOutputs + o, sums[r]);
}

template <typename F, int Rows, bool Ask>
static __attribute__((noinline)) void multiply_outputs(const uint8_t* panel, int64_t blocks, const Record* rows,
                                                       int64_t live, float* found) {
#pragma GCC unroll 4
  for (int o = 0; o < kOutputs; o += W) multiply<F, Rows, Ask>(panel, blocks, rows, live, o, found);
}

// All outputs of a panel by all rows.
template <typename F>
CPU_INLINE void multiply_panel(const uint8_t* panel, int64_t blocks, const Record* records, int64_t rows, float* sums) {
  alignas(64) float found[kRows * kOutputs];
  for (int64_t first = 0; first < rows; first += kRows, records += blocks * kRows) {
    const int64_t live = least(kRows, rows - first);
    int64_t r = 0;
    const auto run = [&](auto count) __attribute__((always_inline)) {
      constexpr int kCount = decltype(count)::value;
      for (; live - r >= kCount; r += kCount)
        if (first + r == 0)
          multiply_outputs<F, kCount, true>(panel, blocks, records + r, live, found + r * kOutputs);
        else
          multiply_outputs<F, kCount, false>(panel, blocks, records + r, live, found + r * kOutputs);
    };
    run(std::integral_constant<int, kTogether>{});
    if constexpr (kTogether > 8) run(std::integral_constant<int, 8>{});
    if constexpr (kTogether > 4) run(std::integral_constant<int, 4>{});
    if constexpr (kTogether > 2) run(std::integral_constant<int, 2>{});
    run(std::integral_constant<int, 1>{});
    turn_sums(found, live, sums + first * kOutputs);
  }
}

// Scales and bias; sums: [16 outputs][16 rows].
CPU_INLINE void finish(const Matrix& m, int64_t panel, float* sums) {
  if (!m.scales && !m.bias) return;
  for (int o = 0; o < kOutputs; ++o) {
    const vf scale = set(m.scales ? m.scales[panel * kOutputs + o] : 1.0f);
    const vf bias = set(m.bias ? m.bias[panel * kOutputs + o] : 0.0f);
    for (int v = 0; v < V; ++v) store(sums + o * kRows + v * W, fused(load(sums + o * kRows + v * W), scale, bias));
  }
}

static void prepare(const Matrix& m, const Input& in, int64_t rows, uint8_t* scratch) {
  if (has_integers(m.kind))
    prepare_integers(in, m.blocks, rows, scratch);
  else
    prepare_floats(in, m.blocks, rows, scratch);
}

static void products(const Matrix* const* matrices, const int64_t* panels, int count, const Input&, int64_t tiles,
                     int64_t rows, float* const* sums, uint8_t* scratch) {
  const int64_t blocks = matrices[0]->blocks;
  const Record* records = records_of(scratch, blocks, tiles);
  for (int i = 0; i < count; ++i) {
    const Matrix& m = *matrices[i];
    if (!has_integers(m.kind)) {
      multiply_floats(m, panels[i], tiles, rows, sums[i], scratch);
      continue;
    }
    by_integers(m.kind, [&](auto format) __attribute__((always_inline)) {
      multiply_panel<decltype(format)>(panel_of(m, panels[i]), blocks, records, rows, sums[i]);
    });
  }
  for (int i = 0; i < count; ++i)
    for (int64_t t = 0; t < tiles; ++t) finish(*matrices[i], panels[i], sums[i] + t * kOutputs * kRows);
}

// Denormals stay what they are: not all sets can make them zero.
static void begin() {}
static void end() {}
