// float32: [16][32] values. Not multiplied where products read pairs of bfloat16.
struct f32 : Format {
  static constexpr Layout kLayout{2048};
  static constexpr int64_t kFileInputs = 1, kFileBytes = 4;

  static void put(const uint8_t* row, int64_t block, int64_t inputs, int output, uint8_t* to, uint8_t*) {
    __builtin_memcpy(to + output * 128, row + block * 128, static_cast<size_t>(inputs * 4));
  }
  CPU_MEMBER static void weights(const Block& block, int output, float* out) {
    __builtin_memcpy(out, block.at + output * 128, 128);
  }
};
