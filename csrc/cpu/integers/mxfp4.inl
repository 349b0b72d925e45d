// MXFP4 of ggml, 2^(e - 128) * table[q]: nibbles, 16 bytes e.
struct mxfp4 : Integers {
  static constexpr Layout kLayout{272};
  static constexpr int64_t kFileInputs = 32, kFileBytes = 17;
  static constexpr int kLargest = kSigned;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t*) {
    const uint8_t* from = row + block * kFileBytes;
    to[256 + output] = from[0];
    packing::put_halves_of_bytes(to, output, from + 1);
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) {
    return looked_up(packing::kFourBitsOfFloats, bits_of<4>(block.at, i, o));
  }
  CPU_MEMBER static vf scale(const Block& block, int, int o) {
    const vi exponent = widened(block.at + 256 + o) & 255, small = exponent == 0 ? vi{} + 0x00200000 : vi{} + 0x00400000;
    return (vf)(exponent < 2 ? small : (exponent - 1) << 23);
  }
};
