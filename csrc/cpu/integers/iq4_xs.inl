// IQ4_XS of ggml, (d * scale) * table[q]: nibbles, 16 int8 scales; eight blocks, of 256 inputs in all, stand behind 16 half d.
struct iq4_xs : Integers {
  static constexpr Layout kLayout{272, 32};
  static constexpr int64_t kFileInputs = 256, kFileBytes = 136;
  static constexpr int kLargest = kSigned;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t* head) {
    const uint8_t* from = row + block / kSuper * kFileBytes;
    const int64_t sub = block % kSuper;
    packing::put_half(head, output, from);
    const int low = from[4 + sub / 2] >> 4 * (sub % 2) & 15, high = from[2 + sub / 4] >> 2 * (sub % 4) & 3;
    to[256 + output] = static_cast<uint8_t>((low | high << 4) - 32);
    packing::put_halves_of_bytes(to, output, from + 8 + 16 * sub);
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) {
    return looked_up(packing::kFourBitsUneven, bits_of<4>(block.at, i, o));
  }
  CPU_MEMBER static vf scale(const Block& block, int, int o) {
    return half_floats(block.head + 2 * o) * bytes(block.at + 256 + o);
  }
};
