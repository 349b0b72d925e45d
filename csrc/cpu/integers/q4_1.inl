// Q4_1 of ggml, d * q + m: nibbles, 16 half d, 16 half m.
struct q4_1 : Integers {
  static constexpr Layout kLayout{320};
  static constexpr int64_t kFileInputs = 32, kFileBytes = 20;
  static constexpr bool kLow = true;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t*) {
    const uint8_t* from = row + block * kFileBytes;
    packing::put_half(to + 256, output, from);
    packing::put_half(to + 288, output, from + 2);
    packing::put_halves_of_bytes(to, output, from + 4);
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) { return bits_of<4>(block.at, i, o); }
  CPU_MEMBER static vf scale(const Block& block, int, int o) { return half_floats(block.at + 256 + 2 * o); }
  CPU_MEMBER static vf low(const Block& block, int, int o) { return half_floats(block.at + 288 + 2 * o); }
};
