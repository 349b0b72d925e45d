// Packing: a model's rows of weights as panels of blocks, once, when it is loaded.
//
// A block holds 16 outputs by 32 inputs. What of it depends on the kind:
//   f32, bf16       [16][32] values
//   i8              [16][32] values, side by side with the next block's: [16][64] of both, as tiles read them
//   q4_*            four groups of 4 outputs, each 32 words: nibble j of word k is output 4 g + j at input k
//   q4_0, q4_1      nibbles, 16 half d (, 16 half m)        d * (q - 8), d * q + m
//   q8_0            [16][32] int8, 16 half d                d * q
//   q4_k            nibbles, 16 bytes scale, 16 bytes min   (d * scale) * q - dmin * min
//   q6_k            nibbles (low), [16][8] bytes of 4 x 2 bits (high), [16][2] int8 scales     (d * scale) * (q - 32)
// Eight blocks of the last two stand behind a head of 16 half d (and 16 half dmin), as 256 inputs share them.
// GGUF's formats are those of ggml (block_q4_0 and its kin); each weight is rounded to bfloat16 as a converter does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.hpp"

namespace cpu {

constexpr int kSuper = 8;  // blocks that share a head

constexpr int64_t block_bytes(Kind kind) {
  switch (kind) {
    case Kind::f32: return 2048;
    case Kind::bf16: return 1024;
    case Kind::i8: return 512;
    case Kind::q4_0: return 288;
    case Kind::q4_1: return 320;
    case Kind::q8_0: return 544;
    case Kind::q4_k: return 288;
    case Kind::q6_k: return 256 + 128 + 32;
  }
  return 0;
}

constexpr int64_t head_bytes(Kind kind) { return kind == Kind::q4_k ? 64 : kind == Kind::q6_k ? 32 : 0; }

inline int64_t panel_bytes(Kind kind, int64_t blocks) {
  const int64_t heads = head_bytes(kind) == 0 ? 0 : (blocks + kSuper - 1) / kSuper;
  if (kind == Kind::i8) blocks += blocks % 2;
  return blocks * block_bytes(kind) + heads * head_bytes(kind);
}

// Where a block of a panel begins; its head, where it has one, is at `super_head`.
inline const uint8_t* block_at(const Matrix& m, int64_t panel, int64_t block) {
  const int64_t heads = head_bytes(m.kind) == 0 ? 0 : block / kSuper + 1;
  if (m.kind == Kind::i8) return m.data + panel * panel_bytes(m.kind, m.blocks) + block / 2 * 1024 + block % 2 * 32;
  return m.data + panel * panel_bytes(m.kind, m.blocks) + block * block_bytes(m.kind) + heads * head_bytes(m.kind);
}

inline const uint8_t* super_head(const Matrix& m, int64_t panel, int64_t block) {
  return block_at(m, panel, block / kSuper * kSuper) - head_bytes(m.kind);
}

// Inputs and bytes of one block of a row as it stands in a file.
inline int64_t file_block_inputs(Kind kind) {
  return kind == Kind::q4_k || kind == Kind::q6_k ? 256 : kind == Kind::f32 || kind == Kind::bf16 ? 1 : 32;
}

inline int64_t file_block_bytes(Kind kind) {
  switch (kind) {
    case Kind::f32: return 4;
    case Kind::bf16: return 2;
    case Kind::q4_0: return 18;
    case Kind::q4_1: return 20;
    case Kind::q8_0: return 34;
    case Kind::q4_k: return 144;
    case Kind::q6_k: return 210;
    case Kind::i8: return 0;  // made here, never read
  }
  return 0;
}

// Bytes of a row of so many inputs as it stands in a file.
inline int64_t file_row_bytes(Kind kind, int64_t inputs) {
  return inputs / file_block_inputs(kind) * file_block_bytes(kind);
}

inline float from_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

namespace packing {

inline void set_nibble(uint8_t* block, int output, int input, uint32_t value) {
  uint8_t* byte = block + (output / 4 * kDepth + input) * 2 + output % 4 / 2;
  *byte = static_cast<uint8_t>(output % 2 ? (*byte & 0x0F) | value << 4 : (*byte & 0xF0) | value);
}

inline void put(uint8_t* at, int output, const uint8_t* half) { std::memcpy(at + 2 * output, half, 2); }

// Scale and minimum of the j-th 32 inputs of a q4_k block: six bits each, twelve bytes in all.
inline void k_scales(const uint8_t* packed, int j, uint8_t* scale, uint8_t* low) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *low = packed[j + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4);
    *low = static_cast<uint8_t>((packed[j + 4] >> 4) | (packed[j] >> 6) << 4);
  }
}

// The `block`-th 32 inputs of one row of a file into place `output` of a packed block.
inline void put_block(Kind kind, const uint8_t* row, int64_t block, int output, uint8_t* to, uint8_t* head) {
  const int64_t sub = block % kSuper;
  switch (kind) {
    case Kind::q4_0:
    case Kind::q4_1: {
      const uint8_t* from = row + block * file_block_bytes(kind);
      const int fixed = kind == Kind::q4_0 ? 2 : 4;
      put(to + 256, output, from);
      if (kind == Kind::q4_1) put(to + 288, output, from + 2);
      for (int i = 0; i < 16; ++i) {
        set_nibble(to, output, i, from[fixed + i] & 15);
        set_nibble(to, output, i + 16, from[fixed + i] >> 4);
      }
      return;
    }
    case Kind::q8_0: {
      const uint8_t* from = row + block * 34;
      put(to + 512, output, from);
      std::memcpy(to + output * kDepth, from + 2, 32);
      return;
    }
    case Kind::q4_k: {
      const uint8_t* from = row + block / kSuper * 144;
      put(head, output, from);
      put(head + 32, output, from + 2);
      k_scales(from + 4, static_cast<int>(sub), to + 256 + output, to + 272 + output);
      const uint8_t* q = from + 16 + sub / 2 * 32;
      for (int i = 0; i < 32; ++i) set_nibble(to, output, i, sub % 2 ? q[i] >> 4 : q[i] & 15);
      return;
    }
    case Kind::q6_k: {
      const uint8_t* from = row + block / kSuper * 210;
      put(head, output, from + 208);
      // 128 inputs share 64 low and 32 high bytes: quarter r of them has its nibbles in half r / 2 of low byte
      // i + 32 (r % 2) and its two bits at 2 r of high byte i
      const int64_t half = sub / 4, r = sub % 4;
      const uint8_t *low = from + half * 64 + r % 2 * 32, *high = from + 128 + half * 32;
      std::memset(to + 256 + output * 8, 0, 8);
      for (int i = 0; i < 32; ++i) {
        set_nibble(to, output, i, r / 2 ? low[i] >> 4 : low[i] & 15);
        to[256 + output * 8 + i / 4] |= static_cast<uint8_t>((high[i] >> 2 * r & 3) << 2 * (i % 4));
      }
      std::memcpy(to + 384 + output * 2, from + 192 + sub * 2, 2);
      return;
    }
    default: return;
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

// Sixteen rows of f32 or bf16 as int8 with a scale each.
inline void put_int8(Kind from, const uint8_t* const* rows, const Matrix& m, uint8_t* panel, float* scales) {
  for (int o = 0; o < kOutputs; ++o) {
    float peak = 0.0f;
    if (rows[o])
      for (int64_t k = 0; k < m.inputs; ++k) {
        const float size = std::fabs(source(from, rows[o], k));
        if (size > peak || size != size) peak = size;  // NaN stays, so that the whole output is
      }
    scales[o] = peak / 127.0f;
    for (int64_t k = 0; k < m.inputs && peak > 0; ++k) {
      const float value = std::nearbyint(source(from, rows[o], k) / scales[o]);
      const auto rounded = static_cast<int8_t>(std::max(-127.0f, std::min(127.0f, value)));
      panel[k / 64 * 1024 + o * 64 + k % 64] = static_cast<uint8_t>(rounded);
    }
  }
}

}  // namespace packing

// Packs panel `panel` of `m` (kind, sizes; its memory is zeroed) from rows of a file. order: the row of the file for each
// output, or null. f32 and bf16 may become i8, whose scales go to `scales`.
inline void pack_panel(const Matrix& m, Kind from, const uint8_t* rows, const int32_t* order, int64_t panel,
                       uint8_t* data, float* scales) {
  const int64_t row_bytes = file_row_bytes(from, m.inputs);
  const uint8_t* of[kOutputs] = {};
  for (int o = 0; o < kOutputs; ++o) {
    const int64_t output = panel * kOutputs + o;
    if (output < m.outputs) of[o] = rows + (order ? order[output] : output) * row_bytes;
  }
  uint8_t* out = data + panel * panel_bytes(m.kind, m.blocks);
  if (m.kind == Kind::i8) return packing::put_int8(from, of, m, out, scales + panel * kOutputs);
  for (int64_t b = 0; b < m.blocks; ++b) {
    uint8_t* to = const_cast<uint8_t*>(block_at(m, panel, b)) - m.data + data;
    uint8_t* head = const_cast<uint8_t*>(super_head(m, panel, b)) - m.data + data;
    for (int o = 0; o < kOutputs; ++o) {
      if (!of[o]) continue;
      if (m.kind == Kind::f32 || m.kind == Kind::bf16) {
        const int64_t each = file_block_bytes(m.kind);
        const int64_t count = std::min<int64_t>(kDepth, m.inputs - b * kDepth);
        std::memcpy(to + o * kDepth * each, of[o] + b * kDepth * each, static_cast<size_t>(count * each));
      } else {
        packing::put_block(m.kind, of[o], b, o, to, head);
      }
    }
  }
}

}  // namespace cpu
