// int8 with a scale per output, made here of float32 or bfloat16: bytes with a sign.
struct i8 : Integers {
  static constexpr Layout kLayout{512};
  static constexpr int64_t kFileInputs = 1, kFileBytes = 0;  // in no file
  static constexpr int kLargest = kSigned;
  static constexpr bool kScaled = false;

  static constexpr Put* put = nullptr;
  static void quantize(Kind from, const uint8_t* const* rows, int64_t inputs, uint8_t* panel, float* scales) {
    packing::quantize_panel(from, rows, inputs, scales, [&](int output, int64_t k, uint8_t value) {
      panel[k / kDepth * kLayout.bytes + k % kDepth / 4 * 64 + 4 * output + k % 4] = value;
    });
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) { return bits_of<8>(block.at, i, o); }
};
