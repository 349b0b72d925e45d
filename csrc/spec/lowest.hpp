// The score of what is no candidate. In a file of its own, which NVRTC reads too: it has no standard headers.
#pragma once

#include <cmath>

namespace spec {

constexpr float kLowest = -INFINITY;

}  // namespace spec
