// Packing: a model's rows of weights as panels of blocks, once, when it is loaded.
//
// A block holds 16 outputs by 32 inputs. The files of csrc/cpu/formats say what of it stands where; many have
//   nibbles         four groups of 4 outputs, each 32 words: nibble j of word k is output 4 g + j at input k
// GGUF's formats are those of ggml (block_q4_0 and its kin); each weight is rounded to bfloat16 as a converter does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "cpu/kernels.hpp"

namespace cpu {

constexpr int kSuper = 8;  // blocks that share a head

// Where the blocks of a panel stand.
struct Layout {
  int64_t bytes;         // of a block
  int64_t head = 0;      // of what stands before kSuper blocks, which share it
  int64_t together = 1;  // blocks whose rows of 32 bytes stand side by side

  constexpr int64_t panel_bytes(int64_t blocks) const {
    const int64_t heads = head == 0 ? 0 : (blocks + kSuper - 1) / kSuper;
    return (blocks + together - 1) / together * together * bytes + heads * head;
  }
  // Bytes from a panel's begin to a block of it, and to what that shares with others.
  constexpr int64_t at(int64_t block) const {
    const int64_t heads = head == 0 ? 0 : block / kSuper + 1;
    return block / together * together * bytes + block % together * 32 + heads * head;
  }
  constexpr int64_t head_at(int64_t block) const { return at(block / kSuper * kSuper) - head; }
};

// Puts the `block`-th 32 inputs of one row of a file, of which there are so many, into place `output` of a packed block.
using Put = void(const uint8_t* row, int64_t block, int64_t inputs, int output, uint8_t* to, uint8_t* head);
// Packs sixteen rows of f32 or bf16, or null, with a scale each.
using Quantize = void(Kind from, const uint8_t* const* rows, int64_t inputs, uint8_t* panel, float* scales);

// Sizes and functions of a format that packing needs.
struct Stored {
  const char* name;
  Layout layout;
  int64_t file_inputs, file_bytes;  // of a block of a row as it stands in a file; no bytes: made here, never read
  int64_t most_inputs;
  Put* put;
  Quantize* quantize;  // null where rows of files are packed as they are

  // Return the bytes of a row of so many inputs, as files store it.
  int64_t row_bytes(int64_t inputs) const { return inputs / file_inputs * file_bytes; }
};

const Stored& stored_as(Kind kind);
const Stored& stored_integers(int index);  // the formats of csrc/cpu/integers

constexpr int kKinds = 0
#define CPU_ONE(name) +1
    CPU_FORMATS(CPU_ONE) CPU_INTEGERS(CPU_ONE);
#undef CPU_ONE

inline int64_t panel_bytes(Kind kind, int64_t blocks) { return stored_as(kind).layout.panel_bytes(blocks); }

inline float from_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

namespace packing {

inline void put_nibble(uint8_t* block, int output, int input, uint32_t value) {
  uint8_t* byte = block + (output / 4 * kDepth + input) * 2 + output % 4 / 2;
  *byte = static_cast<uint8_t>(output % 2 ? (*byte & 0x0F) | value << 4 : (*byte & 0xF0) | value);
}

// From 16 bytes: inputs 0 to 15 are the low nibbles, 16 to 31 the high ones.
inline void put_nibbles(uint8_t* block, int output, const uint8_t* from) {
  for (int i = 0; i < 16; ++i) {
    put_nibble(block, output, i, from[i] & 15);
    put_nibble(block, output, i + 16, from[i] >> 4);
  }
}

inline void put_half(uint8_t* at, int output, const uint8_t* half) { std::memcpy(at + 2 * output, half, 2); }

// Puts code(k), of so many bits each, of 32 inputs of one output into the rows of 64 bytes of csrc/cpu/integers. Byte
// 4 * output + k % 4 of a row has the bits of that input of one word of four after another.
template <int Bits, typename Code>
inline void put_codes(uint8_t* rows, int output, const Code& code) {
  constexpr int kPer = 8 / Bits;  // words that share a row
  uint8_t codes[kDepth];
  for (int k = 0; k < kDepth; ++k) codes[k] = static_cast<uint8_t>(code(k));
  for (int word = 0; word < kDepth / 4; word += kPer) {
    uint32_t row = 0;
    for (int other = 0; other < kPer; ++other) {
      uint32_t four;
      std::memcpy(&four, codes + 4 * (word + other), 4);
      row |= four << Bits * other;  // bits of a byte stay within it
    }
    std::memcpy(rows + word / kPer * 64 + 4 * output, &row, 4);
  }
}

// From 16 bytes: inputs 0 to 15 are the low nibbles, 16 to 31 the high ones.
inline void put_halves_of_bytes(uint8_t* rows, int output, const uint8_t* from) {
  put_codes<4>(rows, output, [&](int k) { return k < 16 ? from[k] & 15 : from[k - 16] >> 4; });
}

// Values of nibbles: IQ4_NL's and IQ4_XS's steps, and twice the floats of four bits that MXFP4 has.
alignas(16) constexpr int8_t kFourBitsUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t kFourBitsOfFloats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Scale and minimum of the j-th 32 inputs of Q4_K and Q5_K: six bits each, twelve bytes in all.
inline void scales_of_six_bits(const uint8_t* packed, int64_t j, uint8_t* scale, uint8_t* low) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *low = packed[j + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4);
    *low = static_cast<uint8_t>((packed[j + 4] >> 4) | (packed[j] >> 6) << 4);
  }
}

inline float source(Kind kind, const uint8_t* row, int64_t input) {
  if (kind == Kind::bf16) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * input, sizeof bits);
    return from_bf16(bits);
  }
  float value;
  std::memcpy(&value, row + 4 * input, sizeof value);
  return value;
}

// Sixteen rows of f32 or bf16, or null, as int8 with a scale each: calls put(output, input, value).
template <typename Put>
inline void quantize_panel(Kind from, const uint8_t* const* rows, int64_t inputs, float* scales, const Put& put) {
  for (int o = 0; o < kOutputs; ++o) {
    float peak = 0.0f;
    if (rows[o])
      for (int64_t k = 0; k < inputs; ++k) {
        const float size = std::fabs(source(from, rows[o], k));
        if (size > peak || size != size) peak = size;  // NaN stays, so that the whole output is
      }
    scales[o] = peak / 127.0f;
    for (int64_t k = 0; k < inputs && peak > 0; ++k) {
      const float value = std::nearbyint(source(from, rows[o], k) / scales[o]);
      const auto rounded = static_cast<int8_t>(value < 127.0f ? (value > -127.0f ? value : -127.0f) : 127.0f);
      put(o, k, static_cast<uint8_t>(rounded));
    }
  }
}

}  // namespace packing

// Packs panel `panel` of `m` (kind, sizes; its memory is zeroed) from rows of a file. order: the row of the file for each
// output, or null. f32 and bf16 may become a format that is made here, whose scales go to `scales`.
inline void pack_panel(const Matrix& m, Kind from, const uint8_t* rows, const int32_t* order, int64_t panel,
                       uint8_t* data, float* scales) {
  const Stored& format = stored_as(m.kind);
  const int64_t row_bytes = stored_as(from).row_bytes(m.inputs);
  const uint8_t* of[kOutputs] = {};
  for (int o = 0; o < kOutputs; ++o) {
    const int64_t output = panel * kOutputs + o;
    if (output < m.outputs) of[o] = rows + (order ? order[output] : output) * row_bytes;
  }
  uint8_t* out = data + panel * m.step;
  if (format.quantize) return format.quantize(from, of, m.inputs, out, scales + panel * kOutputs);
  for (int64_t b = 0; b < m.blocks; ++b) {
    const int64_t inputs = std::min<int64_t>(kDepth, m.inputs - b * kDepth);
    uint8_t *to = out + format.layout.at(b), *head = out + format.layout.head_at(b);
    for (int o = 0; o < kOutputs; ++o)
      if (of[o]) format.put(of[o], b, inputs, o, to, head);
  }
}

}  // namespace cpu
