// Attention by tiles, where the cache is bfloat16 and heads are whole tiles.

#include "cpu/kernels/attention.inl"

// Scores and values by tiles, over a bfloat16 cache.
//
// A tile that multiplies 32 slots sums those at even places, then those at odd places, each one after the other from zero, and
// adds both to what it had. So a query's sum is made of chunks of 32 places on its own path, whatever the slots are: what all
// lanes see in whole chunks goes through tiles, and what a tile does is done lane by lane for the rest, with a sum for the
// even and one for the odd places. Tiles take denormals for zero, so threads do too (see begin).

constexpr int kChannels = 8;  // of the output, summed side by side

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

CPU_INLINE __m512 even_of(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }
CPU_INLINE __m512 odd_of(__m512i pairs) { return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)); }

// scores of `Blocks` times 16 keys, each [16][size] halves. query: [size / 32][2][16 pairs][16], what bfloat16 keeps of it
// and what it keeps of the rest
template <int Blocks>
CPU_INLINE void score_tiles(const uint16_t* const* keys, const uint32_t* query, int64_t size, float* scores) {
  _tile_zero(0);
  if (Blocks > 1) _tile_zero(1);
  if (Blocks > 2) _tile_zero(2);
  if (Blocks > 3) _tile_zero(3);
  for (int64_t d = 0; d < size; d += kDepth, query += 512) {
    _tile_loadd(4, query, 64);
    _tile_loadd(5, query + 256, 64);
    _tile_loadd(6, keys[0] + d, size * 2);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(0, 6, 5);
    if (Blocks > 1) {
      _tile_loadd(7, keys[1] + d, size * 2);
      _tile_dpbf16ps(1, 7, 4);
      _tile_dpbf16ps(1, 7, 5);
    }
    if (Blocks > 2) {
      _tile_loadd(6, keys[2] + d, size * 2);
      _tile_dpbf16ps(2, 6, 4);
      _tile_dpbf16ps(2, 6, 5);
    }
    if (Blocks > 3) {
      _tile_loadd(7, keys[3] + d, size * 2);
      _tile_dpbf16ps(3, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
  CPU_STORE(0, scores);
  if (Blocks > 1) CPU_STORE(1, scores + 256);
  if (Blocks > 2) CPU_STORE(2, scores + 512);
  if (Blocks > 3) CPU_STORE(3, scores + 768);
}

// Values of slots [first, first + 32), those from `end` on as zero, to [size / 16][16 channels][32 slots].
static void turn(const uint16_t* values, int64_t size, int64_t first, int64_t end, uint16_t* to) {
  for (int64_t d = 0; d < size; d += 32) {
    __m512i low[16], high[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const int64_t slot = first + 2 * i;
      const __m512i zero = _mm512_setzero_si512();
      const __m512i a = slot < end ? _mm512_loadu_si512(values + slot * size + d) : zero;
      const __m512i b = slot + 1 < end ? _mm512_loadu_si512(values + (slot + 1) * size + d) : zero;
      low[i] = _mm512_unpacklo_epi16(a, b);    // channels 0 to 3, 8 to 11, 16 to 19, 24 to 27
      high[i] = _mm512_unpackhi_epi16(a, b);
    }
    transpose(low);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (d + i / 4 * 8 + i % 4) * 32, low[i]);
    transpose(high);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (d + i / 4 * 8 + 4 + i % 4) * 32, high[i]);
  }
}

// sums of `Tiles` times 16 channels over `count` chunks, `stride` halves apart; weights: [count][16 pairs of slots][16]
template <int Tiles, typename Make>
CPU_INLINE void value_tiles(const uint16_t* chunks, int64_t stride, int64_t count, const uint32_t* weights, float* sums,
                            const Make& make) {
  _tile_zero(0);
  if (Tiles > 1) _tile_zero(1);
  if (Tiles > 2) _tile_zero(2);
  if (Tiles > 3) _tile_zero(3);
  for (int64_t c = 0; c < count; ++c) {
    make(c + 1);
    CPU_FENCE();
    const uint16_t* at = chunks + c * stride;
    _tile_loadd(4, weights + c * 256, 64);
    _tile_loadd(5, at, 64);
    _tile_dpbf16ps(0, 5, 4);
    if (Tiles > 1) {
      _tile_loadd(6, at + 512, 64);
      _tile_dpbf16ps(1, 6, 4);
    }
    if (Tiles > 2) {
      _tile_loadd(7, at + 1024, 64);
      _tile_dpbf16ps(2, 7, 4);
    }
    if (Tiles > 3) {
      _tile_loadd(5, at + 1536, 64);
      _tile_dpbf16ps(3, 5, 4);
    }
  }
  CPU_STORE(0, sums);
  if (Tiles > 1) CPU_STORE(1, sums + 256);
  if (Tiles > 2) CPU_STORE(2, sums + 512);
  if (Tiles > 3) CPU_STORE(3, sums + 768);
  CPU_FENCE();
}

// Add the places after the last tile: slots [tiled, prefix), then the steps, with their values in `expanded`.
static void add_rest(const AttendTask& task, int64_t tiled, const float* scores, const float* expanded, float* sums) {
  for (int64_t d = 0; d < task.size; d += kChannels) {
    __m512 out[kChannels], even[kChannels], odd[kChannels];
#pragma GCC unroll 8
    for (int i = 0; i < kChannels; ++i) {
      out[i] = _mm512_loadu_ps(sums + (d + i) * kRows);
      even[i] = odd[i] = _mm512_setzero_ps();
    }
    const float* values = expanded + d;
    int64_t slot = tiled;
    for (; slot + 2 <= task.prefix; slot += 2, values += 2 * task.size) {
      const __m512 first = _mm512_loadu_ps(scores + slot * kRows), second = _mm512_loadu_ps(scores + (slot + 1) * kRows);
#pragma GCC unroll 8
      for (int i = 0; i < kChannels; ++i) {
        even[i] = _mm512_fmadd_ps(first, _mm512_set1_ps(values[i]), even[i]);
        odd[i] = _mm512_fmadd_ps(second, _mm512_set1_ps(values[task.size + i]), odd[i]);
      }
    }
    if (slot < task.prefix) {
      const __m512 weight = _mm512_loadu_ps(scores + slot * kRows);
#pragma GCC unroll 8
      for (int i = 0; i < kChannels; ++i) even[i] = _mm512_fmadd_ps(weight, _mm512_set1_ps(values[i]), even[i]);
      values += task.size;
    }
    for (int64_t s = 0; s < task.steps; ++s, values += task.size) {
      const Step& step = task.step[s];
      const __m512 weight = _mm512_loadu_ps(scores + step.slot * kRows);
      const __mmask16 at_odd = step.odd, at_even = static_cast<__mmask16>(step.lanes ^ step.odd), last = step.last;
      if (at_even)
#pragma GCC unroll 8
        for (int i = 0; i < kChannels; ++i)
          even[i] = _mm512_mask3_fmadd_ps(weight, _mm512_set1_ps(values[i]), even[i], at_even);
      if (at_odd)
#pragma GCC unroll 8
        for (int i = 0; i < kChannels; ++i)
          odd[i] = _mm512_mask3_fmadd_ps(weight, _mm512_set1_ps(values[i]), odd[i], at_odd);
      if (last)
#pragma GCC unroll 8
        for (int i = 0; i < kChannels; ++i) {
          out[i] = _mm512_mask_add_ps(out[i], last, out[i], _mm512_add_ps(even[i], odd[i]));
          even[i] = _mm512_mask_mov_ps(even[i], last, _mm512_setzero_ps());
          odd[i] = _mm512_mask_mov_ps(odd[i], last, _mm512_setzero_ps());
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kChannels; ++i)
      _mm512_storeu_ps(sums + (d + i) * kRows, _mm512_add_ps(out[i], _mm512_add_ps(even[i], odd[i])));
  }
}

static void attend_by_tiles(const AttendTask& task) {
  const int64_t size = task.size, prefix = task.prefix, slots = task.slots;
  // where all lanes see all slots the last chunk is one of tiles too, filled up with zeros
  const int64_t tiled = task.steps ? prefix / kChunk * kChunk : slots, chunks = (tiled + kChunk - 1) / kChunk;
  uint32_t* query = reinterpret_cast<uint32_t*>(task.scratch);
  uint32_t* pairs = query + size * kRows;
  float* sums = reinterpret_cast<float*>(pairs + (slots / kChunk + 1) * 256);
  float* scores = sums + size * kRows;
  float* expanded = scores + (slots / kRows + 1) * 256;
  const auto* keys = static_cast<const uint16_t*>(task.keys);
  const auto* values = static_cast<const uint16_t*>(task.values);

  const Lanes lanes(task);
  for (int64_t d = 0; d < size; d += 2) {
    const __m512 even = lanes.gather(task.queries, size, d), odd = lanes.gather(task.queries, size, d + 1);
    const __m512i kept = pairs_of((vf)even, (vf)odd);
    uint32_t* to = query + d / kDepth * 512 + d % kDepth / 2 * kRows;
    _mm512_storeu_si512(to, kept);
    const __m512 even_rest = _mm512_sub_ps(even, even_of(kept)), odd_rest = _mm512_sub_ps(odd, odd_of(kept));
    _mm512_storeu_si512(to + 256, pairs_of((vf)even_rest, (vf)odd_rest));
  }
  // between the queries' stores and their tiles' loads, which would wait for them
  const int64_t whole = slots / kRows * kRows, rest = prefix + task.steps - tiled;
  for (int64_t i = 0; i < rest; ++i)
    expand_slot(task, values, tiled + i < prefix ? tiled + i : task.step[tiled + i - prefix].slot, expanded + i * size);
  auto* last_keys = reinterpret_cast<uint16_t*>(expanded + rest * size);
  __builtin_memcpy(last_keys, keys + whole * size, static_cast<size_t>((slots - whole) * size) * sizeof(uint16_t));
  CPU_FENCE();
  for (int64_t slot = 0; slot < slots; slot += 4 * kRows) {
    const uint16_t* at[4];
    for (int64_t i = 0; i < 4; ++i) at[i] = slot + i * kRows < whole ? keys + (slot + i * kRows) * size : last_keys;
    float* to = scores + slot * kRows;
    switch (least(4, (slots - slot + kRows - 1) / kRows)) {
      case 1: score_tiles<1>(at, query, size, to); break;
      case 2: score_tiles<2>(at, query, size, to); break;
      case 3: score_tiles<3>(at, query, size, to); break;
      default: score_tiles<4>(at, query, size, to);
    }
  }
  CPU_FENCE();

  const auto at = [&](int64_t slot) __attribute__((always_inline)) { return _mm512_loadu_ps(scores + slot * kRows); };
  const __m512i begins = _mm512_loadu_si512(task.begins);
  const auto sees = [&](int64_t slot) __attribute__((always_inline)) {  // of the prefix
    return _mm512_cmple_epi32_mask(begins, _mm512_set1_epi32(static_cast<int>(slot)));
  };
  __m512 peaks[4];
  for (__m512& peak : peaks) peak = _mm512_set1_ps(-3.0e38f);
  int64_t s = 0;
  for (; s < task.lead; ++s) peaks[0] = _mm512_mask_max_ps(peaks[0], sees(s), peaks[0], at(s));
  for (; s + 4 <= prefix; s += 4)
    for (int i = 0; i < 4; ++i) peaks[i] = _mm512_max_ps(peaks[i], at(s + i));
  for (; s < prefix; ++s) peaks[0] = _mm512_max_ps(peaks[0], at(s));
  for (int64_t i = 0; i < task.steps; ++i)
    peaks[0] = _mm512_mask_max_ps(peaks[0], task.step[i].lanes, peaks[0], at(task.step[i].slot));
  const __m512 scale = _mm512_set1_ps(task.scale * 1.44269504f);
  const __m512 peak = _mm512_max_ps(_mm512_max_ps(peaks[0], peaks[1]), _mm512_max_ps(peaks[2], peaks[3]));
  const __m512 zero = _mm512_setzero_ps();
  __m512 shift = _mm512_mul_ps(peak, scale), sink = zero;
  if (task.sinks) {
    alignas(64) float sinks[kRows] = {};
    for (int64_t i = 0; i < task.count; ++i) sinks[i] = task.sinks[(task.first + i) % task.per_row];
    const __m512 score = _mm512_mul_ps(_mm512_load_ps(sinks), _mm512_set1_ps(1.44269504f));
    shift = _mm512_max_ps(shift, score);
    sink = power_of_two(_mm512_sub_ps(score, shift));
  }
  __m512 sum = zero;
  const auto weight_at = [&](int64_t slot) __attribute__((always_inline)) {
    return power_of_two(_mm512_fmsub_ps(at(slot), scale, shift));
  };
  const auto put = [&](int64_t slot, __m512 first, __m512 second) __attribute__((always_inline)) {
    const __m512i pair = pairs_of((vf)first, (vf)second);
    _mm512_storeu_si512(pairs + slot / 2 * kRows, pair);
    sum = _mm512_add_ps(_mm512_add_ps(sum, even_of(pair)), odd_of(pair));
  };
  const auto seen_at = [&](int64_t slot) __attribute__((always_inline)) {  // zero where a lane's window begins later
    return _mm512_maskz_mov_ps(sees(slot), weight_at(slot));
  };
  for (s = 0; s < task.lead && s + 2 <= tiled; s += 2) put(s, seen_at(s), seen_at(s + 1));
#pragma GCC unroll 2
  for (; s + 2 <= tiled; s += 2) put(s, weight_at(s), weight_at(s + 1));
  if (s < tiled) put(s, seen_at(s), zero), s += 2;
  for (; s < chunks * kChunk; s += 2) _mm512_storeu_si512(pairs + s / 2 * kRows, _mm512_setzero_si512());
  for (s = tiled; s < prefix + task.steps; ++s) {
    const int64_t slot = s < prefix ? s : task.step[s - prefix].slot;
    const __mmask16 seen = s < prefix ? sees(s) : task.step[s - prefix].lanes;
    const __m512 weight = even_of(pairs_of((vf)_mm512_maskz_mov_ps(seen, weight_at(slot)), (vf)zero));
    _mm512_storeu_ps(scores + slot * kRows, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  alignas(64) float share[kRows];
  store(share, share_of((vf)_mm512_add_ps(sum, sink)));

  // chunk c of the values, [size / 16][16 channels][32 slots], is at task.chunks + c * kChunk * size
  const auto make = [&](int64_t c) {
    if (c < *task.turned || c >= chunks) return;
    turn(values, size, c * kChunk, slots, task.chunks + c * kChunk * size);
    if ((c + 1) * kChunk <= slots) *task.turned = c + 1;
  };
  make(0);
  for (int64_t d = 0; d < size; d += 64) {
    const uint16_t* from = task.chunks + d * kChunk;
    float* to = sums + d * kRows;
    if (size - d == 32)
      value_tiles<2>(from, kChunk * size, chunks, pairs, to, make);
    else
      value_tiles<4>(from, kChunk * size, chunks, pairs, to, make);
  }
  if (tiled < prefix + task.steps) add_rest(task, tiled, scores, expanded, sums);
  scatter(task, sums, share);
}

static void attend_by_tiles_or_in_order(const AttendTask& task) {
  if (task.half && task.size % kDepth == 0) return attend_by_tiles(task);
  attend_in_order(task);
}
