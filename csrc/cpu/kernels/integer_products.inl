// Products of packed blocks by rows of integers. Integer sums are exact, so that they have no order; what follows is in that
// of the inputs, one or two fused multiply-adds a group. So a row's bits depend neither on the other rows nor on the width
// of the vectors.

// The sums of `Rows` rows by W outputs of each of `Count` panels, from output `o` on, to found[i]: [rows][16]. live: rows of the
// tile.
template <typename F, int Rows, int Count, bool Ask>
CPU_INLINE void multiply(const uint8_t* const* panels, int64_t blocks, const Record* rows, int64_t live, int o,
                         float* const* found) {
  constexpr int kWords = kWordsOfBlock / F::kGroups;
  const uint8_t* at[Count];
  for (int i = 0; i < Count; ++i) at[i] = panels[i];
  vf sums[Count][Rows];
#pragma GCC unroll 2
  for (int i = 0; i < Count; ++i)
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) sums[i][r] = vf{};
  for (int64_t b = 0; b < blocks; ++b, rows += live) {
    Block block[Count];
#pragma GCC unroll 2
    for (int i = 0; i < Count; ++i) {
      block[i] = block_of<F>(at[i], b);
      if (Ask) ask_for(block[i].at + kAhead, F::kLayout.bytes);
    }
#pragma GCC unroll 2
    for (int g = 0; g < F::kGroups; ++g) {
      const int part = F::kGroups == 1 ? 0 : 1 + g;
      Sum<F> sum[Count][Rows];
#pragma GCC unroll 2
      for (int i = 0; i < Count; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) sum[i][r].begin(rows[r].negated + part);
#pragma GCC unroll 8
      for (int k = 0; k < kWords; ++k) {
#pragma GCC unroll 2
        for (int i = 0; i < Count; ++i) {
          const Word<F> word(F::word(block[i], g * kWords + k, o));
#pragma GCC unroll 8
          for (int r = 0; r < Rows; ++r) sum[i][r].add(word, k, rows[r].words + g * kWords + k);
        }
      }
#pragma GCC unroll 2
      for (int i = 0; i < Count; ++i) {
        vf scale, low;
        if constexpr (F::kScaled) scale = F::scale(block[i], g, o);
        if constexpr (F::kLow) low = F::low(block[i], g, o);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          vf step = set(rows[r].scale);
          if constexpr (F::kScaled) step = scale * step;
          sums[i][r] = fused(sum[i][r].end(), step, sums[i][r]);
          if constexpr (F::kLow) sums[i][r] = fused(low, set(rows[r].sums[part]), sums[i][r]);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < Count; ++i)
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) store(found[i] + r * kOutputs + o, sums[i][r]);
}

template <typename F, int Rows, int Count, bool Ask>
static __attribute__((noinline)) void multiply_outputs(const uint8_t* const* panels, int64_t blocks, const Record* rows,
                                                       int64_t live, float* const* found) {
#pragma GCC unroll 4
  for (int o = 0; o < kOutputs; o += W) multiply<F, Rows, Count, Ask>(panels, blocks, rows, live, o, found);
}

// All outputs of `Count` panels by all rows.
template <typename F, int Count>
CPU_INLINE void multiply_panels(const uint8_t* const* panels, int64_t blocks, const Record* records, int64_t rows,
                                float* const* sums) {
  constexpr int kMost = kTogether / Count;
  alignas(64) float found[Count][kRows * kOutputs];
  for (int64_t first = 0; first < rows; first += kRows, records += blocks * kRows) {
    const int64_t live = least(kRows, rows - first);
    const auto run = [&](auto count, int64_t r) __attribute__((always_inline)) {
      float* to[Count];
      for (int i = 0; i < Count; ++i) to[i] = found[i] + r * kOutputs;
      if (first + r == 0)
        multiply_outputs<F, decltype(count)::value, Count, true>(panels, blocks, records + r, live, to);
      else
        multiply_outputs<F, decltype(count)::value, Count, false>(panels, blocks, records + r, live, to);
    };
    int64_t r = 0;
    for (; live - r >= kMost; r += kMost) run(std::integral_constant<int, kMost>{}, r);
    if constexpr (kMost > 4)
      for (; live - r >= 4; r += 4) run(std::integral_constant<int, 4>{}, r);
    if constexpr (kMost > 2)
      for (; live - r >= 2; r += 2) run(std::integral_constant<int, 2>{}, r);
    for (; r < live; ++r) run(std::integral_constant<int, 1>{}, r);
    for (int i = 0; i < Count; ++i) turn_sums(found[i], live, sums[i] + first * kOutputs);
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
  const bool both = kPanelsTogether == 2 && count == 2 && rows >= kRows && matrices[0]->kind == matrices[1]->kind;
  for (int i = 0; i < count; ++i) {
    const Matrix& m = *matrices[i];
    if (!has_integers(m.kind)) {
      multiply_floats(m, panels[i], tiles, rows, sums[i], scratch);
      continue;
    }
    by_integers(m.kind, [&](auto format) __attribute__((always_inline)) {
      using F = decltype(format);
      const uint8_t* const of[2] = {panel_of(m, panels[i]), both ? panel_of(*matrices[1], panels[1]) : nullptr};
      if constexpr (kPanelsTogether == 2)
        if (both) return multiply_panels<F, 2>(of, blocks, records, rows, sums);
      multiply_panels<F, 1>(of, blocks, records, rows, sums + i);
    });
    if (both && has_integers(m.kind)) break;
  }
  for (int i = 0; i < count; ++i)
    for (int64_t t = 0; t < tiles; ++t) finish(*matrices[i], panels[i], sums[i] + t * kOutputs * kRows);
}

// Denormals stay what they are: not all sets can make them zero.
static void begin() {}
static void end() {}
