// Q2_K of ggml, (d * scale) * q - dmin * min: two bits, two times 16 bytes, of 16 inputs each, scale in the low and min in the
// high nibble; eight blocks, of 256 inputs in all, stand behind 16 half d and 16 half dmin.
struct q2_k : Integers {
  static constexpr Layout kLayout{160, 64};
  static constexpr int64_t kFileInputs = 256, kFileBytes = 84;
  static constexpr int kLargest = 3, kGroups = 2;
  static constexpr bool kLow = true;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t* head) {
    const uint8_t* from = row + block / kSuper * kFileBytes;
    const int64_t sub = block % kSuper;
    packing::put_half(head, output, from + 80);
    packing::put_half(head + 32, output, from + 82);
    to[128 + output] = from[2 * sub];
    to[144 + output] = from[2 * sub + 1];
    const uint8_t* q = from + 16 + sub / 4 * 32;
    packing::put_codes<2>(to, output, [&](int k) { return q[k] >> 2 * (sub % 4) & 3; });
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) { return bits_of<2>(block.at, i, o); }
  CPU_MEMBER static vf scale(const Block& block, int group, int o) {
    const vi scales = widened(block.at + 128 + 16 * group + o) & 15;
    return half_floats(block.head + 2 * o) * __builtin_convertvector(scales, vf);
  }
  CPU_MEMBER static vf low(const Block& block, int group, int o) {
    const vi lows = widened(block.at + 128 + 16 * group + o) >> 4 & 15;
    return -(half_floats(block.head + 32 + 2 * o) * __builtin_convertvector(lows, vf));
  }
};
