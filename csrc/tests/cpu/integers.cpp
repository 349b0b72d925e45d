#include "tests/cpu/integers.hpp"

namespace cpu_test {
namespace {

// A block of a file taken apart: integers, and scale and minimum of each 16 inputs.
struct Parts {
  int q[256];
  double scale[16], low[16];
};

double half_at(const uint8_t* at) {
  const int bits = at[0] | at[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -size : size;
}

void set_half(uint8_t* at, bool wild, double size) {
  const int exponent = static_cast<int>(std::floor(std::log2(std::fabs(size))));
  int64_t bits = (size < 0) << 15 | (exponent + 15) << 10 | below(1024);
  if (wild) bits = below(2) << 15 | (below(4) == 0 ? below(1024) : below(0x7C00));
  at[0] = static_cast<uint8_t>(bits & 255);
  at[1] = static_cast<uint8_t>(bits >> 8);
}

constexpr int kUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int kFloats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

int six_bits(const uint8_t* packed, int j, bool low) {
  if (j < 4) return packed[low ? j + 4 : j] & 63;
  return low ? packed[j + 4] >> 4 | packed[j] >> 6 << 4 : (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4;
}

void take_apart(Kind kind, const uint8_t* x, Parts& to) {
  const auto all = [&](double scale, double low) { to.scale[0] = to.scale[1] = scale, to.low[0] = to.low[1] = low; };
  const auto halves = [&](const uint8_t* nibbles, int* q) {
    for (int j = 0; j < 16; ++j) q[j] = nibbles[j] & 15, q[j + 16] = nibbles[j] >> 4;
  };
  const auto fifth = [&](const uint8_t* high) {
    const uint32_t bits = static_cast<uint32_t>(high[0] | high[1] << 8 | high[2] << 16) | static_cast<uint32_t>(high[3]) << 24;
    for (int j = 0; j < 32; ++j) to.q[j] |= static_cast<int>(bits >> j & 1) << 4;
  };
  switch (kind) {
    case Kind::int_q4_0:
      halves(x + 2, to.q), all(half_at(x), 0);
      for (int j = 0; j < 32; ++j) to.q[j] -= 8;
      return;
    case Kind::int_q4_1: return halves(x + 4, to.q), all(half_at(x), half_at(x + 2));
    case Kind::int_q5_0:
      halves(x + 6, to.q), fifth(x + 2), all(half_at(x), 0);
      for (int j = 0; j < 32; ++j) to.q[j] -= 16;
      return;
    case Kind::int_q5_1: return halves(x + 8, to.q), fifth(x + 4), all(half_at(x), half_at(x + 2));
    case Kind::int_q8_0:
      for (int j = 0; j < 32; ++j) to.q[j] = static_cast<int8_t>(x[2 + j]);
      return all(half_at(x), 0);
    case Kind::int_iq4_nl:
      halves(x + 2, to.q), all(half_at(x), 0);
      for (int j = 0; j < 32; ++j) to.q[j] = kUneven[to.q[j]];
      return;
    case Kind::int_mxfp4:
      halves(x + 1, to.q), all(std::ldexp(1.0, x[0] - 128), 0);
      for (int j = 0; j < 32; ++j) to.q[j] = kFloats[to.q[j]];
      return;
    case Kind::int_q4_k:
    case Kind::int_q5_k: {
      const uint8_t *high = x + 16, *q = kind == Kind::int_q4_k ? x + 16 : x + 48;
      for (int j = 0; j < 8; ++j) {
        for (int g = 2 * j; g < 2 * j + 2; ++g)
          to.scale[g] = half_at(x) * six_bits(x + 4, j, false), to.low[g] = -half_at(x + 2) * six_bits(x + 4, j, true);
        for (int l = 0; l < 32; ++l) {
          to.q[32 * j + l] = j % 2 ? q[j / 2 * 32 + l] >> 4 : q[j / 2 * 32 + l] & 15;
          if (kind == Kind::int_q5_k && high[l] & 1 << j) to.q[32 * j + l] += 16;
        }
      }
      return;
    }
    case Kind::int_q6_k: {
      const uint8_t *low = x, *high = x + 128;
      for (int g = 0; g < 16; ++g) to.scale[g] = half_at(x + 208) * static_cast<int8_t>(x[192 + g]), to.low[g] = 0;
      for (int n = 0; n < 256; n += 128, low += 64, high += 32)
        for (int l = 0; l < 32; ++l) {
          to.q[n + l] = ((low[l] & 15) | (high[l] & 3) << 4) - 32;
          to.q[n + l + 32] = ((low[l + 32] & 15) | (high[l] >> 2 & 3) << 4) - 32;
          to.q[n + l + 64] = (low[l] >> 4 | (high[l] >> 4 & 3) << 4) - 32;
          to.q[n + l + 96] = (low[l + 32] >> 4 | high[l] >> 6 << 4) - 32;
        }
      return;
    }
    case Kind::int_q2_k: {
      const uint8_t* q = x + 16;
      for (int g = 0; g < 16; ++g)
        to.scale[g] = half_at(x + 80) * (x[g] & 15), to.low[g] = -half_at(x + 82) * (x[g] >> 4);
      for (int n = 0; n < 256; n += 128, q += 32)
        for (int j = 0; j < 4; ++j)
          for (int l = 0; l < 32; ++l) to.q[n + 32 * j + l] = q[l] >> 2 * j & 3;
      return;
    }
    case Kind::int_q3_k: {
      const uint8_t *q = x + 32, *scales = x + 96;
      for (int g = 0; g < 16; ++g) {
        const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4, high = scales[8 + g % 4] >> 2 * (g / 4) & 3;
        to.scale[g] = half_at(x + 108) * ((low | high << 4) - 32), to.low[g] = 0;
      }
      for (int n = 0; n < 2; ++n, q += 32)
        for (int j = 0; j < 4; ++j)
          for (int l = 0; l < 32; ++l) to.q[128 * n + 32 * j + l] = (q[l] >> 2 * j & 3) - (x[l] & 1 << (4 * n + j) ? 0 : 4);
      return;
    }
    case Kind::int_iq4_xs: {
      const int high = x[2] | x[3] << 8;
      for (int j = 0; j < 8; ++j) {
        const int scale = (x[4 + j / 2] >> 4 * (j % 2) & 15) | (high >> 2 * j & 3) << 4;
        for (int g = 2 * j; g < 2 * j + 2; ++g) to.scale[g] = half_at(x) * (scale - 32), to.low[g] = 0;
        halves(x + 8 + 16 * j, to.q + 32 * j);
        for (int l = 0; l < 32; ++l) to.q[32 * j + l] = kUneven[to.q[32 * j + l]];
      }
      return;
    }
    default: std::abort();
  }
}

// Scales make numbers of about 1 whose mean is about 0.
void random_block(Kind kind, bool wild, uint8_t* block, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) block[i] = static_cast<uint8_t>(below(256));
  switch (kind) {
    case Kind::int_q4_1: return set_half(block, wild, 0.16), set_half(block + 2, wild, -1.2);
    case Kind::int_q5_1: return set_half(block, wild, 0.08), set_half(block + 2, wild, -1.2);
    case Kind::int_q4_k: return set_half(block, wild, 0.003), set_half(block + 2, wild, 0.022);
    case Kind::int_q5_k: return set_half(block, wild, 0.0015), set_half(block + 2, wild, 0.022);
    case Kind::int_q2_k: return set_half(block + 80, wild, 0.08), set_half(block + 82, wild, 0.12);
    case Kind::int_q3_k: return set_half(block + 108, wild, 0.015);
    case Kind::int_q6_k: return set_half(block + 208, wild, 0.0005);
    case Kind::int_iq4_xs: return set_half(block, wild, 0.0008);
    case Kind::int_mxfp4:
      if (!wild) block[0] = static_cast<uint8_t>(124 + below(4));
      return;
    default: return set_half(block, wild, kind == Kind::int_q4_0 ? 0.16 : kind == Kind::int_q5_0 ? 0.08 : 0.01);
  }
}

}  // namespace

IntegerMatrix::IntegerMatrix(const KnownIntegers& known, int64_t count, int64_t inputs, bool wild, bool with_bias)
    : format(known), weights_(1) {
  const bool made = format.bytes == 0;
  FileMatrix file = made ? random_matrix(Kind::f32, count, inputs, false) : FileMatrix{format.kind, count, inputs, {}, {}};
  if (!made) {
    file.bytes.resize(static_cast<size_t>(count * inputs / format.inputs * format.bytes));
    for (size_t at = 0; at < file.bytes.size(); at += static_cast<size_t>(format.bytes))
      random_block(format.kind, wild, file.bytes.data() + at, format.bytes);
  }
  pack(weights_, "m", format.kind, file, nullptr);
  bias = with_bias ? normals(count) : std::vector<float>(static_cast<size_t>(count), 0.0f);
  if (with_bias) weights_.add_vector("m.bias", bias.data(), count);
  matrix = weights_.matrix("m");
  data_ = {matrix.data, matrix.panels * cpu::panel_bytes(matrix.kind, matrix.blocks)};
  matrix.data = data_.data();
  const uint8_t* block = file.bytes.data();
  for (int64_t o = 0; o < count; ++o) {
    Integral one;
    if (made) {
      const double* row = file.values.data() + o * inputs;
      float peak = 0.0f;
      for (int64_t k = 0; k < inputs; ++k) peak = std::max(peak, static_cast<float>(std::fabs(row[k])));
      one.factor = peak / 127.0f;
      for (int64_t k = 0; k < inputs; ++k)
        one.q.push_back(static_cast<int>(std::nearbyint(static_cast<float>(row[k]) / one.factor)));
      one.scale.assign(static_cast<size_t>((inputs + 31) / 32 * 2), 1.0f);
      one.low.assign(one.scale.size(), 0.0f);
    }
    for (int64_t k = 0; !made && k < inputs; k += format.inputs, block += format.bytes) {
      Parts parts;
      take_apart(format.kind, block, parts);
      one.q.insert(one.q.end(), parts.q, parts.q + format.inputs);
      for (int64_t g = 0; g < format.inputs / 16; ++g) {
        one.scale.push_back(static_cast<float>(parts.scale[g]));
        one.low.push_back(static_cast<float>(parts.low[g]));
      }
    }
    outputs.push_back(std::move(one));
  }
}

}  // namespace cpu_test
