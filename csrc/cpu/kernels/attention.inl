// Attention over slots in their order, in float.
//
// A score is one sum over the channels, in their order; a value's channel is one sum over the slots that its query sees, in
// theirs. Lanes are slots where scores are made, of keys that are turned for it, and channels where values are summed: so a
// query costs as much alone as beside others, and its sums are the same ones in vectors of any width.

// One over the sum of a lane's weights; where nothing is visible all are 0.
CPU_INLINE vf share_of(vf sum) { return sum > 0.0f ? 1.0f / sum : (sum == sum ? vf{} : sum); }

constexpr int kQueriesTogether = W == 16 ? 4 : 3;

// Calls body(constant of count), which is at most kQueriesTogether.
template <typename Body>
CPU_INLINE void with_count(int64_t count, const Body& body) {
  switch (count) {
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    default: return body(std::integral_constant<int, kQueriesTogether>{});
  }
}

// Calls body(first, constant of their number) for some queries at a time.
template <typename Body>
CPU_INLINE void by_queries(int64_t count, const Body& body) {
  const int64_t parts = (count + kQueriesTogether - 1) / kQueriesTogether, size = (count + parts - 1) / parts;
  for (int64_t q = 0; q < count; q += size)
    with_count(least(size, count - q), [&](auto some) __attribute__((always_inline)) { body(q, some); });
}

// A vector of a row's words, each a channel or, of bfloat16, two: the even one in the low half.
template <bool Half>
struct Words {
  static constexpr int kEach = Half ? 2 : 1, kBytes = 4 / kEach;
  static constexpr int kSpan = W * kEach;  // channels

  CPU_MEMBER static vu at(const uint8_t* row, int64_t channel) {
    vu words;
    __builtin_memcpy(&words, row + channel * kBytes, sizeof words);
    return words;
  }
  CPU_MEMBER static vf channel(vu words, int which) {
    if (!Half) return as_floats(words);
    return as_floats(which ? words & 0xFFFF0000u : words << 16);
  }
  // Where a span begins whose channels from d on are wanted: the last one of a row begins earlier.
  CPU_MEMBER static int64_t begin(int64_t d, int64_t size) { return size < kSpan ? 0 : least(d, size - kSpan); }
};

// Rows of keys or of values of a group in order: those that all lanes see, then its steps. What is shorter than a span is
// filled up with zeros; W rows in succession stand at the same time.
template <bool Half>
class Slots {
 public:
  CPU_MEMBER Slots(const AttendTask& task, const void* from)
      : from_(static_cast<const uint8_t*>(from)), step_(task.step), prefix_(task.prefix),
        bytes_(task.size * Words<Half>::kBytes) {
    if (is_short()) __builtin_memset(filled_, 0, sizeof filled_);
  }
  CPU_MEMBER const uint8_t* operator[](int64_t i) const {
    const uint8_t* at = from_ + (i < prefix_ ? i : step_[i - prefix_].slot) * bytes_;
    if (!is_short()) return at;
    __builtin_memcpy(filled_[i % W], at, static_cast<size_t>(bytes_));
    return filled_[i % W];
  }

 private:
  CPU_MEMBER bool is_short() const { return bytes_ < 4 * W; }
  const uint8_t* const from_;
  const Step* const step_;
  const int64_t prefix_, bytes_;
  mutable uint8_t filled_[W][4 * W];
};

// Turns `count` keys from `first` on, to [words of a row][Vectors * W slots]; what is behind them is the last one's.
template <bool Half, int Vectors>
static void turn_keys(const Slots<Half>& keys, int64_t first, int64_t count, int64_t size, uint32_t* to) {
  using Of = Words<Half>;
  constexpr int64_t kStride = Vectors * W;
  for (int v = 0; v < Vectors; ++v) {
    const uint8_t* rows[W];
    for (int i = 0; i < W; ++i) rows[i] = keys[first + least(v * W + i, count - 1)];
    for (int64_t d = 0; d < size; d += Of::kSpan) {
      const int64_t from = Of::begin(d, size);
      vu words[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) words[i] = Of::at(rows[i], from);
      turn(words);
      uint32_t* at = to + from / Of::kEach * kStride + v * W;
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) __builtin_memcpy(at + i * kStride, &words[i], sizeof words[i]);
    }
  }
}

// scores[query][slot], `stride` from query to query, of turned keys. query: [size][16]
template <bool Half, int Vectors, int Queries>
static void score(const uint32_t* turned, const float* query, int64_t size, float* scores, int64_t stride) {
  using Of = Words<Half>;
  vf sums[Queries][Vectors] = {};
  for (int64_t d = 0; d < size; d += Of::kEach, turned += Vectors * W) {
    vu words[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) __builtin_memcpy(&words[v], turned + v * W, sizeof words[v]);
#pragma GCC unroll 2
    for (int c = 0; c < Of::kEach; ++c)
#pragma GCC unroll 4
      for (int q = 0; q < Queries; ++q) {
        const vf number = set(query[(d + c) * kRows + q]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sums[q][v] = mac(number, Of::channel(words[v], c), sums[q][v]);
      }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(scores + q * stride + v * W, sums[q][v]);
}

// Scores of all slots. turned: for 2 * kRows * size words, and W * 4 * W.
template <bool Half>
CPU_INLINE void score_slots(const AttendTask& task, const float* query, uint32_t* turned, float* scores, int64_t stride) {
  constexpr int kMost = Half ? kQueriesTogether : 2;  // vectors
  const int64_t all = task.prefix + task.steps;
  const Slots<Half> keys(task, task.keys);
  int64_t slot = 0;
  while (slot < all) {
    const auto run = [&](auto vectors) __attribute__((always_inline)) {
      constexpr int kVectors = decltype(vectors)::value;
      turn_keys<Half, kVectors>(keys, slot, least(kVectors * W, all - slot), task.size, turned);
      by_queries(task.count, [&](int64_t q, auto some) __attribute__((always_inline)) {
        score<Half, kVectors, decltype(some)::value>(turned, query + q, task.size, scores + q * stride + slot, stride);
      });
      slot += kVectors * W;
    };
    if (all - slot > (kMost - 1) * W)
      run(std::integral_constant<int, kMost>{});
    else
      run(std::integral_constant<int, 1>{});
  }
}

// A query's scores to its weights. Returns its sink's, which is 0 where there is none.
static float weigh(const AttendTask& task, int64_t query, float* scores) {
  const int64_t all = task.prefix + task.steps;
  const auto is_seen = [&](int64_t i) { return task.step[i - task.prefix].lanes >> query & 1; };
  for (int64_t i = 0; i < task.begins[query]; ++i) scores[i] = -__builtin_inff();
  for (int64_t i = task.prefix; i < all; ++i)
    if (!is_seen(i)) scores[i] = -__builtin_inff();
  for (int64_t i = all; i % W; ++i) scores[i] = -__builtin_inff();
  vf peaks = set(-3.0e38f);
  for (int64_t i = 0; i < all; i += W) peaks = greater(peaks, load(scores + i));
  float peak = peaks[0];
  for (int i = 1; i < W; ++i) peak = peak > peaks[i] ? peak : peaks[i];
  const float sink = task.sinks ? task.sinks[(task.first + query) % task.per_row] : 0.0f;
  if (task.sinks) peak = peak > sink ? peak : sink;
  for (int64_t i = 0; i < all; i += W) store(scores + i, exponential(load(scores + i) - peak));
  for (int64_t i = 0; i < task.begins[query]; ++i) scores[i] = 0.0f;
  for (int64_t i = task.prefix; i < all; ++i)
    if (!is_seen(i)) scores[i] = 0.0f;
  return task.sinks ? exponential(set(sink - peak))[0] : 0.0f;
}

// Sums of Vectors spans of the values' channels from `d` on, to out[channel][16 queries], slot after slot; and in `total`,
// where wanted, of the weights. What a query does not see is left out, not added as zero. `first`: the first query's lane.
template <bool Half, int Vectors, int Queries, bool Total>
static void add_values(const AttendTask& task, int64_t first, int64_t d, const float* weights, int64_t stride, float* out,
                       float* total) {
  using Of = Words<Half>;
  const Slots<Half> values(task, task.values);
  const int64_t prefix = task.prefix, all = prefix + task.steps, size = task.size;
  const Step* const step = task.step;
  const int32_t* const begins = task.begins + first;
  vf sums[Queries][Vectors][Of::kEach] = {}, totals[Queries] = {};
  const auto add = [&](int64_t i, const auto& is_seen) __attribute__((always_inline)) {
    const uint8_t* row = values[i];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      // weights are read again then: 16 registers do not hold them beside the sums
      if (W < 16 && v > 0) __asm__ __volatile__("" ::: "memory");
      const vu words = Of::at(row, d + v * Of::kSpan);
#pragma GCC unroll 4
      for (int q = 0; q < Queries; ++q) {
        if (!is_seen(q)) continue;
        const vf weight = set(weights[q * stride + i]);
        if (Total && v == 0) totals[q] = totals[q] + weight;
#pragma GCC unroll 2
        for (int c = 0; c < Of::kEach; ++c) sums[q][v][c] = mac(weight, Of::channel(words, c), sums[q][v][c]);
      }
    }
  };
  int64_t i = 0;
  const auto is_begun = [&](int q) __attribute__((always_inline)) { return i >= begins[q]; };
  const auto is_member = [&](int q) __attribute__((always_inline)) { return step[i - prefix].lanes >> (first + q) & 1; };
  for (; i < task.lead; ++i) add(i, is_begun);
  for (; i < prefix; ++i) add(i, [](int) __attribute__((always_inline)) { return true; });
  for (; i < all; ++i) add(i, is_member);
  alignas(64) float found[Queries][Vectors][Of::kEach][W];
#pragma GCC unroll 4
  for (int q = 0; q < Queries; ++q) {
    if (Total) total[q] = totals[q][0];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
#pragma GCC unroll 2
      for (int c = 0; c < Of::kEach; ++c) store(found[q][v][c], sums[q][v][c]);
  }
  const int64_t channels = least(Vectors * Of::kSpan, size - d);
  for (int64_t i = 0; i < channels; ++i)
    for (int q = 0; q < Queries; ++q)
      out[(d + i) * kRows + q] = found[q][i / Of::kSpan][i % Of::kEach][i % Of::kSpan / Of::kEach];
}

template <bool Half>
CPU_INLINE void attend_slots(const AttendTask& task) {
  using Of = Words<Half>;
  const int64_t size = task.size, stride = (task.prefix + task.steps + 4 * W - 1) / (4 * W) * (4 * W);
  float *query = task.scratch, *sums = query + size * kRows;
  float* scores = sums + size * kRows;
  auto* turned = reinterpret_cast<uint32_t*>(scores + kRows * stride);
  gather(task, query);
  score_slots<Half>(task, query, turned, scores, stride);
  alignas(64) float sinks[kRows] = {};
  for (int64_t q = 0; q < task.count; ++q) sinks[q] = weigh(task, q, scores + q * stride);
  __builtin_memset(sums, 0, static_cast<size_t>(size * kRows) * sizeof(float));
  alignas(64) float share[kRows] = {};
  by_queries(task.count, [&](int64_t q, auto some) __attribute__((always_inline)) {
    constexpr int kQueries = decltype(some)::value;
    const float* weights = scores + q * stride;
    const auto add = [&](int64_t d, auto spans, auto total) __attribute__((always_inline)) {
      constexpr int kVectors = decltype(spans)::value;
      add_values<Half, kVectors, kQueries, decltype(total)::value>(task, q, d, weights, stride, sums + q, share + q);
      return d + kVectors * Of::kSpan;
    };
    constexpr std::integral_constant<int, 4 / Of::kEach> kMany{};
    constexpr std::integral_constant<int, 1> kOne{};
    constexpr int64_t kChannels = kMany * Of::kSpan;
    // 16 registers do not hold the weights' sums as well
    int64_t d = W == 16 && size >= kChannels ? add(0, kMany, std::true_type{}) : add(0, kOne, std::true_type{});
    while (d + kChannels <= size) d = add(d, kMany, std::false_type{});
    while (d < size) d = add(Of::begin(d, size), kOne, std::false_type{});
  });
  for (int v = 0; v < V; ++v) store(share + v * W, share_of(load(share + v * W) + load(sinks + v * W)));
  scatter(task, sums, share);
}

static void attend_in_order(const AttendTask& task) {
  if (task.half)
    attend_slots<true>(task);
  else
    attend_slots<false>(task);
}
