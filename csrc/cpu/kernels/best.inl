// The largest logits of each row.

// Puts `output` into each lane's list, [count][16], at its value's place; -inf has none.
CPU_INLINE void insert(vf value, int32_t output, int64_t count, float* most, int32_t* at) {
  vi moved = {}, from = vi{} + output;
  for (int64_t i = 0; i < count; ++i) {
    const vf held = load(most + i * kRows);
    vi held_at;
    __builtin_memcpy(&held_at, at + i * kRows, sizeof held_at);
    moved |= value > held;  // behind the place all move on, equals too
    store(most + i * kRows, moved ? value : held);
    const vi kept = moved ? from : held_at;
    __builtin_memcpy(at + i * kRows, &kept, sizeof kept);
    value = moved ? held : value;
    from = moved ? held_at : from;
  }
}

static void best(const float* sums, int32_t first, int32_t outputs, int64_t count, float* most, int32_t* at) {
  const vf infinity = set(__builtin_inff());
  for (int v = 0; v < V; ++v) {
    const float* last = most + (count - 1) * kRows + v * W;
    const vf least = load(last);
    vi some = {};
    for (int32_t o = 0; o < outputs; ++o) {
      const vf value = load(sums + o * kRows + v * W);
      some |= (value > least) & (value < infinity);
    }
    if (!any(some)) continue;  // as for nearly all panels
    for (int32_t o = 0; o < outputs; ++o) {
      const vf value = load(sums + o * kRows + v * W);
      const vi better = (value > load(last)) & (value < infinity);
      if (any(better)) insert(better ? value : -infinity, first + o, count, most + v * W, at + v * W);
    }
  }
}
