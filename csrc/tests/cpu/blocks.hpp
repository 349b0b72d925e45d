// Random matrices as they stand in files, with the numbers that their rows stand for: GGUF's blocks taken apart one
// number at a time after ggml's dequantize_row_*, apart from csrc/cpu.
#pragma once

#include "cpu/packing.hpp"
#include "tests/cpu/common.hpp"

namespace cpu_test {

using cpu::Kind;

// A format of csrc/cpu/formats, and a block of it in a file: how many inputs of a row, in how many bytes. There is none of i8, which packing
// makes.
struct Known {
  Kind kind;
  const char* name;
  int64_t inputs, bytes;
};

constexpr Known kKnown[] = {{Kind::f32, "f32", 1, 4},     {Kind::bf16, "bf16", 1, 2},   {Kind::i8, "i8", 0, 0},
                            {Kind::q4_0, "q4_0", 32, 18}, {Kind::q4_1, "q4_1", 32, 20}, {Kind::q8_0, "q8_0", 32, 34},
                            {Kind::q4_k, "q4_k", 256, 144}, {Kind::q6_k, "q6_k", 256, 210}};

inline const Known& known(Kind kind) {
  return *std::find_if(std::begin(kKnown), std::end(kKnown), [&](const Known& one) { return one.kind == kind; });
}

inline std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds;
  for (const Known& one : kKnown) kinds.push_back(one.kind);
  return kinds;
}

inline const char* name_of(Kind kind) { return known(kind).name; }

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
