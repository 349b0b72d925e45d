// Products of bytes without a sign by bytes with one: VPMADDUBSW on 256 bits. Its sums of 16 bits hold several words of small
// weights. Weights with a sign give it to the row's bytes.

// Words whose products 16 bits hold: 2 * 127 * largest each.
template <typename F>
constexpr int kHeld = F::kLargest == kSigned ? 1 : F::kLargest <= 15 ? 8 : F::kLargest <= 31 ? 4 : 2;

template <typename F>
struct Word {
  CPU_MEMBER explicit Word(vu word) : value((__m256i)word) {
    if (F::kLargest == kSigned) size = _mm256_abs_epi8(value);
  }
  CPU_MEMBER __m256i by(__m256i row) const {
    if (F::kLargest != kSigned) return _mm256_maddubs_epi16(value, row);
    return _mm256_maddubs_epi16(size, _mm256_sign_epi8(row, value));
  }
  __m256i value, size;
};

// The sum of a row's products over a group of inputs.
template <typename F>
struct Sum {
  static constexpr int kWords = kWordsOfBlock / F::kGroups, kHold = kHeld<F> < kWords ? kHeld<F> : kWords;

  CPU_MEMBER void begin(const int32_t* negated) {
    if (F::kOffset) value = _mm256_slli_epi32(_mm256_set1_epi32(*negated), F::kOffset ? __builtin_ctz(F::kOffset) : 0);
  }
  CPU_MEMBER void add(const Word<F>& word, int k, const int32_t* row) {
    const __m256i products = word.by(_mm256_set1_epi32(*row));
    part = k % kHold == 0 ? products : _mm256_add_epi16(part, products);
    if (k % kHold != kHold - 1) return;
    const __m256i sums = _mm256_madd_epi16(part, _mm256_set1_epi16(1));
    value = k < kHold && !F::kOffset ? sums : _mm256_add_epi32(value, sums);
  }
  CPU_MEMBER vf end() const { return (vf)_mm256_cvtepi32_ps(value); }
  __m256i value, part;
};
