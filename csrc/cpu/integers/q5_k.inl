// Q5_K of ggml, (d * scale) * q - dmin * min: nibbles (low), one bit (high), 16 bytes scale, 16 bytes min; eight blocks, of 256
// inputs in all, stand behind 16 half d and 16 half dmin.
struct q5_k : Integers {
  static constexpr Layout kLayout{352, 64};
  static constexpr int64_t kFileInputs = 256, kFileBytes = 176;
  static constexpr int kLargest = 31;
  static constexpr bool kLow = true;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t* head) {
    const uint8_t* from = row + block / kSuper * kFileBytes;
    const int64_t sub = block % kSuper;
    packing::put_half(head, output, from);
    packing::put_half(head + 32, output, from + 2);
    packing::scales_of_six_bits(from + 4, sub, to + 320 + output, to + 336 + output);
    const uint8_t *high = from + 16, *q = from + 48 + sub / 2 * 32;
    packing::put_codes<4>(to, output, [&](int k) { return q[k] >> 4 * (sub % 2) & 15; });
    packing::put_codes<1>(to + 256, output, [&](int k) { return high[k] >> sub & 1; });
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) {
    return bits_of<4>(block.at, i, o) | bits_of<1>(block.at + 256, i, o) << 4;
  }
  CPU_MEMBER static vf scale(const Block& block, int, int o) {
    return half_floats(block.head + 2 * o) * byte_floats(block.at + 320 + o);
  }
  CPU_MEMBER static vf low(const Block& block, int, int o) {
    return -(half_floats(block.head + 32 + 2 * o) * byte_floats(block.at + 336 + o));
  }
};
