// Attention over slots in their order, in float.
//
// A score is one sum over the channels, in their order; a value's channel is one sum over the slots that its query sees, in
// theirs. Lanes are slots where scores are made, of keys that are turned for it, and channels where values are summed: so a
// query costs as much alone as beside others, and its sums are the same ones in vectors of any width.

// One over the sum of a lane's weights; where nothing is visible all are 0.
CPU_INLINE vf share_of(vf sum) { return sum > 0.0f ? 1.0f / sum : (sum == sum ? vf{} : sum); }

// Queries side by side where scores are made, and where values are summed.
constexpr int kScoredTogether = 6, kSummedTogether = W == 16 ? 4 : 3;
constexpr int kAcross = W == 16 ? 4 : 2;  // vectors of slots whose scores are made at a time
constexpr int64_t kBand = 128;            // slots whose keys and values stay in a near cache while queries pass
static_assert(kBand % (kAcross * W) == 0 && kBand % kChunk == 0 && kChunk % W == 0, "bands are of whole vectors");

// Calls body(constant of count), which is at most Most.
template <int Most, typename Body>
CPU_INLINE void with_count(int64_t count, const Body& body) {
  if constexpr (Most > 1)
    if (count < Most) return with_count<Most - 1>(count, body);
  body(std::integral_constant<int, Most>{});
}

// Calls body(first, constant of their number) for at most Most queries at a time.
template <int Most, typename Body>
CPU_INLINE void by_queries(int64_t count, const Body& body) {
  const int64_t parts = (count + Most - 1) / Most, size = (count + parts - 1) / parts;
  for (int64_t q = 0; q < count; q += size)
    with_count<Most>(least(size, count - q), [&](auto some) __attribute__((always_inline)) { body(q, some); });
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

// Words of kChunk turned keys, [words of a row][kChunk slots]; shorter rows are turned with what fills them up.
template <bool Half>
CPU_INLINE int64_t turned_words(int64_t size) {
  const int64_t words = size / Words<Half>::kEach;
  return (words < W ? W : words) * kChunk;
}

// Turns the keys of W slots from `first` on, or the last of `count` again, to [words of a row][kChunk slots].
template <bool Half>
static void turn_keys(const Slots<Half>& keys, int64_t first, int64_t count, int64_t size, uint32_t* to) {
  using Of = Words<Half>;
  const uint8_t* rows[W];
  for (int i = 0; i < W; ++i) rows[i] = keys[first + least(i, count - 1)];
  for (int64_t d = 0; d < size; d += Of::kSpan) {
    const int64_t from = Of::begin(d, size);
    vu words[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) words[i] = Of::at(rows[i], from);
    turn(words);
    uint32_t* at = to + from / Of::kEach * kChunk;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) __builtin_memcpy(at + i * kChunk, &words[i], sizeof words[i]);
  }
}

// scores[query][slot] of turned keys, chunks of which are `step` words apart, kBand from query to query. query: [size][16]
template <bool Half, int Vectors, int Queries>
static void score(const uint32_t* turned, int64_t step, const float* query, int64_t size, float* scores) {
  using Of = Words<Half>;
  vf sums[Queries][Vectors] = {};
  for (int64_t d = 0; d < size; d += Of::kEach, turned += kChunk) {
    vu words[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      __builtin_memcpy(&words[v], turned + v * W / kChunk * step + v * W % kChunk, sizeof words[v]);
#pragma GCC unroll 2
    for (int c = 0; c < Of::kEach; ++c) {
      vf channels[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) channels[v] = Of::channel(words[v], c);
#pragma GCC unroll 6
      for (int q = 0; q < Queries; ++q) {
        const vf number = set(query[(d + c) * kRows + q]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sums[q][v] = mac(number, channels[v], sums[q][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(scores + q * kBand + v * W, sums[q][v]);
}

// Scores of all slots, bands of [16 queries][kBand]. room: for kAcross * W turned keys that no other task wants.
template <bool Half>
CPU_INLINE void score_slots(const AttendTask& task, const float* query, uint32_t* room, float* scores) {
  const int64_t all = task.prefix + task.steps, size = task.size, step = turned_words<Half>(size);
  const Slots<Half> keys(task, task.keys);
  auto* kept = reinterpret_cast<uint32_t*>(task.chunks);
  const int64_t whole = task.shares && size >= Words<Half>::kSpan ? task.prefix / kChunk : 0;
  for (; *task.turned < whole; ++*task.turned)
    for (int64_t i = 0; i < kChunk; i += W)
      turn_keys<Half>(keys, *task.turned * kChunk + i, W, size, kept + *task.turned * step + i);
  for (int64_t slot = 0; slot < all;) {
    const bool is_kept = slot < whole * kChunk;
    const int64_t left = (is_kept ? whole * kChunk : all) - slot;
    const auto run = [&](auto vectors) __attribute__((always_inline)) {
      constexpr int kVectors = decltype(vectors)::value;
      const uint32_t* from = room;
      if (is_kept)
        from = kept + slot / kChunk * step + slot % kChunk;
      else
        for (int v = 0; v < kVectors; ++v)
          turn_keys<Half>(keys, slot + v * W, left - v * W, size, room + v * W / kChunk * step + v * W % kChunk);
      float* to = scores + slot / kBand * kBand * kRows + slot % kBand;
      by_queries<kScoredTogether>(task.count, [&](int64_t q, auto some) __attribute__((always_inline)) {
        score<Half, kVectors, decltype(some)::value>(from, step, query + q, size, to + q * kBand);
      });
      slot += kVectors * W;
    };
    // a band ends where one begins
    if (left > (kAcross - 1) * W && (!is_kept || left >= kAcross * W) && slot % (kAcross * W) == 0)
      run(std::integral_constant<int, kAcross>{});
    else
      run(std::integral_constant<int, 1>{});
  }
}

// Scores of what a query does not see, and of what fills the last vector, to those that weigh nothing; peaks: [W].
static void find_peaks(const AttendTask& task, int64_t query, int64_t band, float* scores, float* peaks) {
  const int64_t all = task.prefix + task.steps, end = least(band + kBand, all);
  const auto hide = [&](int64_t from, int64_t to, const auto& is_hidden) __attribute__((always_inline)) {
    for (int64_t i = from; i < to; ++i)
      if (is_hidden(i)) scores[i - band] = -__builtin_inff();
  };
  const auto always = [](int64_t) { return true; };
  hide(band, least(end, task.begins[query]), always);
  hide(band > task.prefix ? band : task.prefix, end,
       [&](int64_t i) { return !(task.step[i - task.prefix].lanes >> query & 1); });
  hide(end, (end + W - 1) / W * W, always);
  vf most = load(peaks);
  for (int64_t i = 0; i < end - band; i += W) most = greater(most, load(scores + i));
  store(peaks, most);
}

// Sums of Vectors spans of the values' channels from `d` on over slots [begin, end), slot after slot, added to `sums`,
// [queries][Vectors][channels of a word][W]; and to `total`, where wanted, of the weights, kBand from query to query. What a
// query does not see is left out, not added as zero. `first`: the first query's lane.
template <bool Half, int Vectors, int Queries, bool Total>
static void add_values(const AttendTask& task, int64_t first, int64_t d, int64_t begin, int64_t end, const float* weights,
                       float* sums, float* total) {
  using Of = Words<Half>;
  const Slots<Half> values(task, task.values);
  const int64_t prefix = task.prefix;
  const Step* const step = task.step;
  const int32_t* const begins = task.begins + first;
  vf own[Queries][Vectors][Of::kEach], totals[Queries];
#pragma GCC unroll 4
  for (int q = 0; q < Queries; ++q) {
    if (Total) totals[q] = set(total[q]);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
#pragma GCC unroll 2
      for (int c = 0; c < Of::kEach; ++c) own[q][v][c] = load(sums + ((q * Vectors + v) * Of::kEach + c) * W);
  }
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
        const vf weight = set(weights[q * kBand + i - begin]);
        if (Total && v == 0) totals[q] = totals[q] + weight;
#pragma GCC unroll 2
        for (int c = 0; c < Of::kEach; ++c) own[q][v][c] = mac(weight, Of::channel(words, c), own[q][v][c]);
      }
    }
  };
  int64_t i = begin;
  const auto is_begun = [&](int q) __attribute__((always_inline)) { return i >= begins[q]; };
  const auto is_member = [&](int q) __attribute__((always_inline)) { return step[i - prefix].lanes >> (first + q) & 1; };
  for (; i < least(task.lead, end); ++i) add(i, is_begun);
  for (const int64_t common = least(prefix, end); i < common; ++i)
    add(i, [](int) __attribute__((always_inline)) { return true; });
  for (; i < end; ++i) add(i, is_member);
#pragma GCC unroll 4
  for (int q = 0; q < Queries; ++q) {
    if (Total) total[q] = totals[q][0];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
#pragma GCC unroll 2
      for (int c = 0; c < Of::kEach; ++c) store(sums + ((q * Vectors + v) * Of::kEach + c) * W, own[q][v][c]);
  }
}

// Calls body(d, place, constant of vectors, constant of whether it is the first) for spans of a head's channels that cover
// it, from channel d on; what spans sum stands behind that of `place` channels.
template <bool Half, typename Body>
CPU_INLINE void by_spans(int64_t size, const Body& body) {
  using Of = Words<Half>;
  constexpr std::integral_constant<int, 4 / Of::kEach> kMany{};
  constexpr std::integral_constant<int, 1> kOne{};
  constexpr int64_t kChannels = kMany * Of::kSpan;
  // 16 registers do not hold the weights' sums as well
  const bool begins_wide = W == 16 && size >= kChannels;
  if (begins_wide)
    body(0, 0, kMany, std::true_type{});
  else
    body(0, 0, kOne, std::true_type{});
  int64_t d = begins_wide ? kChannels : Of::kSpan;
  for (; d + kChannels <= size; d += kChannels) body(d, d, kMany, std::false_type{});
  for (; d < size; d += Of::kSpan) body(Of::begin(d, size), d, kOne, std::false_type{});
}

template <bool Half>
CPU_INLINE void attend_slots(const AttendTask& task) {
  using Of = Words<Half>;
  const int64_t size = task.size, all = task.prefix + task.steps, room = (size + Of::kSpan - 1) / Of::kSpan * Of::kSpan;
  float *query = task.scratch, *found = query + size * kRows, *sums = found + size * kRows;
  float* scores = sums + room * kRows;
  auto* turned = reinterpret_cast<uint32_t*>(scores + (all + kBand - 1) / kBand * kBand * kRows);
  gather(task, query);
  score_slots<Half>(task, query, turned, scores);
  alignas(64) float peaks[kRows][W], peak[kRows], sinks[kRows] = {}, share[kRows] = {};
  for (auto& lanes : peaks) store(lanes, set(-3.0e38f));
  for (int64_t band = 0; band < all; band += kBand)
    for (int64_t q = 0; q < task.count; ++q) find_peaks(task, q, band, scores + band * kRows + q * kBand, peaks[q]);
  for (int64_t q = 0; q < task.count; ++q) {
    peak[q] = peaks[q][0];
    for (const float other : peaks[q]) peak[q] = peak[q] > other ? peak[q] : other;
    if (!task.sinks) continue;
    const float sink = task.sinks[(task.first + q) % task.per_row];
    peak[q] = peak[q] > sink ? peak[q] : sink;
    sinks[q] = exponential(set(sink - peak[q]))[0];
  }
  __builtin_memset(sums, 0, static_cast<size_t>(room * kRows) * sizeof(float));
  for (int64_t band = 0; band < all; band += kBand) {
    const int64_t end = least(band + kBand, all);
    by_queries<kSummedTogether>(task.count, [&](int64_t q, auto some) __attribute__((always_inline)) {
      constexpr int kQueries = decltype(some)::value;
      float* weights = scores + band * kRows + q * kBand;
      for (int own = 0; own < kQueries; ++own)
        for (int64_t i = own * kBand; i < own * kBand + end - band; i += W)
          store(weights + i, exponential_of_least(load(weights + i) - peak[q + own]));
      by_spans<Half>(size, [&](int64_t d, int64_t place, auto vectors, auto total) __attribute__((always_inline)) {
        add_values<Half, decltype(vectors)::value, kQueries, decltype(total)::value>(
            task, q, d, band, end, weights, sums + q * room + place * kQueries, share + q);
      });
    });
  }
  __builtin_memset(found, 0, static_cast<size_t>(size * kRows) * sizeof(float));
  by_queries<kSummedTogether>(task.count, [&](int64_t q, auto some) __attribute__((always_inline)) {
    by_spans<Half>(size, [&](int64_t d, int64_t place, auto vectors, auto) __attribute__((always_inline)) {
      constexpr int kVectors = decltype(vectors)::value;
      const int64_t channels = least(kVectors * Of::kSpan, size - d);
      for (int own = 0; own < some; ++own) {
        const float* from = sums + q * room + place * some + own * kVectors * Of::kSpan;
        for (int64_t i = 0; i < channels; ++i)
          found[(d + i) * kRows + q + own] = from[(i / Of::kSpan * Of::kEach + i % Of::kEach) * W + i % Of::kSpan / Of::kEach];
      }
    });
  });
  for (int v = 0; v < V; ++v) store(share + v * W, share_of(load(share + v * W) + load(sinks + v * W)));
  scatter(task, found, share);
}

static void attend_in_order(const AttendTask& task) {
  if (task.half)
    attend_slots<true>(task);
  else
    attend_slots<false>(task);
}
