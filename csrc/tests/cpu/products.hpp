// Products by a table of kernels, of rows that stand in any order.
#pragma once

#include "tests/cpu/packed.hpp"

namespace cpu_test {

// Rows of inputs as products read them; lanes that hold no row are NaN, as they must not matter.
struct Tiled {
  int64_t rows, tiles;
  cpu::Input in;
  Guarded<uint32_t> words;

  Tiled(const cpu::Kernels& kernels, const std::vector<float>& x, int64_t inputs, const std::vector<int64_t>& order)
      : rows(static_cast<int64_t>(order.size())), tiles((rows + cpu::kRows - 1) / cpu::kRows) {
    in.stride = cpu::rounded_up(inputs, cpu::kDepth) * cpu::kRows / (kernels.pairs ? 2 : 1);
    words = Guarded<uint32_t>(in.stride * tiles);
    words.fill(0);
    in.data = words.data();
    Begun begun(kernels);
    for (int64_t t = 0; t < tiles; ++t) {
      const Guarded<float> states(inputs * cpu::kRows);
      for (int64_t lane = 0; lane < std::min<int64_t>(cpu::kRows, rows - t * cpu::kRows); ++lane)
        for (int64_t k = 0; k < inputs; ++k)
          states[k * cpu::kRows + lane] =
              x[static_cast<size_t>(order[static_cast<size_t>(t * cpu::kRows + lane)] * inputs + k)];
      kernels.copy(states.data(), inputs, in, t, 0);
    }
  }
};

// Sums [rows][16] of each panel.
inline std::vector<std::vector<float>> products(const cpu::Kernels& kernels, const std::vector<const cpu::Matrix*>& matrices,
                                         const std::vector<int64_t>& panels, const Tiled& inputs) {
  const int count = static_cast<int>(matrices.size());
  std::vector<Guarded<float>> sums;
  std::vector<float*> to;
  for (int i = 0; i < count; ++i) {
    sums.emplace_back(inputs.tiles * cpu::kOutputs * cpu::kRows);
    to.push_back(sums.back().data());
  }
  const Guarded<uint8_t> scratch(cpu::scratch_bytes(matrices[0]->blocks, inputs.tiles));
  Begun begun(kernels);
  for (const cpu::Matrix* matrix : matrices) kernels.prepare(*matrix, inputs.in, inputs.rows, scratch.data());
  kernels.products(matrices.data(), panels.data(), count, inputs.in, inputs.tiles, inputs.rows, to.data(),
                   scratch.data());
  std::vector<std::vector<float>> found;
  for (const Guarded<float>& from : sums) {
    found.emplace_back();
    for (int64_t r = 0; r < inputs.rows; ++r)
      for (int64_t o = 0; o < cpu::kOutputs; ++o)
        found.back().push_back(from[(r / cpu::kRows * cpu::kOutputs + o) * cpu::kRows + r % cpu::kRows]);
  }
  return found;
}

}  // namespace cpu_test
