// IQ4_NL of ggml, d * table[q]: nibbles, 16 half d.
struct iq4_nl : Integers {
  static constexpr Layout kLayout{288};
  static constexpr int64_t kFileInputs = 32, kFileBytes = 18;
  static constexpr int kLargest = kSigned;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t*) {
    const uint8_t* from = row + block * kFileBytes;
    packing::put_half(to + 256, output, from);
    packing::put_halves_of_bytes(to, output, from + 2);
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) {
    return looked_up(packing::kFourBitsUneven, bits_of<4>(block.at, i, o));
  }
  CPU_MEMBER static vf scale(const Block& block, int, int o) { return half_floats(block.at + 256 + 2 * o); }
};
