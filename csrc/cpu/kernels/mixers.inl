// Recurrent mixers: causal convolutions, norms of heads and updates of states, over rows whose channels stand side by
// side. Each channel, and each column of a state, has a lane of its own, so its sums do not depend on the vectors' width.

// Sums of a channel's inputs by its weights, the oldest first.
static void convolve(const ConvolveTask& task) {
  for (int64_t c = 0; c < task.channels; c += W) {
    vf sum = task.bias ? load(task.bias + c) : vf{};
    for (int64_t t = 0; t < task.taps; ++t)
      sum = mac(load(task.rows[t] + c), load(task.weights + t * task.stride + c), sum);
    store(task.out + c, task.silu ? gated(sum, sum, set(1.0f)) : sum);
  }
}

// Lane j sums the squares of channels k with k % 16 == j; the lanes are added in halves.
static void unit(float* x, int64_t size, float factor) {
  constexpr int kParts = kRows / W;
  vf parts[kParts] = {};
  for (int64_t k = 0; k < size; k += kRows)
    for (int p = 0; p < kParts; ++p) {
      const vf value = load(x + k + p * W);
      parts[p] = mac(value, value, parts[p]);
    }
  float lanes[kRows];
  for (int p = 0; p < kParts; ++p) store(lanes + p * W, parts[p]);
  for (int half = kRows / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  const float scale = factor / __builtin_sqrtf(lanes[0] + 1e-6f);
  for (int64_t k = 0; k < size; k += W) store(x + k, load(x + k) * scale);
}

// Four sums of every fourth channel each, which wait for one another less than one would.
constexpr int kSums = 4;

CPU_INLINE vf sum_of(const vf* sums) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

// By the delta rule the decayed state is made twice, which costs less than to keep it in between.
static void update(const UpdateTask& task) {
  for (int v = 0; v < V; ++v) {
    const float* from = task.before + v * W;
    float* to = task.after + v * W;
    vf sums[kSums] = {}, added = load(task.value + v * W);
    if (task.delta) {
      for (int64_t i = 0; i < task.size; i += kSums)
#pragma GCC unroll 4
        for (int s = 0; s < kSums; ++s)
          sums[s] = mac(load(from + (i + s) * kRows) * task.decay, task.key[i + s], sums[s]);
      added = added - sum_of(sums);
    }
    added = added * task.rate;
    if (!task.out) {
      for (int64_t i = 0; i < task.size; ++i)
        store(to + i * kRows, mac(added, task.key[i], load(from + i * kRows) * task.decay));
      continue;
    }
    for (int s = 0; s < kSums; ++s) sums[s] = vf{};
    for (int64_t i = 0; i < task.size; i += kSums)
#pragma GCC unroll 4
      for (int s = 0; s < kSums; ++s) {
        const vf state = mac(added, task.key[i + s], load(from + (i + s) * kRows) * task.decay);
        store(to + (i + s) * kRows, state);
        sums[s] = mac(state, task.query[i + s], sums[s]);
      }
    store(task.out + v * W, sum_of(sums));
  }
}

static void skip(const float* x, float by, const float* gates, int64_t channels, float* y) {
  for (int64_t c = 0; c < channels; c += W) {
    const vf sum = mac(load(x + c), by, load(y + c)), gate = gates ? load(gates + c) : sum;
    store(y + c, gates ? gated(gate, gate, sum) : sum);
  }
}
