// specengine._ops: the ops of csrc/ops, each under its name in specengine/ops.
#include "ops/ops.hpp"

PYBIND11_MODULE(_ops, module) {
  border::start();
  module.attr("INTERFACE") = 22;  // specengine/ops/_registry.py asks for it: an extension may be left from other sources
  for (const ops::Ops::Define define : ops::Ops::all()) define(module);
}
