// Blocks of spec/device_*.hpp on the host: between two barriers each lane in random order, so that a race shows as a
// result that depends on it. A block's memory begins as garbage.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "spec/device_best_first.hpp"
#include "spec/device_worth.hpp"
#include "tests/check.hpp"

struct HostLanes {
  std::vector<spec::StepLane> own = std::vector<spec::StepLane>(spec::kCapacity);
  std::vector<int> order = std::vector<int>(spec::kCapacity);

  template <typename Work>
  void operator()(Work work) {
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), generator);
    for (const int lane : order) work(lane, own[static_cast<size_t>(lane)]);
  }
};

inline void step_on_host_lanes(const spec::Step& step, bool going, bool begins) {
  const auto shared = std::make_unique<spec::StepShared>();
  HostLanes lanes;
  spec::step_on_lanes(step, going, begins, *shared, lanes);
}

struct RuleLanes {
  std::vector<int> order = std::vector<int>(spec::kRuleLanes);

  template <typename Work>
  void operator()(Work work) {
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), generator);
    for (const int lane : order) work(lane);
  }
};

inline std::vector<double> garbage(int64_t bytes) { return std::vector<double>(static_cast<size_t>(bytes / 8), 1e300); }

inline void run_on_host_lanes(const spec::LevelArgs& args) {
  auto memory = garbage(bytes_of(args));
  RuleLanes lanes;
  level_on_lanes(args, reinterpret_cast<char*>(memory.data()), lanes);
}

inline void run_on_host_lanes(const spec::KeepArgs& args) {
  auto memory = garbage(bytes_of(args));
  RuleLanes lanes;
  keep_on_lanes(args, reinterpret_cast<char*>(memory.data()), lanes);
}

inline void run_on_host_lanes(const spec::ExtractArgs& args) {
  auto memory = garbage(bytes_of(args));
  RuleLanes lanes;
  extract_on_lanes(args, reinterpret_cast<char*>(memory.data()), lanes);
}

inline void run_on_host_lanes(const spec::OutcomeArgs& args) {
  auto memory = garbage(bytes_of(args));
  RuleLanes lanes;
  outcome_on_lanes(args, reinterpret_cast<char*>(memory.data()), lanes);
}
