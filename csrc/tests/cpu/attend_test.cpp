// Attention of each table against double precision; what a lane does not see leaves no trace in it. And its order: a query
// has the same bits alone as beside others, and with integer numerics those of sums of single numbers one after the other.
#include <type_traits>

#include "cpu/isa_region.hpp"
#include "tests/cpu/packed.hpp"

namespace cpu_test {
namespace {

namespace four_lanes {
using cpu::kRows;
#include "cpu/kernels/lanes_4.inl"
#include "cpu/kernels/fused_by_doubles.inl"
CPU_INLINE vf fused(vf a, vf b, vf c) { return fused_by_doubles(a, b, c); }
#include "cpu/kernels/numbers.inl"
}  // namespace four_lanes

constexpr int64_t kLanes = cpu::kRows;

struct Case {
  int64_t size, prefix, rest;     // channels, slots that all see, and slots behind them
  bool half;                      // keys and values are bfloat16
  int64_t per_row, first, count;  // query heads of a row, and which queries of the tile
  bool windows;                   // lanes begin at slots of their own
};

class Attention {
 public:
  explicit Attention(const Case& given) : given_(given), keys_(bytes()), values_(bytes()) {
    put(keys_, keys), put(values_, values);
    const std::vector<float> drawn = normals(given.per_row * given.size * kLanes);
    queries_ = Guarded<float>(drawn.data(), static_cast<int64_t>(drawn.size()));
    for (int64_t i = 0; i < given.rest; ++i) {
      seen_.push_back(static_cast<uint16_t>(generator()));
      if (given.count > 2) seen_.back() &= static_cast<uint16_t>(~4u);  // lane 2 sees none of them
      seen_.back() &= static_cast<uint16_t>((1u << given.count) - 1);
    }
    for (int64_t lane = 0; lane < given.count && given.windows; ++lane)
      begins_[lane] = static_cast<int32_t>(lane == 1 ? given.prefix : below(given.prefix + 1));
    set_steps();
  }

  int64_t slots() const { return given_.prefix + given_.rest; }
  bool sees(int64_t lane, int64_t slot) const {
    if (slot < given_.prefix) return slot >= begins_[lane];
    return (seen_[static_cast<size_t>(slot - given_.prefix)] >> lane & 1) != 0;
  }

  // [lane][size]; what the task may not write is looked at too, and the task run a second time.
  std::vector<std::vector<float>> run(const cpu::Kernels& kernels) const {
    return run(kernels, given_.first, given_.count, begins_, steps_, true);
  }

  // A lane's query as the only one, of which nothing is kept for others.
  std::vector<float> alone(const cpu::Kernels& kernels, int64_t lane) const {
    std::vector<cpu::Step> steps = steps_;
    for (cpu::Step& step : steps)
      for (uint16_t* lanes : {&step.lanes, &step.odd, &step.last}) *lanes = static_cast<uint16_t>(*lanes >> lane & 1);
    int32_t begins[kLanes] = {begins_[lane]};
    return run(kernels, given_.first + lane, 1, begins, steps, false)[0];
  }

  // Sums of single numbers, each in the order of slots or channels.
  std::vector<float> in_order(int64_t lane) const {
    const int64_t query = given_.first + lane, row = query / given_.per_row, head = query % given_.per_row;
    std::vector<float> weights, out(static_cast<size_t>(given_.size), 0.0f);
    std::vector<int64_t> seen;
    float peak = -3.0e38f, total = 0.0f;
    for (int64_t s = 0; s < slots(); ++s) {
      if (!sees(lane, s)) continue;
      float score = 0.0f;
      for (int64_t d = 0; d < given_.size; ++d) {
        const float number = queries_[(head * given_.size + d) * kLanes + row] * scale();
        score = std::fma(number, static_cast<float>(at(keys, s, d)), score);
      }
      seen.push_back(s), weights.push_back(score);
      peak = std::max(peak, score);
    }
    for (size_t i = 0; i < seen.size(); ++i) {
      const float weight = four_lanes::exponential(four_lanes::set(weights[i] - peak))[0];
      total += weight;
      for (int64_t d = 0; d < given_.size; ++d) {
        float& sum = out[static_cast<size_t>(d)];
        sum = std::fma(weight, static_cast<float>(at(values, seen[i], d)), sum);
      }
    }
    for (float& sum : out) sum *= total > 0.0f ? 1.0f / total : 0.0f;
    return out;
  }

  std::vector<std::vector<float>> run(const cpu::Kernels& kernels, int64_t first, int64_t count, const int32_t* begins,
                                      const std::vector<cpu::Step>& steps_of, bool shares) const {
    const int64_t end = steps_of.empty() ? given_.prefix : steps_of.back().slot + 1;
    const auto steps = static_cast<int64_t>(steps_of.size());
    const Guarded<float> scratch(cpu::attend_floats(given_.size, end, steps));
    const Guarded<uint16_t> chunks(cpu::turned_halves(given_.size, end, given_.half));
    cpu::AttendTask task{};
    int64_t turned = 0;
    task.queries = queries_.data(), task.scale = scale();
    task.per_row = given_.per_row, task.first = first, task.count = count, task.shares = shares;
    task.keys = keys_.data(), task.values = values_.data(), task.half = given_.half;
    task.begins = begins, task.lead = *std::max_element(begins, begins + kLanes);
    task.size = given_.size, task.prefix = given_.prefix, task.slots = end;
    task.step = steps_of.data(), task.steps = steps;
    task.scratch = scratch.data(), task.turned = &turned, task.chunks = chunks.data();
    const auto once = attend(kernels, task), twice = attend(kernels, task);
    for (size_t lane = 0; lane < once.size(); ++lane)
      expect(all_nan(once[lane]) || same_bits(once[lane], twice[lane]), kernels, "a head's next task", slots());
    return once;
  }

  std::vector<double> exact(int64_t lane) const {
    const int64_t query = given_.first + lane, row = query / given_.per_row, head = query % given_.per_row;
    std::vector<double> scores, out(static_cast<size_t>(given_.size), 0.0);
    double peak = -INFINITY, sum = 0.0;
    for (int64_t s = 0; s < slots(); ++s) {
      double score = 0.0;
      for (int64_t d = 0; d < given_.size; ++d)
        score += static_cast<double>(queries_[(head * given_.size + d) * kLanes + row]) * at(keys, s, d);
      scores.push_back(sees(lane, s) ? score * static_cast<double>(scale()) : -INFINITY);
      peak = std::max(peak, scores.back());
    }
    for (double& score : scores) score = score == -INFINITY ? 0.0 : std::exp(score - peak), sum += score;
    for (int64_t s = 0; s < slots() && sum > 0.0; ++s)
      for (int64_t d = 0; d < given_.size; ++d)
        out[static_cast<size_t>(d)] += scores[static_cast<size_t>(s)] / sum * at(values, s, d);
    return out;
  }

  // Makes a slot's key and value NaN.
  void poison(int64_t slot) {
    const int64_t each = given_.size * (given_.half ? 2 : 4);
    for (const Guarded<uint8_t>* plane : {&keys_, &values_})
      std::memset(plane->data() + slot * each, 0xFF, static_cast<size_t>(each));
  }

  std::vector<double> keys, values;  // [slots][size]

 private:
  int64_t bytes() const { return slots() * given_.size * (given_.half ? 2 : 4); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(given_.size)); }
  double at(const std::vector<double>& plane, int64_t slot, int64_t d) const {
    return plane[static_cast<size_t>(slot * given_.size + d)];
  }

  void put(const Guarded<uint8_t>& to, std::vector<double>& numbers) const {
    for (int64_t i = 0; i < slots() * given_.size; ++i) {
      const float value = normal(2.0);
      const double kept = given_.half ? as_bf16(static_cast<double>(value)) : static_cast<double>(value);
      const uint16_t bits = bf16_bits(kept);
      if (given_.half)
        std::memcpy(to.data() + 2 * i, &bits, 2);
      else
        std::memcpy(to.data() + 4 * i, &value, 4);
      numbers.push_back(kept);
    }
  }

  void set_steps() {
    int64_t places[kLanes];
    std::fill(places, places + kLanes, given_.prefix);
    for (int64_t i = 0; i < given_.rest; ++i) {
      cpu::Step step{given_.prefix + i, seen_[static_cast<size_t>(i)], 0, 0};
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        if (!(step.lanes >> lane & 1)) continue;
        const auto bit = static_cast<uint16_t>(1u << lane);
        if (places[lane] % 2) step.odd |= bit;
        if (++places[lane] % cpu::kChunk == 0) step.last |= bit;
      }
      if (step.lanes) steps_.push_back(step);
    }
  }

  std::vector<std::vector<float>> attend(const cpu::Kernels& kernels, cpu::AttendTask task) const {
    const int64_t channels = 3 * given_.per_row * given_.size;  // of three key-value heads, this being the second
    cpu::Input out;
    out.stride = cpu::rounded_up(channels, cpu::kDepth) * kLanes / (kernels.pairs ? 2 : 1);
    const Guarded<uint32_t> words(2 * out.stride);
    out.data = words.data();
    task.out = &out, task.tile = 1, task.channel = given_.per_row * given_.size;
    Begun begun(kernels);
    kernels.attend(task);
    std::vector<std::vector<float>> found(static_cast<size_t>(task.count));
    int64_t others = 0;
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t row = 0; row < kLanes; ++row) {
        float value = kernels.pairs ? 0.0f : out.floats(1)[c * kLanes + row];
        if (kernels.pairs) {
          const uint32_t pair = out.pairs(1)[c / 2 * kLanes + row];
          value = cpu::from_bf16(static_cast<uint16_t>(c % 2 ? pair >> 16 : pair));
        }
        const int64_t channel = c - task.channel, lane = row * given_.per_row + channel / given_.size - task.first;
        if (channel >= 0 && channel < task.channel && lane >= 0 && lane < task.count)
          found[static_cast<size_t>(lane)].push_back(value);
        else
          others += !std::isnan(value);
      }
    for (int64_t i = 0; i < out.stride; ++i) others += words[i] != ~0u;
    expect(others == 0, kernels, "attend writes its own lanes alone", others);
    return found;
  }

  const Case given_;
  Guarded<uint8_t> keys_, values_;
  Guarded<float> queries_;
  std::vector<uint16_t> seen_;  // by slot behind the prefix: the lanes that see it
  std::vector<cpu::Step> steps_;
  int32_t begins_[kLanes] = {};
};

// Results that become bfloat16 are off by a 256th, those of weights that do by as much of what they weigh.
double limit(const cpu::Kernels& kernels, const Case& given, double exact) {
  return 2e-5 + (kernels.pairs ? (std::fabs(exact) + (given.half ? 4.0 : 0.0)) / 256 : 0.0);
}

void test_case(const cpu::Kernels& kernels, const Case& given) {
  Attention attention(given);
  const auto out = attention.run(kernels);
  for (int64_t lane = 0; lane < given.count; ++lane) {
    const std::vector<double> exact = attention.exact(lane);
    for (size_t d = 0; d < exact.size(); ++d) {
      const double apart = std::fabs(static_cast<double>(out[static_cast<size_t>(lane)][d]) - exact[d]);
      expect(apart <= limit(kernels, given, exact[d]), kernels, "attend", given.size);
    }
  }
  if (given.rest == 0) return;
  const int64_t last = attention.slots() - 1;
  attention.poison(last);
  const auto beside = attention.run(kernels);
  for (int64_t lane = 0; lane < given.count; ++lane) {
    const auto& got = beside[static_cast<size_t>(lane)];
    if (attention.sees(lane, last))
      expect(all_nan(got), kernels, "attend to NaN", given.size);
    else
      expect(same_bits(got, out[static_cast<size_t>(lane)]), kernels, "attend beside NaN", given.size);
  }
}

void test_order_of(const cpu::Kernels& kernels, const Case& given) {
  const Attention attention(given);
  const auto out = attention.run(kernels);
  for (int64_t lane = 0; lane < given.count; ++lane) {
    const auto& got = out[static_cast<size_t>(lane)];
    expect(same_bits(got, attention.alone(kernels, lane)), kernels, "a query alone", given.size);
    if (std::string(kernels.numerics) == cpu::kInteger)
      expect(same_bits(got, attention.in_order(lane)), kernels, "a query's sums in order", given.size);
  }
}

}  // namespace

void test_attend() {
  for (const cpu::Kernels* kernels : every_table())
    for (const int64_t size : {2, 18, 32, 96})
      for (const bool half : {false, true})
        for (const int64_t prefix : {0, 1, 31, 65})
          for (const int64_t rest : {0, 1, 41}) {
            if (prefix + rest == 0) continue;
            const int64_t per_row = 1 + below(20), queries = per_row * kLanes, first = below(queries);
            for (const bool windows : {false, true})
              test_case(*kernels, {size, prefix, rest, half, per_row, first, std::min(1 + below(16), queries - first), windows});
          }
  // slots and queries pass in blocks of several sizes
  for (const cpu::Kernels* kernels : every_table())
    for (const int64_t size : {18, 64, 80, 96, 128, 256})
      for (const bool half : {false, true}) {
        const int64_t prefix = 32 * below(12) + below(3), rest = below(40), count = 1 + below(16), per_row = 1 + below(8);
        const int64_t first = below(per_row * kLanes - count + 1);
        if (prefix + rest > 0) test_order_of(*kernels, {size, prefix, rest, half, per_row, first, count, below(2) == 1});
      }
}

}  // namespace cpu_test