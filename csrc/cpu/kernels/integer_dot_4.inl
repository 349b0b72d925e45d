// Products of bytes with a sign: SDOT of aarch64. Weights without one are below 128, so that they have one too.

template <typename F>
struct Word {
  CPU_MEMBER explicit Word(vu word) : value((int8x16_t)word) {}
  int8x16_t value;
};

// The sum of a row's products over a group of inputs.
template <typename F>
struct Sum {
  CPU_MEMBER void begin(const int32_t* negated) { value = vdupq_n_s32(*negated * F::kOffset); }
  CPU_MEMBER void add(const Word<F>& word, int, const int32_t* row) {
    value = vdotq_s32(value, word.value, vreinterpretq_s8_s32(vdupq_n_s32(*row)));
  }
  CPU_MEMBER vf end() const { return (vf)vcvtq_f32_s32(value); }
  int32x4_t value;
};
