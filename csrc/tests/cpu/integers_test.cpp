// Integer products of each table: exactly those of a plain loop that is written after their definition, so the same bits on
// every instruction set and whatever stands beside a row; near to double precision; and floats in an order of 16 lanes.
#include "tests/cpu/integers.hpp"
#include "tests/cpu/products.hpp"

namespace cpu_test {
namespace {

constexpr int64_t kMostRows = 64;

std::vector<const cpu::Kernels*> tables() { return cpu::available_kernels(cpu::kInteger); }

// A row's inputs in steps of a 127th of the largest of each 32.
struct Steps {
  std::vector<int> q;
  std::vector<float> scale;

  explicit Steps(std::vector<float> x) {
    x.resize((x.size() + 31) / 32 * 32, 0.0f);
    for (size_t first = 0; first < x.size(); first += 32) {
      float peak = 0.0f;
      for (size_t k = first; k < first + 32; ++k)
        if (peak == peak && !(std::fabs(x[k]) <= peak)) peak = std::isfinite(x[k]) ? std::fabs(x[k]) : NAN;
      const bool finite = peak == peak;
      const float per_step = finite && peak >= 0x1p-100f ? 127.0f / peak : 0.0f;
      for (size_t k = first; k < first + 32; ++k)
        q.push_back(finite ? static_cast<int>(std::nearbyint(x[k] * per_step)) : 0);
      scale.push_back(!finite ? NAN : peak >= 0x1p-100f ? peak * 0x1.020408p-7f : 0.0f);
    }
  }
};

// The definition: integer sums of each group, then one or two fused multiply-adds in the order of the inputs. lanes: groups
// are summed by turns into so many sums, which is another order: for what has to be found out.
float defined(const IntegerMatrix& m, int64_t output, const Steps& x, size_t lanes = 1) {
  const Integral& w = m.outputs[static_cast<size_t>(output)];
  std::vector<float> sums(lanes, 0.0f);
  const size_t step = static_cast<size_t>(m.format.group);
  for (size_t first = 0; first < x.q.size(); first += step) {
    int products = 0, inputs = 0;
    for (size_t k = first; k < first + step; ++k) {
      products += (k < w.q.size() ? w.q[k] : 0) * x.q[k];
      inputs += x.q[k];
    }
    const float scale = x.scale[first / 32];
    float& sum = sums[first / step % lanes];
    sum = std::fma(static_cast<float>(products), w.scale[first / 16] * scale, sum);
    if (w.low[first / 16] != 0.0f) sum = std::fma(w.low[first / 16], scale * static_cast<float>(inputs), sum);
  }
  float sum = sums[0];
  for (size_t i = 1; i < lanes; ++i) sum += sums[i];
  const float bias = m.bias[static_cast<size_t>(output)];
  return w.factor != 1.0f || m.matrix.bias ? std::fma(sum, w.factor, bias) : sum;
}

// Rows of all kinds: large ones, small ones, zeros, and some that are not finite at one place.
std::vector<float> rows_of(int64_t inputs) {
  std::vector<float> x = normals(kMostRows * inputs);
  const auto at = [&](int64_t row, int64_t k) -> float& { return x[static_cast<size_t>(row * inputs + k)]; };
  for (int64_t k = 0; k < inputs; ++k) {
    at(3, k) *= 1e30f;
    at(6, k) *= 0x1p-98f;  // some blocks are below 2^-100
    at(7, k) *= 1e-42f;
    at(8, k) = 0.0f;
    if (k >= 32) at(9, k) = 0.0f;
    at(10, k) = k % 2 ? 127.5f : -254.0f;  // halves of a step
  }
  at(5, inputs - 1) = NAN;
  at(11, 0) = INFINITY;
  at(12, inputs / 2) = -INFINITY;
  return x;
}

std::vector<float> row_of(const std::vector<float>& x, int64_t row, int64_t inputs) {
  return {x.begin() + row * inputs, x.begin() + (row + 1) * inputs};
}

bool equal(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }

void test_weights(const IntegerMatrix& m) {
  for (const cpu::Kernels* kernels : tables())
    for (int64_t o = 0; o < m.matrix.outputs; ++o) {
      const std::vector<float> row = weights_of(*kernels, m.matrix, o);
      const Integral& w = m.outputs[static_cast<size_t>(o)];
      for (size_t k = 0; k < w.q.size(); ++k) {
        const double exact = static_cast<double>(w.scale[k / 16]) * w.q[k] + static_cast<double>(w.low[k / 16]);
        const float want = static_cast<float>(exact) * w.factor;
        expect(row[k] == want, *kernels, std::string("weights of ") + m.format.name, o);
      }
    }
}

void test_format(const KnownIntegers& format, int64_t inputs) {
  const bool made = format.bytes == 0;
  if (!made) inputs = std::max(inputs / format.inputs, int64_t{1}) * format.inputs;
  const IntegerMatrix m(format, 35, inputs, false, made);
  const std::vector<float> x = rows_of(inputs);
  const std::string name = format.name;
  // what the definition says, and that another order would say something else
  std::vector<std::vector<float>> wanted;
  int64_t others = 0;
  for (int64_t r = 0; r < kMostRows; ++r) {
    const std::vector<float> row = row_of(x, r, inputs);
    const Steps steps(row);
    wanted.emplace_back();
    for (int64_t o = 0; o < m.matrix.outputs; ++o) {
      const float want = defined(m, o, steps);
      wanted.back().push_back(want);
      others += !equal(defined(m, o, steps, 2), want);
      double exact = static_cast<double>(m.bias[static_cast<size_t>(o)]), off = 0.0, size = std::fabs(exact);
      const Integral& w = m.outputs[static_cast<size_t>(o)];
      for (size_t k = 0; k < row.size(); ++k) {
        const double weight = (static_cast<double>(w.scale[k / 16]) * w.q[k] + static_cast<double>(w.low[k / 16])) *
                              static_cast<double>(w.factor);
        exact += weight * static_cast<double>(row[k]);
        off += std::fabs(weight) * (static_cast<double>(steps.scale[k / 32]) * 0.5001 + 0x1p-99);
        size += std::fabs(weight * static_cast<double>(row[k]));
      }
      const bool finite = std::isfinite(exact);
      check(finite ? std::fabs(static_cast<double>(want) - exact) <= off + 1e-4 * (size + off) : std::isnan(want),
            ("the definition of " + name + " against double precision").c_str(), r);
    }
  }
  check(inputs <= 64 || others > 0, ("another order of " + name).c_str(), inputs);
  const int64_t last = m.matrix.panels - 1;
  for (const cpu::Kernels* kernels : tables())
    for (int64_t rows = 1; rows <= kMostRows; ++rows) {
      std::vector<int64_t> order(static_cast<size_t>(rows));
      const int64_t first = below(kMostRows);
      for (int64_t i = 0; i < rows; ++i) order[static_cast<size_t>(i)] = (first + i * 3) % kMostRows;
      const Tiled given(*kernels, x, inputs, order);
      const std::vector<std::pair<std::vector<const cpu::Matrix*>, std::vector<int64_t>>> calls = {
          {{&m.matrix, &m.matrix}, {0, 1}}, {{&m.matrix}, {last}}};
      for (const auto& [matrices, panels] : calls) {
        const auto sums = products(*kernels, matrices, panels, given);
        for (size_t i = 0; i < panels.size(); ++i)
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t o = panels[i] * cpu::kOutputs; o < std::min((panels[i] + 1) * cpu::kOutputs, m.matrix.outputs); ++o)
              expect(equal(sums[i][static_cast<size_t>(r * cpu::kOutputs + o % cpu::kOutputs)],
                           wanted[static_cast<size_t>(order[static_cast<size_t>(r)])][static_cast<size_t>(o)]),
                     *kernels, "products of " + name + ", row " + std::to_string(order[static_cast<size_t>(r)]), rows);
      }
    }
}

// Two formats and floats that read one input.
void test_beside() {
  const int64_t inputs = 512;
  const IntegerMatrix one(kKnownIntegers[8], 16, inputs, false, false), two(kKnownIntegers[10], 16, inputs, false, true);
  const Packed floats(Kind::bf16, 16, inputs, false, false, false);
  const std::vector<float> x = rows_of(inputs);
  for (const cpu::Kernels* kernels : tables())
    for (const int64_t rows : {1, 4, 17}) {
      std::vector<int64_t> order(static_cast<size_t>(rows));
      for (int64_t i = 0; i < rows; ++i) order[static_cast<size_t>(i)] = i + 13;
      const Tiled given(*kernels, x, inputs, order);
      const std::vector<const cpu::Matrix*> all = {&one.matrix, &two.matrix, &floats.matrix};
      for (size_t a = 0; a < 3; ++a)
        for (size_t b = 0; b < 3; ++b) {
          const auto both = products(*kernels, {all[a], all[b]}, {0, 0}, given);
          expect(same_bits(both[0], products(*kernels, {all[a]}, {0}, given)[0]), *kernels, "the first of two formats", rows);
          expect(same_bits(both[1], products(*kernels, {all[b]}, {0}, given)[0]), *kernels, "the second of two formats", rows);
        }
    }
}

// The sum of a row by float weights, in so many lanes.
float in_lanes(const std::vector<double>& weights, const std::vector<float>& x, int64_t output, size_t count) {
  std::vector<float> lanes(count, 0.0f);
  for (size_t k = 0; k < x.size(); ++k)
    lanes[k % count] = std::fma(static_cast<float>(weights[static_cast<size_t>(output) * x.size() + k]), x[k], lanes[k % count]);
  for (; count > 1; count /= 2)
    for (size_t i = 0; i < count / 2; ++i) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
  return lanes[0];
}

void test_floats(Kind kind, int64_t inputs) {
  const Packed m(kind, 19, inputs, false, true, false);
  const std::vector<float> x = normals(kMostRows * inputs);
  int64_t others = 0;
  for (const cpu::Kernels* kernels : tables())
    for (const int64_t rows : {1, 2, 3, 4, 5, 15, 16, 17, 33, 64}) {
      std::vector<int64_t> order(static_cast<size_t>(rows));
      for (int64_t i = 0; i < rows; ++i) order[static_cast<size_t>(i)] = (i * 5 + rows) % kMostRows;
      const Tiled given(*kernels, x, inputs, order);
      for (const int64_t panel : {0, 1}) {
        const auto sums = products(*kernels, {&m.matrix}, {panel}, given)[0];
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t o = panel * cpu::kOutputs; o < std::min<int64_t>((panel + 1) * cpu::kOutputs, 19); ++o) {
            const std::vector<float> row = row_of(x, order[static_cast<size_t>(r)], inputs);
            const float bias = m.bias[static_cast<size_t>(o)], got = sums[static_cast<size_t>(r * cpu::kOutputs + o % 16)];
            expect(equal(got, in_lanes(m.values, row, o, 16) + bias), *kernels, std::string("sixteen lanes of ") + name_of(kind), rows);
            for (const size_t width : {4, 8}) others += !equal(got, in_lanes(m.values, row, o, width) + bias);
          }
      }
    }
  check(others > 0, "lanes of another width", inputs);
}

}  // namespace

void test_integers() {
  check(!tables().empty(), "tables of integers", 0);
  for (const KnownIntegers& format : kKnownIntegers) {
    for (const bool wild : {false, true}) test_weights(IntegerMatrix(format, 19, format.bytes ? 512 : 290, wild, false));
    for (const int64_t inputs : {32, 290, 1536}) test_format(format, inputs);
  }
  test_beside();
  for (const Kind kind : {Kind::f32, Kind::bf16})
    for (const int64_t inputs : {34, 290, 2112}) test_floats(kind, inputs);
}

}  // namespace cpu_test
