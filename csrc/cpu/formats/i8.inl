// int8 with a scale per output, made here of float32 or bfloat16: [16][32] values, side by side with the next block's,
// [16][64] of both, as tiles read them. Integer sums of tiles hold 65536 inputs.
struct i8 : Format {
  using Form = Bytes;
  static constexpr Layout kLayout{512, 0, 2};
  static constexpr int64_t kFileInputs = 1, kFileBytes = 0;  // in no file
  static constexpr int64_t kStride = 64, kMostInputs = 65536;

  static constexpr Put* put = nullptr;
  // Sixteen rows of f32 or bf16 to a panel; null where there is none.
  static void quantize(Kind from, const uint8_t* const* rows, int64_t inputs, uint8_t* panel, float* scales) {
    for (int o = 0; o < kOutputs; ++o) {
      float peak = 0.0f;
      if (rows[o])
        for (int64_t k = 0; k < inputs; ++k) {
          const float size = __builtin_fabsf(packing::source(from, rows[o], k));
          if (size > peak || size != size) peak = size;  // NaN stays, so that the whole output is
        }
      scales[o] = peak / 127.0f;
      for (int64_t k = 0; k < inputs && peak > 0; ++k) {
        const float value = __builtin_nearbyintf(packing::source(from, rows[o], k) / scales[o]);
        const auto rounded = static_cast<int8_t>(value < 127.0f ? (value > -127.0f ? value : -127.0f) : 127.0f);
        panel[k / 64 * 1024 + o * 64 + k % 64] = static_cast<uint8_t>(rounded);
      }
    }
  }
  CPU_MEMBER static void weights(const Block& block, int output, float* out) {
    for (int k = 0; k < kDepth; k += W) store(out + k, bytes(block.at + output * 64 + k));
  }
};
