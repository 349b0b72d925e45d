// Q8_0 of ggml, d * q: bytes with a sign, 16 half d.
struct q8_0 : Integers {
  static constexpr Layout kLayout{544};
  static constexpr int64_t kFileInputs = 32, kFileBytes = 34;
  static constexpr int kLargest = kSigned;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t*) {
    const uint8_t* from = row + block * kFileBytes;
    packing::put_half(to + 512, output, from);
    packing::put_codes<8>(to, output, [&](int k) { return from[2 + k]; });
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) { return bits_of<8>(block.at, i, o); }
  CPU_MEMBER static vf scale(const Block& block, int, int o) { return half_floats(block.at + 512 + 2 * o); }
};
