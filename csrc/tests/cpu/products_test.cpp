// Products of each table and kind: against sums in double precision, and the same bits whatever stands beside a row.
#include "tests/cpu/products.hpp"

namespace cpu_test {
namespace {

constexpr int64_t kMostRows = 70;

class Products {
 public:
  Products(const cpu::Kernels& kernels, const Packed& packed, const Packed& other)
      : kernels_(kernels), packed_(packed), other_(other), inputs_(packed.matrix.inputs) {
    x_ = normals(kMostRows * inputs_);
    for (int64_t i = 0; i < inputs_; ++i) {  // one row is large, one small, one nothing
      x_[static_cast<size_t>(3 * inputs_ + i)] *= 1e4f;
      x_[static_cast<size_t>(6 * inputs_ + i)] *= 1e-30f;
      x_[static_cast<size_t>(8 * inputs_ + i)] = 0.0f;
    }
    for (const Packed* one : {&packed_, &other_})
      for (int64_t panel = 0; panel < one->matrix.panels; ++panel)
        for (int64_t r = 0; r < kMostRows; ++r) {
          const Tiled row(kernels_, x_, inputs_, {r});
          alone_[one == &other_].push_back(products(kernels_, {&one->matrix}, {panel}, row)[0]);
        }
  }

  // A row alone, against double precision. Sums in single precision lose a unit in the last place per term at most.
  void exact() const {
    for (int64_t panel = 0; panel < packed_.matrix.panels; ++panel)
      for (int64_t r = 0; r < kMostRows; ++r)
        for (int64_t i = 0; i < cpu::kOutputs; ++i) {
          const int64_t o = panel * cpu::kOutputs + i;
          if (o >= packed_.matrix.outputs) continue;
          double sum = packed_.bias[static_cast<size_t>(o)], size = std::fabs(sum);
          for (int64_t k = 0; k < inputs_; ++k) {
            const double x = static_cast<double>(x_[static_cast<size_t>(r * inputs_ + k)]);
            const double weight = packed_.values[static_cast<size_t>(o * inputs_ + k)];
            const double term = (kernels_.pairs ? as_bf16(x) : x) * weight;
            sum += term, size += std::fabs(term);
          }
          const double got = static_cast<double>(alone(0, panel, r)[static_cast<size_t>(i)]);
          expect(std::fabs(got - sum) <= 1e-5 * size, kernels_, label("exact products"), r);
        }
  }

  // So many rows, beginning with some other each time; with one matrix, two panels of it, and two matrices.
  void among(int64_t rows) const {
    std::vector<int64_t> order(static_cast<size_t>(rows));
    const int64_t first = below(kMostRows);
    for (int64_t i = 0; i < rows; ++i) order[static_cast<size_t>(i)] = (first + i * 3) % kMostRows;
    const Tiled inputs(kernels_, x_, inputs_, order);
    const int64_t last = packed_.matrix.panels - 1, next = other_.matrix.panels - 1;
    compare(order, {0}, {last}, inputs);
    compare(order, {0, 0}, {last, 0}, inputs);
    compare(order, {0, 1}, {0, next}, inputs);
  }

  // A row that is NaN, infinite or both leaves no trace in the others.
  void poisoned() {
    const std::vector<float> before = x_;
    for (int64_t i = 0; i < inputs_; ++i) x_[static_cast<size_t>(5 * inputs_ + i)] = i % 3 ? NAN : INFINITY;
    std::vector<int64_t> order(20);
    for (int64_t i = 0; i < 20; ++i) order[static_cast<size_t>(i)] = i;
    const Tiled inputs(kernels_, x_, inputs_, order);
    const std::vector<float> sums = products(kernels_, {&packed_.matrix}, {0}, inputs)[0];
    for (int64_t r = 0; r < 20; ++r) {
      const std::vector<float> row(sums.begin() + r * cpu::kOutputs, sums.begin() + (r + 1) * cpu::kOutputs);
      if (r != 5) expect(same_bits(row, alone(0, 0, r)), kernels_, label("products beside NaN"), r);
      if (r == 5) expect(std::isnan(row[0]), kernels_, label("products of NaN"), r);
    }
    x_ = before;
  }

 private:
  const std::vector<float>& alone(size_t which, int64_t panel, int64_t row) const {
    return alone_[which][static_cast<size_t>(panel * kMostRows + row)];
  }

  void compare(const std::vector<int64_t>& order, const std::vector<size_t>& which, const std::vector<int64_t>& panels,
               const Tiled& inputs) const {
    std::vector<const cpu::Matrix*> matrices;
    for (const size_t one : which) matrices.push_back(one == 0 ? &packed_.matrix : &other_.matrix);
    const auto sums = products(kernels_, matrices, panels, inputs);
    for (size_t i = 0; i < which.size(); ++i)
      for (size_t r = 0; r < order.size(); ++r) {
        const std::vector<float> row(sums[i].begin() + static_cast<int64_t>(r) * cpu::kOutputs,
                                     sums[i].begin() + static_cast<int64_t>(r + 1) * cpu::kOutputs);
        expect(same_bits(row, alone(which[i], panels[i], order[r])), kernels_, label("a row's bits among others"),
               static_cast<int64_t>(order.size()));
      }
  }

  std::string label(const char* what) const {
    return std::string(what) + " of " + name_of(packed_.matrix.kind) + ", beside " + name_of(other_.matrix.kind);
  }

  const cpu::Kernels& kernels_;
  const Packed &packed_, &other_;
  const int64_t inputs_;
  std::vector<float> x_;
  std::vector<std::vector<float>> alone_[2];
};

}  // namespace

void test_products() {
  for (const Kind kind : all_kinds()) {
    const int64_t inputs = inputs_of(kind, 290);  // not of 32, where the kind allows it
    const Packed packed(kind, 35, inputs, kind == Kind::q4_0, true, false);
    const Packed other(kind == Kind::q8_0 || inputs % 32 ? Kind::bf16 : Kind::q8_0, 17, inputs, false, false, false);
    for (const cpu::Kernels* kernels : cpu::available_kernels()) {
      if (!multiplies(*kernels, kind)) continue;
      Products products(*kernels, packed, other);
      products.exact();
      if (kind == Kind::bf16)
        for (int64_t rows = 1; rows <= kMostRows; ++rows) products.among(rows);
      else
        for (const int64_t rows : {1, 2, 15, 16, 17, 32, 33, 48, 63, 64, 65, 70}) products.among(rows);
      if (kind == Kind::bf16 || kind == Kind::f32) products.among(530);  // more than the rows whose lanes are kept at a time
      products.poisoned();
    }
  }
  for (const Kind kind : {Kind::f32, Kind::bf16, Kind::i8, Kind::q4_1}) {  // inputs of several parts
    const int64_t inputs = 66 * cpu::kDepth;
    const Packed packed(kind, 18, inputs, false, true, false), other(Kind::bf16, 17, inputs, false, false, false);
    for (const cpu::Kernels* kernels : cpu::available_kernels()) {
      if (!multiplies(*kernels, kind)) continue;
      Products products(*kernels, packed, other);
      products.exact();
      for (const int64_t rows : {1, 2, 3, 4, 5, 16, 23}) products.among(rows);
    }
  }
}

}  // namespace cpu_test
