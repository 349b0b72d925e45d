// Matrices as the kernels read them, in guarded memory, with the numbers that they stand for.
#pragma once

#include "cpu/decoder.hpp"
#include "tests/cpu/blocks.hpp"

namespace cpu_test {

// The kind that a matrix of this kind is packed from.
inline Kind source_of(Kind kind) { return kind == Kind::i8 ? Kind::bf16 : kind; }

// Inputs that a row of this kind may have, close to those asked for.
inline int64_t inputs_of(Kind kind, int64_t inputs) {
  const int64_t step = std::max<int64_t>(known(source_of(kind)).inputs, 2);
  return std::max(inputs / step * step, step);
}

inline bool multiplies(const cpu::Kernels& kernels, Kind kind) { return !kernels.pairs || kind != Kind::f32; }

// A row of the matrix as this table expands it, [blocks * 32].
std::vector<float> weights_of(const cpu::Kernels& kernels, const cpu::Matrix& matrix, int64_t output);

// Packs a matrix of a file, 32 rows at a time, as `name`. order: the row of each output, or null; beside: as of add_matrix.
void pack(cpu::Weights& weights, const std::string& name, Kind kind, const FileMatrix& file, const int32_t* order,
          const std::string& beside = {});

class Packed {
 public:
  // wild: as random_matrix has it; shuffled: rows stand in another order than in the file
  Packed(Kind kind, int64_t outputs, int64_t inputs, bool wild, bool with_bias, bool shuffled, int threads = 1);

  FileMatrix file;
  cpu::Matrix matrix;
  std::vector<double> values;     // [outputs][inputs], in the order of the matrix
  std::vector<double> kept_from;  // of i8: what it rounds
  std::vector<float> bias;

 private:
  void move_behind_walls();

  cpu::Weights weights_;
  Guarded<uint8_t> data_;
  Guarded<float> scales_, bias_;
};

}  // namespace cpu_test
