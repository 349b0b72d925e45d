// Products of bytes without a sign by bytes with one: VPDPBUSD on 256 bits, as AVX-VNNI has it.

// What weights with a sign are raised by, so that they have none.
template <typename F>
constexpr int kRaised = F::kLargest == kSigned ? 128 : F::kOffset;

// A word of weights, made once for all rows.
template <typename F>
struct Word {
  CPU_MEMBER explicit Word(vu word) : value((__m256i)(F::kLargest == kSigned ? word ^ 0x80808080u : word)) {}
  __m256i value;
};

// The sum of a row's products over a group of inputs.
template <typename F>
struct Sum {
  CPU_MEMBER void begin(const int32_t* negated) {
    constexpr int kShift = kRaised<F> ? __builtin_ctz(kRaised<F>) : 0;
    value = kRaised<F> ? _mm256_slli_epi32(_mm256_set1_epi32(*negated), kShift) : _mm256_setzero_si256();
  }
  CPU_MEMBER void add(const Word<F>& word, int, const int32_t* row) {
    value = _mm256_dpbusd_avx_epi32(value, word.value, _mm256_set1_epi32(*row));
  }
  CPU_MEMBER vf end() const { return (vf)_mm256_cvtepi32_ps(value); }
  __m256i value;
};
