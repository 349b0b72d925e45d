// Q8_0 of ggml, d * q: [16][32] int8, 16 half d.
struct q8_0 : Format {
  using Form = Bytes;
  static constexpr Layout kLayout{544};
  static constexpr int64_t kFileInputs = 32, kFileBytes = 34;
  static constexpr int64_t kStride = 32;
  static constexpr bool kScaled = true;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t*) {
    const uint8_t* from = row + block * kFileBytes;
    packing::put_half(to + 512, output, from);
    __builtin_memcpy(to + output * kDepth, from + 2, 32);
  }
  CPU_MEMBER static void weights(const Block& block, int output, float* out) {
    const float d = half_precision(block.at + 512, output);
    for (int k = 0; k < kDepth; k += W) store(out + k, as_half(bytes(block.at + output * 32 + k) * d));
  }
  CPU_MEMBER static void factors(const Block& block, float* factors) {
    for (int o = 0; o < kOutputs; o += W) store(factors + o, half_floats(block.at + 512 + 2 * o));
  }
};
