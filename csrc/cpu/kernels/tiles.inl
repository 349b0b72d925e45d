// Products by tiles, 16 rows for one: AMX.

#include "cpu/kernels/halves.inl"

// Tiles 0 to 3 hold sums [16 outputs][16 rows], the others weights [16 outputs][32 inputs] and inputs [16 pairs][16 rows].
// The intrinsics do not tell the compiler which memory they touch.
#define CPU_FENCE() __asm__ volatile("" ::: "memory")
#define CPU_STORE(tile, to) _tile_stored(tile, to, 64)

// A tile cannot be loaded from stores that are still under way, so weights are made some blocks before they are needed.
constexpr int64_t kBefore = 4, kRing = 8;  // blocks

// The blocks of one panel as bfloat16: `make` is called kBefore blocks ahead of `at`.
template <typename F>
class HalfPanel {
 public:
  // scratch: [kRing] blocks, or, where the panel is read again, [blocks]
  CPU_MEMBER HalfPanel(const Matrix& m, int64_t panel, uint8_t* scratch, bool again)
      : m_(m), panel_(panel_of(m, panel)), scratch_(scratch), again_(again) {}

  CPU_MEMBER void begin() const {
    for (int64_t b = 0; !kIsHalf && b < kBefore && b < m_.blocks; ++b) expand(b);
  }
  CPU_MEMBER void make(int64_t block) const {
    const uint8_t* from = block_of<F>(panel_, block).at + kAhead;
#pragma GCC unroll 16
    for (int64_t i = 0; i < kBytes; i += 64) _mm_prefetch((const char*)(from + i), _MM_HINT_T1);
    if (!kIsHalf && block + kBefore < m_.blocks) expand(block + kBefore);
    CPU_FENCE();
  }
  CPU_MEMBER const uint8_t* at(int64_t block) const { return kIsHalf ? block_of<F>(panel_, block).at : place(block); }

 private:
  static constexpr int64_t kBytes = F::kLayout.bytes;
  static constexpr bool kIsHalf = std::is_same_v<F, formats::bf16>;
  CPU_MEMBER uint8_t* place(int64_t block) const { return scratch_ + (again_ ? block : block % kRing) * 1024; }
  CPU_MEMBER void expand(int64_t block) const {
    uint8_t* const to = place(block);
    half_block<F>(block_of<F>(panel_, block), [&](int o, __m512i weights) __attribute__((always_inline)) {
      _mm512_store_si512(to + o * 64, weights);
    });
  }

  const Matrix& m_;
  const uint8_t* const panel_;
  uint8_t* const scratch_;
  const bool again_;
};

// Two panels by one or two tiles of rows, from tile `first`: up to four sums under way. The weights are made bfloat16 for
// first 0 alone.
template <typename F, int Tiles>
CPU_INLINE void two_panels(const Matrix* const* m, const int64_t* panels, const Input& in, int64_t first, bool again,
                           float* const* sums, uint8_t* scratch) {
  const int64_t blocks = m[0]->blocks;
  uint8_t* const behind = scratch + (again ? blocks : kRing) * 1024;
  const HalfPanel<F> one(*m[0], panels[0], scratch, again), two(*m[1], panels[1], behind, again);
  CPU_FENCE();
  _tile_zero(0);
  _tile_zero(1);
  if (Tiles > 1) _tile_zero(2);
  if (Tiles > 1) _tile_zero(3);
  const uint32_t *x = in.pairs(first), *y = in.pairs(Tiles > 1 ? first + 1 : first);
  if (first == 0) one.begin();
  if (first == 0) two.begin();
  for (int64_t b = 0; b < blocks; ++b) {
    if (first == 0) one.make(b);
    _tile_loadd(6, x + b * 256, 64);
    if (Tiles > 1) _tile_loadd(7, y + b * 256, 64);
    _tile_loadd(4, one.at(b), 64);
    _tile_dpbf16ps(0, 4, 6);
    if (Tiles > 1) _tile_dpbf16ps(2, 4, 7);
    if (first == 0) two.make(b);
    _tile_loadd(5, two.at(b), 64);
    _tile_dpbf16ps(1, 5, 6);
    if (Tiles > 1) _tile_dpbf16ps(3, 5, 7);
  }
  CPU_STORE(0, sums[0] + first * 256);
  CPU_STORE(1, sums[1] + first * 256);
  if (Tiles > 1) CPU_STORE(2, sums[0] + (first + 1) * 256);
  if (Tiles > 1) CPU_STORE(3, sums[1] + (first + 1) * 256);
  CPU_FENCE();
}

// One panel by up to four tiles of rows. The weights are made bfloat16 for the first four alone.
template <typename F, int Tiles>
CPU_INLINE void one_panel(const Matrix& m, int64_t panel, const Input& in, int64_t first, bool again, float* sums,
                          uint8_t* scratch) {
  const HalfPanel<F> made(m, panel, scratch, again);
  CPU_FENCE();
  _tile_zero(0);
  if (Tiles > 1) _tile_zero(1);
  if (Tiles > 2) _tile_zero(2);
  if (Tiles > 3) _tile_zero(3);
  const uint32_t* x = in.pairs(first);
  const int64_t stride = in.stride;
  if (first == 0) made.begin();
  for (int64_t b = 0; b < m.blocks; ++b) {
    if (first == 0) made.make(b);
    _tile_loadd(4, made.at(b), 64);
    _tile_loadd(5, x + b * 256, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (Tiles > 1) {
      _tile_loadd(6, x + stride + b * 256, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (Tiles > 2) {
      _tile_loadd(7, x + 2 * stride + b * 256, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (Tiles > 3) {
      _tile_loadd(5, x + 3 * stride + b * 256, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  CPU_STORE(0, sums + first * 256);
  if (Tiles > 1) CPU_STORE(1, sums + (first + 1) * 256);
  if (Tiles > 2) CPU_STORE(2, sums + (first + 2) * 256);
  if (Tiles > 3) CPU_STORE(3, sums + (first + 3) * 256);
  CPU_FENCE();
}

template <typename F>
static void panel_products(const Matrix& m, int64_t panel, const Input& in, int64_t tiles, float* sums, uint8_t* scratch) {
  const bool again = tiles > 4;
  for (int64_t t = 0; t < tiles; t += 4) switch (tiles - t) {
      case 1: one_panel<F, 1>(m, panel, in, t, again, sums, scratch); break;
      case 2: one_panel<F, 2>(m, panel, in, t, again, sums, scratch); break;
      case 3: one_panel<F, 3>(m, panel, in, t, again, sums, scratch); break;
      default: one_panel<F, 4>(m, panel, in, t, again, sums, scratch);
    }
}

#include "cpu/kernels/tiles_int8.inl"

static void products(const Matrix* const* matrices, const int64_t* panels, int count, const Input& in, int64_t tiles,
                     int64_t, float* const* sums, uint8_t* scratch) {
  // more than two tiles read weights twice, the second time from the cache: cheaper than inputs twice as often, but not than
  // making them again
  const int64_t most = matrices[0]->kind == Kind::bf16 ? 4 : 2;
  const bool alike = count == 2 && matrices[0]->kind == matrices[1]->kind, together = alike && tiles <= most;
  if (alike && matrices[0]->kind == Kind::i8)
    return by_planes<2>(matrices, panels, tiles, sums, scratch + made_bytes(matrices[0]->blocks));
  for (int i = 0; i < (together ? 1 : count); ++i)
    by_format(matrices[i]->kind, [&](auto format) __attribute__((always_inline)) {
      using F = decltype(format);
      if constexpr (std::is_same_v<F, formats::i8> || !kMultiplies<F>)
        return;
      else if (!together)
        panel_products<F>(*matrices[i], panels[i], in, tiles, sums[i], scratch);
      else
        for (int64_t t = 0; t < tiles; t += 2)
          if (tiles - t == 1)
            two_panels<F, 1>(matrices, panels, in, t, tiles > 2, sums, scratch);
          else
            two_panels<F, 2>(matrices, panels, in, t, tiles > 2, sums, scratch);
    });
  for (int i = 0; i < count; ++i)
    if (matrices[i]->kind == Kind::i8)
      by_planes<1>(matrices + i, panels + i, tiles, sums + i, scratch + made_bytes(matrices[i]->blocks));
    else
      for (int64_t t = 0; t < tiles; ++t) finish(*matrices[i], panels[i], sums[i] + t * kOutputs * kRows);
}

static void begin() {
  alignas(64) uint8_t config[64] = {1};
  for (int i = 0; i < 8; ++i) {
    config[16 + 2 * i] = 64;  // bytes of a row
    config[48 + i] = 16;      // rows
  }
  CPU_FENCE();
  _tile_loadconfig(config);
  flush_denormals();
}
static void end() {
  _tile_release();
  restore_denormals();
}
