// The part of CUDA's driver that specengine/ops/cuda.py calls to launch, on the host: for tests of who calls it.
#include <cstdint>

#include "tests/lanes.hpp"

namespace {

template <typename Args>
int run(const void* args) {
  run_on_host_lanes(*static_cast<const Args*>(args));
  return 0;
}

template <typename Args>
int launch(void** parameters, unsigned lanes, unsigned shared) {
  const Args& args = *static_cast<const Args*>(parameters[0]);
  if (lanes != spec::kRuleLanes || static_cast<int64_t>(shared) != bytes_of(args)) return 1;
  return run<Args>(&args);
}

int launch_step(void** parameters, unsigned lanes) {
  if (lanes != spec::kCapacity) return 1;
  const auto number = [&](int i) { return **static_cast<const int32_t**>(parameters[i]); };
  auto step = *static_cast<const spec::Step*>(parameters[0]);
  step.found.count = std::min<int64_t>(step.found.count, number(1));
  step_on_host_lanes(step, number(2) > 0, number(3) == 1);
  return 0;
}

}  // namespace

// A function is the place of its kernel in tests/cuda/host.py.
extern "C" __attribute__((visibility("default"))) int cuLaunchKernel(
    void* function, unsigned, unsigned, unsigned, unsigned lanes, unsigned, unsigned, unsigned shared, void*,
    void** parameters, void**) {
  switch (reinterpret_cast<uintptr_t>(function)) {
    case 1: return launch<spec::LevelArgs>(parameters, lanes, shared);
    case 2: return launch<spec::KeepArgs>(parameters, lanes, shared);
    case 3: return launch<spec::OutcomeArgs>(parameters, lanes, shared);
    case 4: return launch<spec::ExtractArgs>(parameters, lanes, shared);
    default: return launch_step(parameters, lanes);
  }
}
