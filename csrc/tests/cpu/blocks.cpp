#include "tests/cpu/blocks.hpp"

namespace cpu_test {
namespace {

// IEEE binary16.
double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -size : size;
}

// Any finite one.
uint16_t wild_half() {
  const int64_t kind = below(4), magnitude = kind == 0 ? 0 : kind == 1 ? below(1024) : below(0x7C00);
  return static_cast<uint16_t>(below(2) << 15 | magnitude);
}

// One from half of `size` to twice of it.
uint16_t tame_half(double size) {
  const int exponent = static_cast<int>(std::floor(std::log2(std::fabs(size))));
  return static_cast<uint16_t>((size < 0) << 15 | (exponent + 15) << 10 | below(1024));
}

double stored(float value) { return as_bf16(static_cast<double>(value)); }

double half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return half_value(bits);
}

void set_half(uint8_t* at, uint16_t bits) { std::memcpy(at, &bits, 2); }

void q4_0(const uint8_t* block, double* y) {
  for (int j = 0; j < 16; ++j) {
    y[j] = half_at(block) * ((block[2 + j] & 0x0F) - 8);
    y[j + 16] = half_at(block) * ((block[2 + j] >> 4) - 8);
  }
}

void q4_1(const uint8_t* block, double* y) {
  for (int j = 0; j < 16; ++j) {
    y[j] = half_at(block) * (block[4 + j] & 0x0F) + half_at(block + 2);
    y[j + 16] = half_at(block) * (block[4 + j] >> 4) + half_at(block + 2);
  }
}

void q8_0(const uint8_t* block, double* y) {
  for (int j = 0; j < 32; ++j) y[j] = half_at(block) * static_cast<int8_t>(block[2 + j]);
}

// block_q4_K: half d, half dmin, 12 bytes of scales, 128 of nibbles
void q4_k(const uint8_t* block, double* y) {
  const double d = half_at(block), low = half_at(block + 2);
  const uint8_t *scales = block + 4, *q = block + 16;
  for (int j = 0; j < 8; ++j) {
    const int scale = j < 4 ? scales[j] & 63 : (scales[j + 4] & 0x0F) | (scales[j - 4] >> 6) << 4;
    const int minimum = j < 4 ? scales[j + 4] & 63 : (scales[j + 4] >> 4) | (scales[j] >> 6) << 4;
    for (int l = 0; l < 32; ++l) {
      const int byte = q[j / 2 * 32 + l];
      y[j * 32 + l] = d * scale * (j % 2 ? byte >> 4 : byte & 0x0F) - low * minimum;
    }
  }
}

// block_q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, half d
void q6_k(const uint8_t* block, double* y) {
  const double d = half_at(block + 208);
  for (int n = 0; n < 2; ++n) {
    const uint8_t *low = block + 64 * n, *high = block + 128 + 32 * n;
    const auto* scales = reinterpret_cast<const int8_t*>(block + 192 + 8 * n);
    for (int l = 0; l < 32; ++l) {
      const int q[4] = {(low[l] & 0x0F) | (high[l] & 3) << 4, (low[l + 32] & 0x0F) | (high[l] >> 2 & 3) << 4,
                        low[l] >> 4 | (high[l] >> 4 & 3) << 4, low[l + 32] >> 4 | high[l] >> 6 << 4};
      for (int r = 0; r < 4; ++r) y[128 * n + 32 * r + l] = d * scales[l / 16 + 2 * r] * (q[r] - 32);
    }
  }
}

// The scales of tame blocks make numbers of about `size` whose mean is about 0.
void random_block(Kind kind, bool wild, double size, uint8_t* block, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) block[i] = static_cast<uint8_t>(below(256));
  const double steps = kind == Kind::q8_0 ? 100 : kind == Kind::q4_k ? 350 : kind == Kind::q6_k ? 1800 : 6;
  const auto half = [&](double tame) { return wild ? wild_half() : tame_half(tame); };
  set_half(kind == Kind::q6_k ? block + 208 : block, half(size / steps));
  if (kind == Kind::q4_1) set_half(block + 2, half(-7.5 * size / steps));
  if (kind == Kind::q4_k) set_half(block + 2, half(7.5 * size / steps));
}

}  // namespace

FileMatrix random_matrix(Kind kind, int64_t outputs, int64_t inputs, bool wild, double size) {
  FileMatrix made{kind, outputs, inputs, {}, {}};
  const int64_t each = known(kind).inputs, bytes = known(kind).bytes;
  const int64_t count = outputs * inputs / each;
  made.bytes.resize(static_cast<size_t>(count * bytes));
  made.values.resize(static_cast<size_t>(outputs * inputs));
  for (int64_t b = 0; b < count; ++b) {
    uint8_t* block = made.bytes.data() + b * bytes;
    double* y = made.values.data() + b * each;
    if (kind == Kind::f32 || kind == Kind::bf16) {
      const float value = normal(size);
      y[0] = kind == Kind::f32 ? static_cast<double>(value) : as_bf16(static_cast<double>(value));
      const uint16_t bits = bf16_bits(y[0]);
      std::memcpy(block, kind == Kind::f32 ? static_cast<const void*>(&value) : &bits, static_cast<size_t>(bytes));
      continue;
    }
    random_block(kind, wild, size, block, bytes);
    if (kind == Kind::q4_0) q4_0(block, y);
    if (kind == Kind::q4_1) q4_1(block, y);
    if (kind == Kind::q8_0) q8_0(block, y);
    if (kind == Kind::q4_k) q4_k(block, y);
    if (kind == Kind::q6_k) q6_k(block, y);
    for (int64_t i = 0; i < each; ++i) y[i] = stored(static_cast<float>(y[i]));
  }
  return made;
}

}  // namespace cpu_test
