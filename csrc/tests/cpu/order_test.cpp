// The tables of integer numerics do what is no product in one order: the same bits on every instruction set. And what that
// rests on where a set has no fused products or a library other cosines.
#include <type_traits>

#include "cpu/angles.hpp"
#include "cpu/isa_region.hpp"
#include "tests/cpu/packed.hpp"

namespace cpu_test {
namespace {

namespace four_lanes {
using cpu::kRows;
#include "cpu/kernels/lanes_4.inl"
#include "cpu/kernels/fused_by_doubles.inl"
}  // namespace four_lanes

// Numbers of one sequence on every machine, as distributions of libraries are not.
class Draws {
 public:
  uint32_t word() { return static_cast<uint32_t>(engine_()); }
  // A multiple of 2^-24 below one in size.
  float fraction() { return static_cast<float>(static_cast<int32_t>(word()) >> 7) * 0x1p-24f; }
  // Of any size from 2^-low to 2^high.
  float any(int low, int high) {
    const float sign = fraction() < 0.0f ? -1.0f : 1.0f, size = 1.0f + std::fabs(fraction());
    return std::ldexp(sign * size, static_cast<int>(word() % static_cast<uint32_t>(low + high)) - low);
  }
  float bits() {
    const uint32_t drawn = word();
    float value;
    std::memcpy(&value, &drawn, 4);
    return value;
  }

 private:
  std::mt19937 engine_{20};
};

bool same(float a, float b) {
  uint32_t of_a, of_b;
  std::memcpy(&of_a, &a, 4), std::memcpy(&of_b, &b, 4);
  return of_a == of_b || (a != a && b != b);
}

struct Operands {
  float a, b, c;
};

// Sums whose exact value lies at a tie of two floats or next to it, and others.
Operands drawn_operands(Draws& draws, int64_t i) {
  const float close = 1.0f + static_cast<float>(static_cast<int>(draws.word() % 5) - 2) * 0x1p-23f;
  const float other = 1.0f + static_cast<float>(static_cast<int>(draws.word() % 5) - 2) * 0x1p-23f;
  const float c = draws.any(40, 40), unit = std::nextafter(std::fabs(c), INFINITY) - std::fabs(c);
  switch (i % 6) {
    case 0: return {draws.bits(), draws.bits(), draws.bits()};
    case 1: return {close * unit, other * (draws.word() % 2 ? 0.5f : -0.5f), c};
    case 2: return {close, other * c, -c};
    case 3: return {draws.any(75, 1), draws.any(75, 1), draws.any(149, -120)};           // where floats are denormal
    case 4: return {draws.any(0, 64), draws.any(0, 64), draws.any(-120, 127) * 1.9f};    // where they end
    default: return {draws.any(10, 10), draws.any(10, 10), draws.any(20, 20)};
  }
}

struct Bits {
  uint64_t hash = 1469598103934665603u;  // FNV-1a

  void add(uint32_t word) { hash = (hash ^ word) * 1099511628211u; }
  void add(float value) {
    uint32_t word = 0x7FC00000u;  // of a NaN, whose bits are the CPU's
    if (value == value) std::memcpy(&word, &value, 4);
    add(word);
  }
  template <typename T>
  void add(const Guarded<T>& values) {
    using Word = std::conditional_t<std::is_same_v<T, float>, float, uint32_t>;
    for (int64_t i = 0; i < values.size(); ++i) add(static_cast<Word>(values[i]));
  }
};

constexpr int64_t kLanes = cpu::kRows;

// Of every machine: an x86-64 and, under qemu, an aarch64 had them. They change where an order or a function does.
constexpr uint64_t kBits = 0x9a1cb17b731a15a5u, kOtherBits = 0xf81df38b053f556au, kTurns = 0x483d4fceb92f1a92u;

Guarded<float> drawn(Draws& draws, int64_t count, int high) {
  Guarded<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = draws.any(8, high);
  return values;
}

struct States {
  cpu::Input in;
  Guarded<uint32_t> words;

  States(const cpu::Kernels& kernels, int64_t channels, int64_t rows) {
    in.stride = cpu::rounded_up(channels, cpu::kDepth) * kLanes / (kernels.pairs ? 2 : 1);
    in.rows = rows;
    words = Guarded<uint32_t>(in.stride);
    words.fill(0);
    in.data = words.data();
  }
  // What rows fill.
  void add_to(Bits& bits) const {
    for (int64_t i = 0; i < words.size(); ++i)
      if (i % kLanes < in.rows_of(0)) bits.add(words[i]);
  }
};

void attend(const cpu::Kernels& kernels, Draws& draws, Bits& bits, int64_t size, int64_t slots, int64_t rows, bool half,
            bool windows = false) {
  constexpr int64_t kPerRow = 3;
  const int64_t first = slots - rows;  // the rows' own, of which each sees its ancestors'
  const Guarded<float> queries = drawn(draws, kPerRow * size * kLanes, 1);
  const Guarded<uint32_t> keys(slots * size), values(slots * size);
  for (const auto* plane : {&keys, &values})
    for (int64_t i = 0; i < slots * size; ++i) {
      const float one = draws.any(6, 1), two = draws.any(6, 1);
      uint32_t low, high;
      std::memcpy(&low, &one, 4), std::memcpy(&high, &two, 4);
      (*plane)[i] = half ? (high & 0xFFFF0000u) | low >> 16 : low;
    }
  std::vector<cpu::Step> steps;
  const int64_t count = std::min<int64_t>(kPerRow * rows, kLanes);
  for (int64_t node = 0; node < rows; ++node) {
    cpu::Step step{first + node, 0, 0, 0};
    for (int64_t lane = 0; lane < count; ++lane)
      for (int64_t row = lane / kPerRow; row >= node; row = (row - 1) / 2) {
        if (row == node) step.lanes |= static_cast<uint16_t>(1u << lane);
        if (row == 0) break;
      }
    if (step.lanes) steps.push_back(step);
  }
  const int64_t end = steps.empty() ? first : steps.back().slot + 1;
  std::vector<int32_t> begins(kLanes, 0);
  if (windows)
    for (int64_t lane = 0; lane < count; ++lane) begins[static_cast<size_t>(lane)] = static_cast<int32_t>(lane * first / kLanes);
  const Guarded<float> scratch(cpu::attend_floats(size, end, static_cast<int64_t>(steps.size())));
  const Guarded<uint16_t> chunks(cpu::turned_halves(size, end, half));
  const States out(kernels, kPerRow * size, rows);
  int64_t turned = 0;
  cpu::AttendTask task{};
  task.queries = queries.data(), task.per_row = kPerRow, task.count = count, task.scale = 0.125f;
  task.keys = keys.data(), task.values = values.data(), task.half = half, task.size = size;
  task.begins = begins.data(), task.lead = *std::max_element(begins.begin(), begins.end());
  task.prefix = first, task.slots = end, task.step = steps.data(), task.steps = static_cast<int64_t>(steps.size());
  task.scratch = scratch.data(), task.turned = &turned, task.chunks = chunks.data(), task.out = &out.in;
  kernels.attend(task);
  out.add_to(bits);
}

// All that a table gives for what is no product, of numbers small, large and denormal.
uint64_t bits_of(const cpu::Kernels& kernels) {
  Draws draws;
  Bits bits;
  Begun begun(kernels);
  for (const int64_t rows : {1, 3, 16}) {
    for (const int64_t channels : {2, 66, 576}) {
      Guarded<float> x = drawn(draws, channels * kLanes, 4);
      const Guarded<float> weight = drawn(draws, channels, 2), plain(channels * kLanes);
      for (int64_t i = 0; i < 5; ++i) x[i * 5] = draws.any(149, -130);
      const States normed(kernels, channels, rows), copied(kernels, channels, rows);
      kernels.norm(x.data(), weight.data(), channels, 1e-5f, &normed.in, 0, 0, plain.data());
      kernels.copy(x.data(), channels, copied.in, 0, 0);
      normed.add_to(bits), copied.add_to(bits);
      kernels.norm(x.data(), weight.data(), channels, 1e-5f, nullptr, 0, 0, x.data());
      kernels.add(x.data(), weight.data(), channels / 16 * 16);
      bits.add(x);
    }
    const int64_t size = cpu::kOutputs * kLanes;
    const Guarded<float> gates = drawn(draws, size, 8), ups = drawn(draws, size, 2);
    for (int64_t i = 0; i < 16; ++i) gates[i * 7] = i % 2 ? -80.0f - static_cast<float>(i) : draws.any(149, -120);
    const States gated(kernels, cpu::kOutputs, rows);
    kernels.gate(gates.data(), ups.data(), gated.in, 0, 0, cpu::Activation::silu);
    gated.add_to(bits);
    for (const int64_t channels : {6, 64}) {
      const Guarded<float> head = drawn(draws, channels * kLanes, 2), turns = drawn(draws, channels * kLanes, 1);
      kernels.rotate(head.data(), turns.data(), turns.data() + channels / 2 * kLanes, channels);
      const Guarded<float> row(channels * rows);
      const Guarded<uint16_t> half(channels * rows);
      kernels.write(head.data(), channels, rows, row.data(), channels, false);
      kernels.write(head.data(), channels, rows, half.data(), channels, true);
      bits.add(head), bits.add(row), bits.add(half);
    }
    Guarded<float> most(8 * kLanes);
    Guarded<int32_t> at(8 * kLanes);
    most.fill(-INFINITY), at.fill(-1);
    for (int32_t panel = 0; panel < 4; ++panel)
      kernels.best(drawn(draws, size, 3).data(), panel * cpu::kOutputs, cpu::kOutputs, 8, most.data(), at.data());
    bits.add(most);
    for (int64_t i = 0; i < at.size(); ++i) bits.add(static_cast<uint32_t>(at[i]));
    for (const bool half : {false, true})
      for (const int64_t channels : {8, 64, 80})
        for (const int64_t slots : {rows, rows + 7, int64_t{130}}) attend(kernels, draws, bits, channels, slots, rows, half);
  }
  return bits.hash;
}

// The same of GELU and of windows.
uint64_t other_bits_of(const cpu::Kernels& kernels) {
  Draws draws;
  Bits bits;
  Begun begun(kernels);
  const int64_t size = cpu::kOutputs * kLanes;
  for (const int64_t rows : {1, 3, 16}) {
    const Guarded<float> gates = drawn(draws, size, 8), ups = drawn(draws, size, 2);
    for (int64_t i = 0; i < 16; ++i) gates[i * 7] = i % 2 ? -6.0f - static_cast<float>(i) : draws.any(149, -120);
    const States gated(kernels, cpu::kOutputs, rows);
    kernels.gate(gates.data(), ups.data(), gated.in, 0, 0, cpu::Activation::gelu_tanh);
    gated.add_to(bits);
    for (const bool half : {false, true})
      for (const int64_t channels : {8, 64, 80})
        for (const int64_t slots : {rows + 7, int64_t{130}})
          attend(kernels, draws, bits, channels, slots, rows, half, true);
  }
  return bits.hash;
}

}  // namespace

void test_fused() {
  Draws draws;
  int64_t wrong = 0, by_parts = 0;
  for (int64_t i = 0; i < 500000; ++i) {
    using namespace four_lanes;
    alignas(16) float a[W], b[W], c[W], found[W];
    for (int lane = 0; lane < W; ++lane) {
      const Operands one = drawn_operands(draws, i);
      a[lane] = one.a, b[lane] = one.b, c[lane] = one.c;
    }
    store(found, fused_by_doubles(load(a), load(b), load(c)));
    for (int lane = 0; lane < W; ++lane) {
      const float exact = std::fma(a[lane], b[lane], c[lane]);
      wrong += !same(found[lane], exact);
      // negative control: a double's sum rounded twice
      const double twice = static_cast<double>(a[lane]) * static_cast<double>(b[lane]) + static_cast<double>(c[lane]);
      by_parts += !same(static_cast<float>(twice), exact);
    }
  }
  check(wrong == 0, "fused_by_doubles is a fused product", wrong);
  check(by_parts > 100, "the numbers tell one rounding from two", by_parts);
}

void test_angles() {
  const auto apart = [](float value, double exact) { return std::fabs(static_cast<double>(value) - exact); };
  int64_t wrong = 0;
  double worst = 0.0;
  Draws draws;
  for (int64_t i = 0; i < 200000; ++i) {
    const float angle = i % 2 ? static_cast<float>(i) * std::fabs(draws.fraction()) : draws.any(60, 26);
    const cpu::Turn turn = cpu::turn_by(angle);
    const double cosine = std::cos(static_cast<double>(angle)), sine = std::sin(static_cast<double>(angle));
    // a library's double may lie on the other side of a tie
    wrong += turn.cosine != static_cast<float>(cosine) || turn.sine != static_cast<float>(sine);
    worst = std::max({worst, apart(turn.cosine, cosine), apart(turn.sine, sine)});
  }
  check(wrong <= 1, "cosines and sines are rounded correctly", wrong);
  check(worst <= 0x1.001p-25, "cosines and sines are close", static_cast<int64_t>(worst * 0x1p40));
  for (const float endless : {INFINITY, -INFINITY, NAN}) check(std::isnan(cpu::turn_by(endless).sine), "no angle", 0);
  const cpu::Turn none = cpu::turn_by(0.0f), far = cpu::turn_by(3e38f);
  check(none.cosine == 1.0f && none.sine == 0.0f, "no turn", 0);
  check(std::fabs(far.cosine * far.cosine + far.sine * far.sine - 1.0f) < 1e-6f, "a far angle is a turn", 0);
}

void test_order() {
  for (const cpu::Kernels* kernels : cpu::available_kernels(cpu::kInteger)) {
    const uint64_t bits = bits_of(*kernels);
    expect(bits == kBits, *kernels, "bits of what is no product", static_cast<int64_t>(bits));
    const uint64_t others = other_bits_of(*kernels);
    expect(others == kOtherBits, *kernels, "bits of GELU and windows", static_cast<int64_t>(others));
  }
  const cpu::Kernels& portable = *cpu::portable_kernels();
  if (std::string(portable.name) == "portable")  // rounds products and sums one by one
    expect(bits_of(portable) != kBits, portable, "one rounding is told from two", 0);
  Bits turns;
  for (int i = 0; i < 4096; ++i) {
    const cpu::Turn turn = cpu::turn_by(static_cast<float>(i) * 0.8f);
    turns.add(turn.cosine), turns.add(turn.sine);
  }
  check(turns.hash == kTurns, "bits of turns", static_cast<int64_t>(turns.hash));
}

}  // namespace cpu_test
