// Products of bytes without a sign by bytes with one: VPDPBUSD on 512 bits.

// What weights with a sign are raised by, so that they have none.
template <typename F>
constexpr int kRaised = F::kLargest == kSigned ? 128 : F::kOffset;

// A word of weights, made once for all rows.
template <typename F>
struct Word {
  CPU_MEMBER explicit Word(vu word) : value((__m512i)(F::kLargest == kSigned ? word ^ 0x80808080u : word)) {}
  __m512i value;
};

// The sum of a row's products over a group of inputs.
template <typename F>
struct Sum {
  CPU_MEMBER void begin(const int32_t* negated) {
    constexpr unsigned kShift = kRaised<F> ? __builtin_ctz(kRaised<F>) : 0;
    value = kRaised<F> ? _mm512_slli_epi32(_mm512_set1_epi32(*negated), kShift) : _mm512_setzero_si512();
  }
  CPU_MEMBER void add(const Word<F>& word, int, const int32_t* row) {
    value = _mm512_dpbusd_epi32(value, word.value, _mm512_set1_epi32(*row));
  }
  CPU_MEMBER vf end() const { return (vf)_mm512_cvtepi32_ps(value); }
  __m512i value;
};
