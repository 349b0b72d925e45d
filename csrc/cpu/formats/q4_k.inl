// Q4_K of ggml, (d * scale) * q - dmin * min: nibbles, 16 bytes scale, 16 bytes min; eight blocks, of 256 inputs in all,
// stand behind 16 half d and 16 half dmin.
struct q4_k : Format {
  using Form = Nibbles;
  static constexpr Layout kLayout{288, 64};
  static constexpr int64_t kFileInputs = 256, kFileBytes = 144;

  // Scale and minimum of the j-th 32 inputs: six bits each, twelve bytes in all.
  static void scales(const uint8_t* packed, int64_t j, uint8_t* scale, uint8_t* low) {
    if (j < 4) {
      *scale = packed[j] & 63;
      *low = packed[j + 4] & 63;
    } else {
      *scale = static_cast<uint8_t>((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4);
      *low = static_cast<uint8_t>((packed[j + 4] >> 4) | (packed[j] >> 6) << 4);
    }
  }
  static void put(const uint8_t* row, int64_t block, int64_t, int output, uint8_t* to, uint8_t* head) {
    const uint8_t* from = row + block / kSuper * kFileBytes;
    const int64_t sub = block % kSuper;
    packing::put_half(head, output, from);
    packing::put_half(head + 32, output, from + 2);
    scales(from + 4, sub, to + 256 + output, to + 272 + output);
    const uint8_t* q = from + 16 + sub / 2 * 32;
    for (int i = 0; i < 32; ++i) packing::put_nibble(to, output, i, sub % 2 ? q[i] >> 4 : q[i] & 15);
  }
  CPU_MEMBER static void weights(const Block& block, int output, float* out) {
    const float scale = half_precision(block.head, output) * static_cast<float>(block.at[256 + output]);
    const float low = half_precision(block.head + 32, output) * static_cast<float>(block.at[272 + output]);
    nibbles(block.at, output, scale, -low, out);
  }
  CPU_MEMBER static void lines(const Block& block, float* factors, float* terms) {
    for (int o = 0; o < kOutputs; o += W) {
      store(factors + o, half_floats(block.head + 2 * o) * byte_floats(block.at + 256 + o));
      store(terms + o, vf{} - half_floats(block.head + 32 + 2 * o) * byte_floats(block.at + 272 + o));
    }
  }
};
