// Attention over slots in their order, in float.

// Where bit i of `lanes` is set, for the W lanes of vector v.
CPU_INLINE vi chosen_lanes(uint32_t lanes, int v) {
  vi bit = {};
  for (int i = 0; i < W; ++i) bit[i] = 1 << i;
  return ((vi{} + static_cast<int32_t>(lanes >> v * W)) & bit) != 0;
}

// One over the sum of a lane's weights; where nothing is visible all are 0.
CPU_INLINE vf share_of(vf sum) { return sum > 0.0f ? 1.0f / sum : (sum == sum ? vf{} : sum); }

CPU_INLINE void expand_slot(const AttendTask& task, const void* from, int64_t slot, float* to) {
  const int64_t size = task.size;
  if (!task.half) {
    __builtin_memcpy(to, static_cast<const float*>(from) + slot * size, static_cast<size_t>(size) * sizeof(float));
    return;
  }
  const uint16_t* at = static_cast<const uint16_t*>(from) + slot * size;
  int64_t i = 0;
  for (; i + W <= size; i += W) store(to + i, load_half(at + i));
  for (; i < size; ++i) {
    const uint32_t bits = static_cast<uint32_t>(at[i]) << 16;
    __builtin_memcpy(to + i, &bits, 4);
  }
}

constexpr int kSlots = 16;    // expanded at a time
constexpr int kChannels = 8;  // of the output, summed side by side

// The slots of a group in order: those that all lanes see, then its steps. `expanded`: [kSlots][size].
class Slots {
 public:
  CPU_MEMBER Slots(const AttendTask& task, const void* from, float* expanded) : task_(task), from_(from), to_(expanded) {}
  CPU_MEMBER int64_t count() const { return task_.prefix + task_.steps; }
  CPU_MEMBER int64_t at(int64_t i) const { return i < task_.prefix ? i : task_.step[i - task_.prefix].slot; }
  // [count][size] of those from `first` on
  CPU_MEMBER const float* floats(int64_t first, int64_t count) const {
    if (!task_.half && first + count <= task_.prefix) return static_cast<const float*>(from_) + first * task_.size;
    for (int64_t i = 0; i < count; ++i) expand_slot(task_, from_, at(first + i), to_ + i * task_.size);
    return to_;
  }

 private:
  const AttendTask& task_;
  const void* const from_;
  float* const to_;
};

// scores[slot][16] of `Count` slots; each is one sum over the channels, in their order.
template <int Count>
CPU_INLINE void score(const float* keys, const float* query, int64_t size, int live, float* scores) {
  for (int v = 0; v < live; ++v) {
    vf sums[Count] = {};
    for (int64_t d = 0; d < size; ++d) {
      const vf q = load(query + d * kRows + v * W);
      for (int s = 0; s < Count; ++s) sums[s] = mac(q, keys[s * size + d], sums[s]);
    }
    for (int s = 0; s < Count; ++s) store(scores + s * kRows + v * W, sums[s]);
  }
}

// out[d][16] += weights[slot][16] * values[slot][d], slot after slot; where a lane does not see a step it is left out, not
// added as zero. step: null, or one for each slot.
template <int Channels>
CPU_INLINE void add_values(const float* values, const float* weights, const Step* step, int64_t count, int64_t size,
                           int live, float* out) {
  for (int v = 0; v < live; ++v) {
    vf sums[Channels];
    for (int i = 0; i < Channels; ++i) sums[i] = load(out + i * kRows + v * W);
    for (int64_t s = 0; s < count; ++s) {
      const vf weight = load(weights + s * kRows + v * W);
      if (step) {
        const vi seen = chosen_lanes(step[s].lanes, v);
        for (int i = 0; i < Channels; ++i) sums[i] = seen ? mac(weight, values[s * size + i], sums[i]) : sums[i];
      } else {
        for (int i = 0; i < Channels; ++i) sums[i] = mac(weight, values[s * size + i], sums[i]);
      }
    }
    for (int i = 0; i < Channels; ++i) store(out + i * kRows + v * W, sums[i]);
  }
}

// Sums over slots in their order, in float.
static void attend_in_order(const AttendTask& task) {
  const int64_t size = task.size, prefix = task.prefix, all = prefix + task.steps;
  float *query = task.scratch, *sums = query + size * kRows, *expanded = sums + size * kRows;
  float* scores = expanded + kSlots * size;
  const int live = vectors_of(task.count);
  gather(task, query);
  const Slots keys(task, task.keys, expanded), values(task, task.values, expanded);
  for (int64_t slot = 0; slot < all; slot += kSlots) {
    const int64_t count = least(kSlots, all - slot);
    const float* from = keys.floats(slot, count);
    int64_t s = 0;
    for (; s + 8 <= count; s += 8) score<8>(from + s * size, query, size, live, scores + (slot + s) * kRows);
    for (; s < count; ++s) score<1>(from + s * size, query, size, live, scores + (slot + s) * kRows);
  }
  alignas(64) float share[kRows] = {};
  for (int v = 0; v < live; ++v) {
    float* at = scores + v * W;
    vf peak = set(-3.0e38f), sum = {};
    for (int64_t s = 0; s < prefix; ++s) peak = greater(peak, load(at + s * kRows));
    for (int64_t s = prefix; s < all; ++s)
      peak = chosen_lanes(task.step[s - prefix].lanes, v) ? greater(peak, load(at + s * kRows)) : peak;
    for (int64_t s = 0; s < all; ++s) {
      vf weight = exponential(load(at + s * kRows) - peak);
      if (s >= prefix) weight = chosen_lanes(task.step[s - prefix].lanes, v) ? weight : vf{};
      store(at + s * kRows, weight);
      sum = sum + weight;
    }
    store(share + v * W, share_of(sum));
  }
  __builtin_memset(sums, 0, static_cast<size_t>(size * kRows) * sizeof(float));
  for (int64_t slot = 0; slot < all;) {
    const Step* step = slot < prefix ? nullptr : task.step + (slot - prefix);
    const int64_t count = least(kSlots, (step ? all : prefix) - slot);
    const float *from = values.floats(slot, count), *weights = scores + slot * kRows;
    int64_t d = 0;
    for (; d + kChannels <= size; d += kChannels)
      add_values<kChannels>(from + d, weights, step, count, size, live, sums + d * kRows);
    for (; d < size; ++d) add_values<1>(from + d, weights, step, count, size, live, sums + d * kRows);
    slot += count;
  }
  scatter(task, sums, share);
}
