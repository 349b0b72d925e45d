// Queries of attention into lanes and sums back to rows, one number at a time.

// query: [size][16]
CPU_INLINE void gather(const AttendTask& task, float* query) {
  __builtin_memset(query, 0, static_cast<size_t>(task.size * kRows) * sizeof(float));
  for (int64_t lane = 0; lane < task.count; ++lane) {
    const int64_t of = task.first + lane;
    const float* from = task.queries + of % task.per_row * task.size * kRows + of / task.per_row;
    for (int64_t d = 0; d < task.size; ++d) query[d * kRows + lane] = from[d * kRows] * task.scale;
  }
}

// sums [size][16] times `share`, to where the product behind attention reads them.
CPU_INLINE void scatter(const AttendTask& task, float* sums, const float* share) {
  for (int64_t lane = 0; lane < task.count; ++lane) {
    const int64_t of = task.first + lane;
    float* to = task.out->floats(task.tile) + (task.channel + of % task.per_row * task.size) * kRows + of / task.per_row;
    for (int64_t d = 0; d < task.size; ++d) to[d * kRows] = sums[d * kRows + lane] * share[lane];
  }
}
