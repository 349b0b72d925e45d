// bfloat16: [16][32] values.
struct bf16 : Format {
  static constexpr Layout kLayout{1024};
  static constexpr int64_t kFileInputs = 1, kFileBytes = 2;

  static void put(const uint8_t* row, int64_t block, int64_t inputs, int output, uint8_t* to, uint8_t*) {
    __builtin_memcpy(to + output * 64, row + block * 64, static_cast<size_t>(inputs * 2));
  }
  CPU_MEMBER static void weights(const Block& block, int output, float* out) {
    for (int k = 0; k < kDepth; k += W)
      store(out + k, load_half(reinterpret_cast<const uint16_t*>(block.at + output * 64) + k));
  }
};
