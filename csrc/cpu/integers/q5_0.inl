// Q5_0 of ggml, d * (q - 16): nibbles (low), one bit (high), 16 half d.
struct q5_0 : Integers {
  static constexpr Layout kLayout{352};
  static constexpr int64_t kFileInputs = 32, kFileBytes = 22;
  static constexpr int kLargest = 31, kOffset = 16;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t*) {
    const uint8_t* from = row + block * kFileBytes;
    packing::put_half(to + 320, output, from);
    packing::put_codes<1>(to + 256, output, [&](int k) { return from[2 + k / 8] >> k % 8 & 1; });
    packing::put_halves_of_bytes(to, output, from + 6);
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) {
    return bits_of<4>(block.at, i, o) | bits_of<1>(block.at + 256, i, o) << 4;
  }
  CPU_MEMBER static vf scale(const Block& block, int, int o) { return half_floats(block.at + 320 + 2 * o); }
};
