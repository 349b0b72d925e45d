// Q4_0 of ggml, d * (q - 8): nibbles, 16 half d.
struct q4_0 : Format {
  using Form = Nibbles;
  static constexpr Layout kLayout{288};
  static constexpr int64_t kFileInputs = 32, kFileBytes = 18;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t*) {
    const uint8_t* from = row + block * kFileBytes;
    packing::put_half(to + 256, output, from);
    packing::put_nibbles(to, output, from + 2);
  }
  CPU_MEMBER static void weights(const Block& block, int output, float* out) {
    const float d = half_precision(block.at + 256, output);
    nibbles(block.at, output, d, -8.0f * d, out);
  }
  CPU_MEMBER static void lines(const Block& block, float* factors, float* terms) {
    for (int o = 0; o < kOutputs; o += W) {
      const vf d = half_floats(block.at + 256 + 2 * o);
      store(factors + o, d);
      store(terms + o, d * -8.0f);
    }
  }
};
