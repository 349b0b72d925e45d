// Products of bytes as pairs of 16 bits: PMADDWD of SSE2, or plain vectors.

template <typename F>
struct Word {
  // inputs 0 and 2, and 1 and 3, as 16 bits each
  CPU_MEMBER explicit Word(vu word)
      : even(F::kLargest == kSigned ? (vs)(word << 8) >> 8 : (vs)(word & 0x00FF00FFu)),
        odd(F::kLargest == kSigned ? (vs)word >> 8 : (vs)(word >> 8 & 0x00FF00FFu)) {}
  vs even, odd;
};

CPU_INLINE vi pair_products(vs a, vs b) {
#if defined(__SSE2__)
  return (vi)__builtin_ia32_pmaddwd128(a, b);
#else
  const vi low = ((vi)a << 16 >> 16) * ((vi)b << 16 >> 16), high = ((vi)a >> 16) * ((vi)b >> 16);
  return low + high;
#endif
}

template <typename F>
struct Sum {
  CPU_MEMBER void begin(const int32_t* negated) { value = vi{} + *negated * F::kOffset; }
  CPU_MEMBER void add(const Word<F>& word, int, const int32_t* row) {
    const vu x = vu{} + static_cast<uint32_t>(*row);
    value += pair_products(word.even, (vs)(x << 8) >> 8) + pair_products(word.odd, (vs)x >> 8);
  }
  CPU_MEMBER vf end() const { return __builtin_convertvector(value, vf); }
  vi value;
};
