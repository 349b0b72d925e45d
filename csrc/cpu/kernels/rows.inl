// Products without tiles, rows one by one.
//
// Lanes are inputs here, so that a few rows cost no more than reading the weights: `prepare` lays rows out one behind the
// other. A lane sums every W-th input, or pair of inputs where there are pairs, and the lanes are added up at the end.
constexpr bool kManyRegisters = kRegisters == 32;
constexpr int kTogether = kManyRegisters ? 4 : 3;  // rows
constexpr int64_t kStrip = kKeptBytes / (4 * kOutputs * W) / kRows * kRows;  // rows whose lanes are kept
constexpr int outputs_by(int rows) { return kManyRegisters ? 16 / rows : rows == 1 ? 8 : 4; }

CPU_INLINE uint32_t* rows_of(uint8_t* scratch, int64_t blocks) {
  return reinterpret_cast<uint32_t*>(scratch + made_bytes(blocks));
}

static void prepare(const Matrix& m, const Input& in, int64_t rows, uint8_t* scratch) {
  const int64_t words = m.blocks * kWords;
  uint32_t* to = rows_of(scratch, m.blocks);
  for (int64_t first = 0; first < rows; first += kRows, to += kRows * words) {
    const uint32_t* from = in.pairs(first / kRows);
    turn_rows(from, words, least(kRows, rows - first), to);
  }
}

// Where sums begin and end that are made of several parts of the inputs, and what is kept of their lanes between these.
struct Part {
  bool first, last;
  float* kept;
};

// Sums of some outputs by `Rows` rows, `words` words apart, over blocks of inputs, to [outputs][16].
template <bool Half, int Rows>
CPU_INLINE void multiply(Weights weights, const uint32_t* rows, int64_t words, int64_t blocks, Ahead ahead, const Part& part,
                         float* sums) {
  constexpr int kOf = outputs_by(Rows), kSums = kOf * Rows;
  vf lanes[kSums];
  if (part.first)
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) lanes[i] = vf{};
  else
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) lanes[i] = load(part.kept + i * W);
  for (int64_t b = 0; b < blocks; ++b, weights.data += weights.block, rows += kWords, ahead.from += ahead.bytes) {
    ask_for(ahead.from, ahead.bytes);
    add_block<Half, Rows, kOf>(weights, rows, words, lanes);
  }
  if (!part.last) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) store(part.kept + i * W, lanes[i]);
    return;
  }
  alignas(64) float found[kSums];
#pragma GCC unroll 4
  for (int i = 0; i < kSums; i += kAtOnce) add_up(lanes + i, found + i);
  for (int o = 0; o < kOf; ++o) __builtin_memcpy(sums + o * kRows, found + o * Rows, sizeof(float) * Rows);
}

// All outputs of a panel by all rows.
template <bool Half>
CPU_INLINE void multiply_rows(const Weights& weights, const uint32_t* x, int64_t words, int64_t rows, int64_t blocks,
                              Ahead ahead, const Part& part, float* sums) {
  // what is asked for goes with up to so many passes over the weights
  int64_t passes = least((rows + kTogether - 1) / kTogether, 4);
  ahead.bytes /= passes;
  int64_t r = 0;
  while (r < rows) {
    const auto run = [&](auto count) __attribute__((always_inline)) {
      constexpr int kCount = decltype(count)::value, kOf = outputs_by(kCount);
      const int64_t bytes = ahead.bytes * kOf / kOutputs;
      float* to = sums + r / kRows * kOutputs * kRows + r % kRows;
      for (int o = 0; o < kOutputs; o += kOf, ahead.from += blocks * bytes) {
        const uint8_t* from = weights.data + o / 4 * weights.group + o % 4 * kDepth * (Half ? 2 : 4);
        multiply<Half, kCount>({from, weights.block, weights.group}, x + r * words, words, blocks, {ahead.from, bytes},
                               {part.first, part.last, part.kept + (r * kOutputs + o * kCount) * W}, to + o * kRows);
      }
      r += kCount;
      if (--passes == 0) ahead.bytes = 0;
    };
    const int64_t left = least(rows - r, kRows - r % kRows);
    if (left >= kTogether)
      run(std::integral_constant<int, kTogether>{});
    else if (left >= 2)
      run(std::integral_constant<int, 2>{});
    else
      run(std::integral_constant<int, 1>{});
  }
}

// Blocks [first, last) of a panel to `to`, as [4][blocks][4 outputs][32].
template <typename F>
CPU_INLINE void make_weights(const uint8_t* panel, int64_t first, int64_t last, Ahead ahead, const Weights& made, uint8_t* to) {
  for (int64_t b = first; b < last; ++b, ahead.from += ahead.bytes, to += made.block) {
    ask_for(ahead.from, ahead.bytes);
    make_block<F>(block_of<F>(panel, b), made.group, to);
  }
}

template <typename F>
CPU_INLINE void products_of_format(const Matrix& m, int64_t panel, int64_t tiles, int64_t rows, float* sums, uint8_t* scratch) {
  constexpr bool kIsHalf = std::is_same_v<F, formats::bf16>, kAsItIs = kIsHalf || std::is_same_v<F, formats::f32>;
  constexpr int64_t kBytes = F::kLayout.bytes, kFour = 4 * kDepth * (kPairs ? 2 : 4);
  __builtin_memset(sums, 0, static_cast<size_t>(tiles * kOutputs * kRows) * sizeof(float));
  const int64_t words = m.blocks * kWords;
  const uint8_t* const from = panel_of(m, panel);
  const uint32_t* const x = rows_of(scratch, m.blocks);
  float* const kept = reinterpret_cast<float*>(scratch + scratch_bytes(m.blocks, tiles) - kKeptBytes);
  // memory gives the panel behind this one meanwhile
  Ahead ahead{block_of<F>(from, 0).at + F::kLayout.panel_bytes(m.blocks), kBytes};
  if (kAsItIs && rows <= kAtMostAsItIs)
    return multiply_rows<kIsHalf>({from, kBytes, kBytes / 4}, x, words, rows, m.blocks, ahead, {true, true, kept}, sums);
  if (kMadeForOne && rows == 1) return multiply_made<F>(from, m.blocks, x, ahead, sums);
  // Several rows read weights several times, each time four outputs': these stand together then, and as many of their
  // inputs as the first cache keeps.
  const int64_t parts = (m.blocks + kPart - 1) / kPart, size = (m.blocks + parts - 1) / parts;
  const int64_t making = kAsItIs ? 0 : rows > 2 ? kBytes / 4 : kBytes;
  for (int64_t strip = 0; strip < rows; strip += kStrip)
    for (int64_t b = 0; b < m.blocks; b += size) {
      const int64_t blocks = least(size, m.blocks - b);
      const Weights made{scratch, kFour, blocks * kFour};
      make_weights<F>(from, b, b + blocks, {ahead.from, making}, made, scratch);
      ahead.from += blocks * making;
      multiply_rows<kPairs>(made, x + strip * words + b * kWords, words, least(kStrip, rows - strip), blocks,
                            {ahead.from, kBytes - making}, {b == 0, b + blocks == m.blocks, kept}, sums + strip * kOutputs);
      ahead.from += blocks * (kBytes - making);
    }
}

static void panel_products(const Matrix& m, int64_t panel, int64_t tiles, int64_t rows, float* sums, uint8_t* scratch) {
  by_format(m.kind, [&](auto format) __attribute__((always_inline)) {
    using F = decltype(format);
    if constexpr (kMultiplies<F>) products_of_format<F>(m, panel, tiles, rows, sums, scratch);
  });
}

static void products(const Matrix* const* matrices, const int64_t* panels, int count, const Input&, int64_t tiles,
                     int64_t rows, float* const* sums, uint8_t* scratch) {
  for (int i = 0; i < count; ++i) {
    panel_products(*matrices[i], panels[i], tiles, rows, sums[i], scratch);
    for (int64_t t = 0; t < tiles; ++t) finish(*matrices[i], panels[i], sums[i] + t * kOutputs * kRows);
  }
}

static void begin() { flush_denormals(); }
static void end() { restore_denormals(); }
