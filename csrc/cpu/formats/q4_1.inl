// Q4_1 of ggml, d * q + m: nibbles, 16 half d, 16 half m.
struct q4_1 : Format {
  using Form = Nibbles;
  static constexpr Layout kLayout{320};
  static constexpr int64_t kFileInputs = 32, kFileBytes = 20;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t*) {
    const uint8_t* from = row + block * kFileBytes;
    packing::put_half(to + 256, output, from);
    packing::put_half(to + 288, output, from + 2);
    packing::put_nibbles(to, output, from + 4);
  }
  CPU_MEMBER static void weights(const Block& block, int output, float* out) {
    nibbles(block.at, output, half_precision(block.at + 256, output), half_precision(block.at + 288, output), out);
  }
  CPU_MEMBER static void lines(const Block& block, float* factors, float* terms) {
    for (int o = 0; o < kOutputs; o += W) {
      store(factors + o, half_floats(block.at + 256 + 2 * o));
      store(terms + o, half_floats(block.at + 288 + 2 * o));
    }
  }
};
