// Packing and `weights` of each table against the blocks of files taken apart one number at a time.
#include "tests/cpu/packed.hpp"

namespace cpu_test {
namespace {

void test_weights(const cpu::Kernels& kernels, const Packed& packed) {
  const cpu::Matrix& m = packed.matrix;
  for (int64_t o = 0; o < m.outputs; ++o) {
    const std::vector<float> row = weights_of(kernels, m, o);
    const double* exact = packed.values.data() + o * m.inputs;
    for (int64_t k = 0; k < m.blocks * cpu::kDepth; ++k)
      expect(row[static_cast<size_t>(k)] == (k < m.inputs ? exact[k] : 0.0), kernels,
             std::string("weights of ") + name_of(m.kind), o);
  }
}

// Each row has 255 steps, the largest of which is its largest number.
void test_int8(const Packed& packed) {
  const int64_t inputs = packed.matrix.inputs;
  for (int64_t o = 0; o < packed.matrix.outputs; ++o) {
    const double *was = packed.kept_from.data() + o * inputs, *is = packed.values.data() + o * inputs;
    double peak = 0.0;
    for (int64_t k = 0; k < inputs; ++k) peak = std::max(peak, std::fabs(was[k]));
    for (int64_t k = 0; k < inputs; ++k) {
      const double steps = peak == 0.0 ? 0.0 : is[k] / peak * 127.0;
      check(std::fabs(is[k] - was[k]) <= peak / 254.0 * 1.00001, "int8 is the nearest step", o);
      check(std::fabs(steps - std::nearbyint(steps)) < 1e-4 && std::fabs(steps) < 127.1, "int8 is a step", o);
    }
  }
}

// Outputs of zeros stay zeros; where a number is NaN the whole output is, and no other.
void test_int8_of_no_scale() {
  FileMatrix file = random_matrix(Kind::f32, 3, 32, false);
  std::fill_n(file.bytes.begin() + 128, 128, uint8_t{0});
  std::fill_n(file.bytes.begin() + 256 + 20, 4, uint8_t{0xFF});
  cpu::Weights weights(1);
  pack(weights, "m", Kind::i8, file, nullptr);
  for (const cpu::Kernels* kernels : cpu::available_kernels())
    for (int64_t k = 0; k < 32; ++k) {
      const auto at = [&](int64_t output) {
        return weights_of(*kernels, weights.matrix("m"), output)[static_cast<size_t>(k)];
      };
      expect(std::isfinite(at(0)) && at(1) == 0.0f && std::isnan(at(2)), *kernels, "int8 of zeros and NaN", k);
    }
}

// Matrices whose panels stand in turn have the weights and products of those that stand alone.
void test_matrices_beside_each_other() {
  for (const Kind kind : {Kind::f32, Kind::q4_k, Kind::i8})
    for (const int64_t outputs : {16, 19, 40}) {
      const int64_t inputs = inputs_of(kind, 256);
      const FileMatrix gate = random_matrix(source_of(kind), outputs, inputs, false);
      const FileMatrix up = random_matrix(source_of(kind), outputs, inputs, false);
      cpu::Weights alone(1), together(1);
      pack(alone, "gate", kind, gate, nullptr);
      pack(alone, "up", kind, up, nullptr);
      pack(together, "gate", kind, gate, nullptr, "up");
      pack(together, "up", kind, up, nullptr);
      const cpu::Matrix first = together.matrix("gate"), second = together.matrix("up");
      check(second.data - first.data == first.step / 2 && second.step == first.step, "panels in turn", outputs);
      for (const char* name : {"gate", "up"})
        for (const cpu::Kernels* kernels : cpu::available_kernels())
          for (int64_t o = 0; o < outputs; ++o)
            expect(weights_of(*kernels, together.matrix(name), o) == weights_of(*kernels, alone.matrix(name), o), *kernels,
                   std::string("weights beside others of ") + name_of(kind), o);
    }
  cpu::Weights weights(1);
  weights.add_matrix("gate.weight", Kind::f32, 16, 32, "up.weight");
  bool refused = false;
  try {
    weights.add_matrix("up.weight", Kind::f32, 32, 32);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  check(refused, "a matrix of another size beside one", 32);
}

}  // namespace

void test_packing() {
  for (const Kind kind : all_kinds())
    for (const int64_t outputs : {1, 16, 19, 40})
      for (const int64_t inputs : {34, 64, 256, 544}) {
        const bool wild = outputs != 16, shuffled = outputs == 19;
        const Packed packed(kind, outputs, inputs_of(kind, inputs), wild, false, shuffled, 1 + outputs % 3);
        for (const cpu::Kernels* kernels : cpu::available_kernels()) test_weights(*kernels, packed);
        if (kind == Kind::i8) test_int8(packed);
      }
  test_int8_of_no_scale();
  test_matrices_beside_each_other();
}

}  // namespace cpu_test
