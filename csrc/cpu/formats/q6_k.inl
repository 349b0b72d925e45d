// Q6_K of ggml, (d * scale) * (q - 32): nibbles (low), [16][8] bytes of 4 x 2 bits (high), [16][2] int8 scales, of 16 inputs
// each; eight blocks, of 256 inputs in all, stand behind 16 half d.
struct q6_k : Format {
  static constexpr Layout kLayout{256 + 128 + 32, 32};
  static constexpr int64_t kFileInputs = 256, kFileBytes = 210;

  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t* head) {
    const uint8_t* from = row + block / kSuper * kFileBytes;
    const int64_t sub = block % kSuper;
    packing::put_half(head, output, from + 208);
    // 128 inputs share 64 low and 32 high bytes: quarter r of them has its nibbles in half r / 2 of low byte
    // i + 32 (r % 2) and its two bits at 2 r of high byte i
    const int64_t half = sub / 4, r = sub % 4;
    const uint8_t *low = from + half * 64 + r % 2 * 32, *high = from + 128 + half * 32;
    __builtin_memset(to + 256 + output * 8, 0, 8);
    for (int i = 0; i < 32; ++i) {
      packing::put_nibble(to, output, i, r / 2 ? low[i] >> 4 : low[i] & 15);
      to[256 + output * 8 + i / 4] |= static_cast<uint8_t>((high[i] >> 2 * r & 3) << 2 * (i % 4));
    }
    __builtin_memcpy(to + 384 + output * 2, from + 192 + sub * 2, 2);
  }
  CPU_MEMBER static void weights(const Block& block, int output, float* out) {
    const float d = half_precision(block.head, output);
    const uint8_t *words = block.at + output / 4 * 64, *high = block.at + 256 + output * 8;
    const uint8_t* scales = block.at + 384 + output * 2;
    vu twice;  // input k's two bits are 2 k and 2 k + 1 of its output's
    for (int i = 0; i < W; ++i) twice[i] = static_cast<uint32_t>(2 * i);
    for (int k = 0; k < kDepth; k += W) {
      uint32_t bits = 0;
      __builtin_memcpy(&bits, high + k / 4, W / 4);
      const vu low = widened(reinterpret_cast<const uint16_t*>(words) + k) >> output % 4 * 4 & 15u;
      const vi q = (vi)(low | (bits >> twice & 3u) << 4) - 32;
      const float scale = d * static_cast<float>(static_cast<int8_t>(scales[k / 16]));
      store(out + k, as_half(__builtin_convertvector(q, vf) * scale));
    }
  }
};
