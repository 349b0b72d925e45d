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
    packing::quantize_panel(from, rows, inputs, scales, [&](int output, int64_t k, uint8_t value) {
      panel[k / 64 * 1024 + output * 64 + k % 64] = value;
    });
  }
  CPU_MEMBER static void weights(const Block& block, int output, float* out) {
    for (int k = 0; k < kDepth; k += W) store(out + k, bytes(block.at + output * 64 + k));
  }
};
