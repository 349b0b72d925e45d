// Q6_K of ggml, (d * scale) * (q - 32): nibbles (low), two bits (high), two times 16 int8 scales, of 16 inputs each; eight
// blocks, of 256 inputs in all, stand behind 16 half d.
struct q6_k : Integers {
  static constexpr Layout kLayout{256 + 128 + 32, 32};
  static constexpr int64_t kFileInputs = 256, kFileBytes = 210;
  static constexpr int kLargest = 63, kOffset = 32, kGroups = 2;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t* head) {
    const uint8_t* from = row + block / kSuper * kFileBytes;
    const int64_t sub = block % kSuper;
    packing::put_half(head, output, from + 208);
    // 128 inputs share 64 low and 32 high bytes: quarter r of them has its nibbles in half r / 2 of low byte
    // i + 32 (r % 2) and its two bits at 2 r of high byte i
    const int64_t half = sub / 4, r = sub % 4;
    const uint8_t *low = from + half * 64 + r % 2 * 32, *high = from + 128 + half * 32;
    packing::put_codes<4>(to, output, [&](int k) { return low[k] >> 4 * (r / 2) & 15; });
    packing::put_codes<2>(to + 256, output, [&](int k) { return high[k] >> 2 * r & 3; });
    to[384 + output] = from[192 + sub * 2];
    to[400 + output] = from[193 + sub * 2];
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) {
    return bits_of<4>(block.at, i, o) | bits_of<2>(block.at + 256, i, o) << 4;
  }
  CPU_MEMBER static vf scale(const Block& block, int group, int o) {
    return half_floats(block.head + 2 * o) * bytes(block.at + 384 + 16 * group + o);
  }
};
