// Queries of attention into 16 lanes and sums back to rows, by permutations.

// Lane i of a group is channel d of row rows[i] of one of its heads: source(head) is that head's vector of 16 rows.
class Lanes {
 public:
  CPU_MEMBER explicit Lanes(const AttendTask& task) : per_row_(task.per_row), first_(task.first), count_(task.count) {
    alignas(64) int32_t rows[kRows], heads[kRows];
    for (int i = 0; i < kRows; ++i) {
      rows[i] = static_cast<int32_t>((first_ + i) / per_row_) & 15;
      heads[i] = i < count_ ? static_cast<int32_t>((first_ + i) % per_row_) : -1;
    }
    rows_ = _mm512_load_si512(rows);
    heads_ = _mm512_load_si512(heads);
  }
  CPU_MEMBER __m512 gather(const float* queries, int64_t size, int64_t channel) const {
    __m512 found = _mm512_setzero_ps();
    for (int64_t h = 0; h < per_row_; ++h)
      found = _mm512_mask_permutexvar_ps(found, of(h), rows_, _mm512_loadu_ps(queries + (h * size + channel) * kRows));
    return found;
  }
  // The group's words to the rows of its heads: `stride` words from head to head.
  CPU_MEMBER void scatter(vu words, void* to, int64_t stride) const {
    const __m512i counting = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i base = _mm512_sub_epi32(_mm512_mullo_epi32(counting, _mm512_set1_epi32(static_cast<int>(per_row_))),
                                          _mm512_set1_epi32(static_cast<int>(first_)));
    for (int64_t h = 0; h < per_row_; ++h) {
      const __m512i lane = _mm512_add_epi32(base, _mm512_set1_epi32(static_cast<int>(h)));
      const __mmask16 mine = _mm512_cmplt_epu32_mask(lane, _mm512_set1_epi32(static_cast<int>(count_)));
      _mm512_mask_storeu_epi32(static_cast<uint32_t*>(to) + h * stride, mine, _mm512_permutexvar_epi32(lane, (__m512i)words));
    }
  }

 private:
  CPU_MEMBER __mmask16 of(int64_t head) const {
    return _mm512_cmpeq_epi32_mask(heads_, _mm512_set1_epi32(static_cast<int>(head)));
  }
  const int64_t per_row_, first_, count_;
  __m512i rows_, heads_;
};

// query: [size][16]
CPU_INLINE void gather(const AttendTask& task, float* query) {
  const Lanes lanes(task);
  for (int64_t d = 0; d < task.size; ++d)
    _mm512_storeu_ps(query + d * kRows, _mm512_mul_ps(lanes.gather(task.queries, task.size, d), _mm512_set1_ps(task.scale)));
}

// sums [size][16] times `share`, to where the product behind attention reads them.
CPU_INLINE void scatter(const AttendTask& task, float* sums, const float* share) {
  const Lanes lanes(task);
  const __m512 times = _mm512_loadu_ps(share);
  for (int64_t d = 0; d < task.size; d += 2) {
    const __m512 even = _mm512_mul_ps(_mm512_loadu_ps(sums + d * kRows), times);
    const __m512 odd = _mm512_mul_ps(_mm512_loadu_ps(sums + (d + 1) * kRows), times);
    scatter_pair(lanes, task, d, (vf)even, (vf)odd);
  }
}
