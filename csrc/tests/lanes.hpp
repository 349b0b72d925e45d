// A block of spec::step_on_lanes on the host: between two barriers each lane in random order, so that a race shows as a
// result that depends on it.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "spec/device_best_first.hpp"
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
