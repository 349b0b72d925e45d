// Random matrices as they stand in files, with the numbers that their rows stand for: GGUF's blocks taken apart one
// number at a time after ggml's dequantize_row_*, apart from csrc/cpu.
#pragma once

#include "tests/cpu/common.hpp"

namespace cpu_test {

using cpu::Kind;

constexpr Kind kKinds[] = {Kind::f32,  Kind::bf16, Kind::i8,   Kind::q4_0,
                           Kind::q4_1, Kind::q8_0, Kind::q4_k, Kind::q6_k};

inline const char* name_of(Kind kind) {
  const char* names[] = {"f32", "bf16", "i8", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k"};
  return names[static_cast<int>(kind)];
}

// A block of a file: how many inputs of a row, in how many bytes. There is none of i8, which packing makes.
struct FileBlock {
  int64_t inputs, bytes;
};

inline FileBlock file_block(Kind kind) {
  const FileBlock known[] = {{1, 4}, {1, 2}, {0, 0}, {32, 18}, {32, 20}, {32, 34}, {256, 144}, {256, 210}};
  return known[static_cast<int>(kind)];
}

struct FileMatrix {
  Kind kind;
  int64_t outputs, inputs;
  std::vector<uint8_t> bytes;   // rows as they stand in the file
  std::vector<double> values;   // [outputs][inputs]; those of blocks are rounded to float, then to bfloat16
};

// Blocks of random bytes, with scales that make numbers of about `size`; where `wild`, of any size and sign, zeros
// and subnormal scales among them.
FileMatrix random_matrix(Kind kind, int64_t outputs, int64_t inputs, bool wild, double size = 1.0);

}  // namespace cpu_test
