// Q3_K of ggml, (d * scale) * (q - 4): two bits (low), one bit (high), two times 16 int8 scales, of 16 inputs each; eight blocks,
// of 256 inputs in all, stand behind 16 half d.
struct q3_k : Integers {
  static constexpr Layout kLayout{128 + 64 + 32, 32};
  static constexpr int64_t kFileInputs = 256, kFileBytes = 110;
  static constexpr int kLargest = 7, kOffset = 4, kGroups = 2;

  // The i-th of 16 scales of six bits in twelve bytes: four low bits in the first eight, two high ones in the last four.
  static uint8_t scale_at(const uint8_t* packed, int64_t i) {
    const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4, high = packed[8 + i % 4] >> 2 * (i / 4) & 3;
    return static_cast<uint8_t>((low | high << 4) - 32);
  }
  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t* head) {
    const uint8_t* from = row + block / kSuper * kFileBytes;
    const int64_t sub = block % kSuper;
    packing::put_half(head, output, from + 108);
    to[192 + output] = scale_at(from + 96, 2 * sub);
    to[208 + output] = scale_at(from + 96, 2 * sub + 1);
    const uint8_t* q = from + 32 + sub / 4 * 32;
    packing::put_codes<2>(to, output, [&](int k) { return q[k] >> 2 * (sub % 4) & 3; });
    packing::put_codes<1>(to + 128, output, [&](int k) { return from[k] >> sub & 1; });
  }
  CPU_MEMBER static vu word(const Block& block, int i, int o) {
    return bits_of<2>(block.at, i, o) | bits_of<1>(block.at + 128, i, o) << 2;
  }
  CPU_MEMBER static vf scale(const Block& block, int group, int o) {
    return half_floats(block.head + 2 * o) * bytes(block.at + 192 + 16 * group + o);
  }
};
