// Tests of the kernels between products, in each table: norm, copy, gate and rotate, against double precision.
#include "tests/cpu/packed.hpp"

namespace cpu_test {
namespace {

constexpr int64_t kLanes = cpu::kRows;

struct Output {
  cpu::Input in;
  Guarded<uint32_t> words;
  bool pairs;

  Output(const cpu::Kernels& kernels, int64_t channels, int64_t tiles) : pairs(kernels.pairs) {
    in.stride = cpu::rounded_up(channels, cpu::kDepth) * kLanes / (pairs ? 2 : 1);
    words = Guarded<uint32_t>(in.stride * tiles);
    in.data = words.data();
  }

  double at(int64_t tile, int64_t channel, int64_t lane) const {
    if (!pairs) return static_cast<double>(in.floats(tile)[channel * kLanes + lane]);
    const uint32_t pair = in.pairs(tile)[channel / 2 * kLanes + lane];
    return static_cast<double>(cpu::from_bf16(static_cast<uint16_t>(channel % 2 ? pair >> 16 : pair)));
  }
};

// `relative` of the number, and what rounding it to bfloat16 adds.
bool close(double got, double exact, double relative, bool rounded) {
  return std::fabs(got - exact) <= (relative + (rounded ? 1.0 / 256 : 0.0)) * std::fabs(exact) + 1e-30;
}

void test_copy(const cpu::Kernels& kernels) {
  for (const int64_t channels : {2, 34, 64}) {
    const std::vector<float> drawn = normals(channels * kLanes, 100.0);
    const Guarded<float> x(drawn.data(), channels * kLanes);
    x[1] = NAN, x[kLanes] = INFINITY, x[kLanes + 3] = 0.0f, x[5] = 1.00390625f;  // the last lies between two bfloat16
    const Output out(kernels, channels + 2, 2);
    Begun begun(kernels);
    kernels.copy(x.data(), channels, out.in, 1, 2);
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const double wanted = static_cast<double>(x[c * kLanes + lane]), got = out.at(1, c + 2, lane);
        const bool same = got == (kernels.pairs ? as_bf16(wanted) : wanted);
        expect(std::isnan(wanted) ? std::isnan(got) : same, kernels, "copy", channels);
      }
    const bool left = std::isnan(out.at(0, 0, 0)) && std::isnan(out.at(1, 1, 0));
    expect(left, kernels, "copy leaves what stands before", channels);
  }
}

void test_norm(const cpu::Kernels& kernels) {
  for (const int64_t channels : {2, 6, 34, 64, 130})
    for (const double size : {1e-8, 1.0, 1e6}) {
      const std::vector<float> drawn = normals(channels * kLanes, size), scale = normals(channels);
      const Guarded<float> x(drawn.data(), channels * kLanes), weight(scale.data(), channels), plain(channels * kLanes);
      for (int64_t c = 0; c < channels; ++c) x[c * kLanes + 7] = 0.0f;
      x[kLanes + 4] = NAN;
      const Output out(kernels, channels + 4, 1);
      Begun begun(kernels);
      kernels.norm(x.data(), weight.data(), channels, 1e-6f, &out.in, 0, 4, plain.data());
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        double squares = 0.0;
        for (int64_t c = 0; c < channels; ++c) squares += std::pow(static_cast<double>(x[c * kLanes + lane]), 2);
        const double root = 1.0 / std::sqrt(squares / static_cast<double>(channels) + static_cast<double>(1e-6f));
        for (int64_t c = 0; c < channels; ++c) {
          const double exact = static_cast<double>(x[c * kLanes + lane]) * root * static_cast<double>(weight[c]);
          const double got = static_cast<double>(plain[c * kLanes + lane]), put = out.at(0, c + 4, lane);
          const bool nan = std::isnan(got) && std::isnan(put);
          expect(lane == 4 ? nan : close(got, exact, 1e-5, false), kernels, "norm", channels);
          expect(lane == 4 ? nan : close(put, exact, 1e-5, kernels.pairs), kernels, "norm into an input", channels);
        }
      }
      kernels.norm(x.data(), weight.data(), channels, 1e-6f, nullptr, 0, 0, x.data());
      x[kLanes + 4] = plain[kLanes + 4] = 0.0f;
      for (int64_t c = 0; c < channels; ++c) x[c * kLanes + 4] = plain[c * kLanes + 4] = 0.0f;
      expect(same_bits(x.values(), plain.values()), kernels, "norm in place", channels);
    }
}

double exact_of(double x, cpu::Activation activation) {
  if (activation == cpu::Activation::silu) return x / (1.0 + std::exp(-x));
  const double u = std::sqrt(2.0 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
  return x / (1.0 + std::exp(-2.0 * u));  // as x * (1 + tanh(u)) / 2, of which little is left below -4
}

void test_gate(const cpu::Kernels& kernels, cpu::Activation activation) {
  const int64_t size = cpu::kOutputs * kLanes;
  const std::vector<float> drawn = normals(size, 4.0), factors = normals(size);
  const Guarded<float> gates(drawn.data(), size), ups(factors.data(), size);
  const float special[] = {0.0f, -0.0f, 50.0f, -50.0f, 200.0f, -200.0f, 1e-20f, 3e38f, -1e30f, NAN, 1.0f};
  std::copy(std::begin(special), std::end(special), gates.data());
  ups[10] = NAN;
  for (int i = 0; i < 10; ++i) ups[i] = 0.5f;
  const bool is_silu = activation == cpu::Activation::silu;
  const Output out(kernels, 48, 1);
  Begun begun(kernels);
  kernels.gate(gates.data(), ups.data(), out.in, 0, 16, activation);
  for (int64_t c = 0; c < cpu::kOutputs; ++c)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t i = c * kLanes + lane;
      const double gate = static_cast<double>(gates[i]), up = static_cast<double>(ups[i]);
      const double exact = exact_of(gate, activation) * up;
      const double got = out.at(0, 16 + c, lane);
      if (i == 9 || i == 10)
        expect(std::isnan(got), kernels, "gate of NaN", i);
      else if (gate < -80)  // exp stops short of overflow there; the product is next to nothing all the same
        expect(std::fabs(got) < 1e-7, kernels, "gate of a low number", i);
      else
        expect(close(got, exact, is_silu ? 1e-6 : 1e-5, kernels.pairs), kernels, "gate", i);
    }
}

// What a few rows' lanes hold is what they hold beside others.
void test_few_rows(const cpu::Kernels& kernels, cpu::Activation activation) {
  const int64_t channels = 48, size = channels * kLanes;
  const std::vector<float> first = normals(size, 4.0), second = normals(size), scale = normals(channels);
  const Guarded<float> x(first.data(), size), ups(second.data(), size), weight(scale.data(), channels);
  Begun begun(kernels);
  const auto made = [&](int64_t rows, int which) {
    Output out(kernels, channels, 2);
    out.in.rows = kLanes + rows;
    if (which == 0) kernels.norm(x.data(), weight.data(), channels, 1e-6f, &out.in, 1, 0, nullptr);
    if (which == 1) kernels.copy(x.data(), channels, out.in, 1, 0);
    for (int64_t c = 0; which == 2 && c < channels; c += cpu::kOutputs)
      kernels.gate(x.data() + c * kLanes, ups.data() + c * kLanes, out.in, 1, c, activation);
    std::vector<double> values;
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t lane = 0; lane < rows; ++lane) values.push_back(out.at(1, c, lane));
    return values;
  };
  for (int which = 0; which < 3; ++which) {
    const std::vector<double> all = made(kLanes, which);
    for (const int64_t rows : {1, 2, 3, 5, 9}) {
      const std::vector<double> few = made(rows, which);
      for (size_t i = 0; i < few.size(); ++i) {
        const size_t row = static_cast<size_t>(rows), at = i / row * static_cast<size_t>(kLanes) + i % row;
        expect(few[i] == all[at], kernels, "few rows", rows);
      }
    }
  }
}

void test_rotate(const cpu::Kernels& kernels) {
  for (const int64_t size : {2, 6, 16, 80}) {
    const std::vector<float> drawn = normals(size * kLanes), angles = normals(size / 2 * kLanes, 3.0);
    const Guarded<float> head(drawn.data(), size * kLanes), cosines(size / 2 * kLanes), sines(size / 2 * kLanes);
    for (int64_t i = 0; i < cosines.size(); ++i) {
      cosines[i] = std::cos(angles[static_cast<size_t>(i)]);
      sines[i] = std::sin(angles[static_cast<size_t>(i)]);
    }
    kernels.rotate(head.data(), cosines.data(), sines.data(), size);
    for (int64_t i = 0; i < cosines.size(); ++i) {
      const double cosine = static_cast<double>(cosines[i]), sine = static_cast<double>(sines[i]);
      const double a = static_cast<double>(drawn[static_cast<size_t>(i)]);
      const double b = static_cast<double>(drawn[static_cast<size_t>(i + cosines.size())]);
      const double first = static_cast<double>(head[i]), second = static_cast<double>(head[i + cosines.size()]);
      const double bound = 3e-7 * (std::fabs(a) + std::fabs(b));
      expect(std::fabs(first - (a * cosine - b * sine)) <= bound, kernels, "rotate", size);
      expect(std::fabs(second - (b * cosine + a * sine)) <= bound, kernels, "rotate", size);
    }
  }
}

void test_write(const cpu::Kernels& kernels) {
  for (const int64_t size : {2, 16, 18, 37, 64})
    for (const int64_t rows : {1, 5, 16})
      for (const bool half : {false, true}) {
        const int64_t stride = size + 3, width = half ? 2 : 4;
        const std::vector<float> drawn = normals(size * kLanes, 100.0);
        const Guarded<float> states(drawn.data(), size * kLanes);
        states[0] = NAN, states[kLanes] = -INFINITY;
        const Guarded<uint8_t> out(((rows - 1) * stride + size) * width);
        kernels.write(states.data(), size, rows, out.data(), stride, half);
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t d = 0; d < (row + 1 < rows ? stride : size); ++d) {
            const double value = static_cast<double>(states[std::min(d, size - 1) * kLanes + row]);
            const double wanted = d >= size ? NAN : half ? as_bf16(value) : value;
            float got;
            uint32_t bits = 0;
            std::memcpy(half ? reinterpret_cast<uint8_t*>(&bits) + 2 : reinterpret_cast<uint8_t*>(&bits),
                        out.data() + (row * stride + d) * width, static_cast<size_t>(width));
            std::memcpy(&got, &bits, 4);
            const bool same = static_cast<double>(got) == wanted || (std::isnan(got) && std::isnan(wanted));
            expect(same, kernels, "write", size);
          }
      }
}

void test_add(const cpu::Kernels& kernels) {
  for (const int64_t rows : {1, 3, 16}) {
    const std::vector<float> first = normals(rows * kLanes), second = normals(rows * kLanes);
    const Guarded<float> to(first.data(), rows * kLanes), from(second.data(), rows * kLanes);
    kernels.add(to.data(), from.data(), rows * kLanes);
    for (int64_t i = 0; i < to.size(); ++i)
      expect(to[i] == first[static_cast<size_t>(i)] + second[static_cast<size_t>(i)], kernels, "add", rows);
  }
}

// Panel after panel, against all outputs of a row in order.
void test_best(const cpu::Kernels& kernels, int64_t count) {
  const int32_t outputs = 5 * cpu::kOutputs + 3;
  const float special[] = {NAN, INFINITY, -INFINITY};
  Guarded<float> sums(cpu::rounded_up(outputs, cpu::kOutputs) * kLanes), most(count * kLanes);
  Guarded<int32_t> at(count * kLanes);
  for (int64_t i = 0; i < sums.size(); ++i) sums[i] = below(4) ? std::round(normal(2.0)) : special[below(3)];
  for (int64_t o = 0; o < outputs; ++o) sums[o * kLanes + 3] = special[below(3)];
  most.fill(-INFINITY), at.fill(-1);
  for (int32_t first = 0; first < outputs; first += cpu::kOutputs)
    kernels.best(sums.data() + first * kLanes, first, std::min<int32_t>(cpu::kOutputs, outputs - first), count,
                 most.data(), at.data());
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    std::vector<float> values;
    for (int32_t o = 0; o < outputs; ++o) values.push_back(sums[o * kLanes + lane]);
    const std::vector<int64_t> wanted = best_of(values, count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t output = wanted[static_cast<size_t>(i)];
      const float value = output < 0 ? -INFINITY : values[static_cast<size_t>(output)];
      expect(at[i * kLanes + lane] == output && most[i * kLanes + lane] == value, kernels, "best", count);
    }
  }
}

}  // namespace

void test_states() {
  for (const cpu::Kernels* kernels : every_table()) {
    test_copy(*kernels);
    test_norm(*kernels);
    for (const auto activation : {cpu::Activation::silu, cpu::Activation::gelu_tanh}) {
      test_gate(*kernels, activation);
      test_few_rows(*kernels, activation);
    }
    test_rotate(*kernels);
    test_write(*kernels);
    test_add(*kernels);
    for (const int64_t count : {1, 2, 8, 90}) test_best(*kernels, count);
  }
}

}  // namespace cpu_test
