// The work of lanes_16.inl and queries_16.inl, which transpose vectors of 16 lanes, one number at a time.

CPU_INLINE void turn_rows(const uint32_t* from, int64_t words, int64_t live, uint32_t* to) {
  turn_rows_singly(from, words, live, to);
}

CPU_INLINE int64_t write_vectors(const float*, int64_t, int64_t, void*, int64_t, bool) { return 0; }
