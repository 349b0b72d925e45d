// Matrices of csrc/cpu/integers: random files, with the integers, scales and minima that their rows stand for, taken apart one
// number at a time after ggml's dequantize_row_*, apart from csrc/cpu.
#pragma once

#include "tests/cpu/packed.hpp"

namespace cpu_test {

// A format, a block of it in a file, and of how many inputs each has a scale of its own. There is none of int_i8, which
// packing makes.
struct KnownIntegers {
  Kind kind;
  const char* name;
  int64_t inputs, bytes;
  int group;
};

constexpr KnownIntegers kKnownIntegers[] = {
    {Kind::int_i8, "int_i8", 0, 0, 32},           {Kind::int_q4_0, "int_q4_0", 32, 18, 32},
    {Kind::int_q4_1, "int_q4_1", 32, 20, 32},     {Kind::int_q5_0, "int_q5_0", 32, 22, 32},
    {Kind::int_q5_1, "int_q5_1", 32, 24, 32},     {Kind::int_q8_0, "int_q8_0", 32, 34, 32},
    {Kind::int_q2_k, "int_q2_k", 256, 84, 16},    {Kind::int_q3_k, "int_q3_k", 256, 110, 16},
    {Kind::int_q4_k, "int_q4_k", 256, 144, 32},   {Kind::int_q5_k, "int_q5_k", 256, 176, 32},
    {Kind::int_q6_k, "int_q6_k", 256, 210, 16},   {Kind::int_iq4_nl, "int_iq4_nl", 32, 18, 32},
    {Kind::int_iq4_xs, "int_iq4_xs", 256, 136, 32}, {Kind::int_mxfp4, "int_mxfp4", 32, 17, 32}};
static_assert(sizeof kKnown / sizeof *kKnown + sizeof kKnownIntegers / sizeof *kKnownIntegers == cpu::kKinds,
              "a format without tests");

// An output's weights: (scale * q + low) of each input, by groups of 16 inputs; and, of int_i8, times a scale of the output.
struct Integral {
  std::vector<int> q;              // [inputs]
  std::vector<float> scale, low;   // [inputs / 16]
  float factor = 1.0f;
};

class IntegerMatrix {
 public:
  // wild: scales of any size and sign
  IntegerMatrix(const KnownIntegers& format, int64_t outputs, int64_t inputs, bool wild, bool with_bias);

  const KnownIntegers& format;
  cpu::Matrix matrix;
  std::vector<Integral> outputs;
  std::vector<float> bias;  // zeros where there is none

 private:
  cpu::Weights weights_;
  Guarded<uint8_t> data_;
};

}  // namespace cpu_test
