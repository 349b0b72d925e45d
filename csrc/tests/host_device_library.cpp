// spec/device_abi.hpp on the host, as far as it is more than launches of CUDA: for tests of who calls it.
#include "spec/device_abi.hpp"

#include "tests/lanes.hpp"

int spec_abi_version() { return SPEC_ABI_VERSION; }
const char* spec_error(int) { return "none of the host's"; }
int spec_driver_version(int* version) { return *version = 0; }

int spec_queues_step(float* accepted, float* scores, float* log_probs, int64_t* parents, int64_t* depths,
                     int64_t* tokens, float* bound, int budget, const int64_t* rows, const int64_t* columns,
                     const float* found_log_probs, const float* found_scores, const int32_t* found_live, int most,
                     const int64_t* nodes, const int32_t* frontier_live, const int64_t* depths_of_nodes,
                     const int64_t* token_ids, const int32_t* passes, int64_t batch, int64_t max_depth,
                     double threshold, int fill, int64_t* drawn_parents, int64_t* drawn_tokens, float* drawn_log_probs,
                     int32_t* drawn_live, int64_t* expand, int32_t* expand_live, void*) {
  if (budget < 1 || budget > spec::kCapacity) return 1;
  const int64_t count = std::min(*found_live, most);
  step_on_host_lanes({{accepted, scores, log_probs, parents, depths, tokens, bound, budget},
                      {rows, columns, found_log_probs, found_scores, count, nodes, depths_of_nodes, token_ids},
                      {batch, max_depth, threshold, fill != 0},
                      {drawn_parents, drawn_tokens, drawn_log_probs, drawn_live, expand, expand_live}},
                     *frontier_live > 0, *passes == 1);
  return 0;
}

template <typename Args>
int run(const void* args) {
  run_on_host_lanes(*static_cast<const Args*>(args));
  return 0;
}

int spec_worth_level(const void* args, void*) { return run<spec::LevelArgs>(args); }
int spec_worth_keep(const void* args, void*) { return run<spec::KeepArgs>(args); }
int spec_worth_extract(const void* args, void*) { return run<spec::ExtractArgs>(args); }
int spec_worth_outcome(const void* args, void*) { return run<spec::OutcomeArgs>(args); }

// ---- of the driver, what specengine/ops/_nvrtc.py calls to launch

namespace {

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
SPEC_EXPORT int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned lanes, unsigned, unsigned,
                               unsigned shared, void*, void** parameters, void**) {
  switch (reinterpret_cast<uintptr_t>(function)) {
    case 1: return launch<spec::LevelArgs>(parameters, lanes, shared);
    case 2: return launch<spec::KeepArgs>(parameters, lanes, shared);
    case 3: return launch<spec::OutcomeArgs>(parameters, lanes, shared);
    case 4: return launch<spec::ExtractArgs>(parameters, lanes, shared);
    default: return launch_step(parameters, lanes);
  }
}
