// Ops on the rows of a draft's passes.
#include "ops/ops.hpp"

namespace ops {
namespace {

// One or more factors by depth, or none.
border::Input<float> take_factors(handle factors) {
  return take_input_or_none<float>(factors, "factors", {at_least(1)});
}

py::tuple root_rows(handle root, handle held, handle taken, handle filled, handle causal, int64_t width, handle factors) {
  const auto first = take_input<int64_t>(root, "root", {at_least(1)});
  const auto waiting = take_input<int64_t>(held, "held", {at_least(1)});
  const int64_t places = waiting.size(0) - 1, count = take_one<int32_t>(taken, "taken");
  const auto words = take_input<int64_t>(causal, "causal", {kAny, kAny});
  require(width >= 1 && width <= std::min(places, words.size(0)), "width", width, "1 to the rows that may wait");
  const int64_t last = std::max<int64_t>(count - 1, 0);
  require(last < width, "taken", count, "at most the width");
  const int64_t prefix = take_one<int32_t>(filled, "filled");
  const auto scale = take_factors(factors);
  const auto tokens = make<int64_t>({width}), positions = make<int64_t>({width}), sources = make<int64_t>({width});
  const auto seen = make<int64_t>({width, words.size(1)});
  for (int64_t i = 0; i < width; ++i) {
    tokens[i] = i == last ? first[0] : waiting[1 + i];
    positions[i] = prefix + i;
    sources[i] = i;
  }
  std::copy_n(words.at(), seen.count(), seen.at());
  const auto slot = make<int64_t>({1}), target = make<int64_t>({1}), one = make<int64_t>({1});
  slot[0] = prefix;
  target[0] = 0;
  one[0] = last;
  py::object by = py::none();
  if (scale) {
    const auto factor = make<float>({1, 1});
    factor[0] = scale[0];
    by = factor.object;
  }
  return py::make_tuple(tokens.object, positions.object, seen.object, slot.object, sources.object, target.object, one.object,
                        by);
}

py::tuple level_rows(handle tree, handle size, handle frontier, handle filled, handle used, handle seen, handle factors) {
  const Tree grown = take_tree(tree, size);
  const spec::TreeArrays& arrays = grown.arrays;
  const Frontier nodes = take_nodes(frontier, "frontier", kAny);
  const int64_t rows = nodes.ids.size(0), there = *grown.size;
  const auto known = take<uint64_t>(seen, "seen", {at_least(2), at_least(1)});
  const int64_t spare = known.size(0) - 1, wide = known.size(1);
  require(wide >= spec::words_for(spare), "seen", wide, "a bit for each node");
  require(there >= 1, "size", there, "1 or more");
  require_below(nodes.ids.at(), nodes.live, std::min(there, spare), "frontier");
  const int64_t prefix = take_one<int32_t>(filled, "filled");
  int32_t& taken = take_one<int32_t>(used, "used");
  require(taken >= 0, "used", taken, "0 or more");
  const auto scale = take_factors(factors);
  const auto tokens = make<int64_t>({rows}), positions = make<int64_t>({rows}), sources = make<int64_t>({rows});
  const auto words = make<uint64_t>({rows, wide});
  const auto by = scale ? make<float>({rows, 1}) : border::Made<float>{};
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t node = i < nodes.live ? nodes.ids[i] : 0, parent = std::max<int64_t>(arrays.parents[node], 0);
    require(parent < there && parent < spare, "parents", parent, "among the nodes that are there");
    const int64_t place = std::min(taken + i, spare - 1), depth = arrays.depths[node];
    tokens[i] = arrays.tokens[node];
    positions[i] = depth + prefix - 1;
    sources[i] = parent;
    uint64_t* row = words.at() + i * wide;
    std::copy_n(known.at() + parent * wide, wide, row);
    row[place / spec::kWordBits] |= uint64_t{1} << (place % spec::kWordBits);
    if (scale) by[i] = scale[std::clamp<int64_t>(depth, 0, scale.size(0) - 1)];
  }
  for (int64_t i = 0; i < rows; ++i)
    std::copy_n(words.at() + i * wide, wide, known.at() + (i < nodes.live ? nodes.ids[i] : spare) * wide);
  const auto slot = make<int64_t>({1});
  slot[0] = prefix + taken;
  taken += static_cast<int32_t>(nodes.live);
  py::object targets = py::reinterpret_borrow<py::object>(Parts(frontier, "frontier", 2)[0]);
  if (nodes.live < rows) {
    const auto into = make<int64_t>({rows});
    for (int64_t i = 0; i < rows; ++i) into[i] = i < nodes.live ? nodes.ids[i] : spare;
    targets = into.object;
  }
  return py::make_tuple(tokens.object, positions.object, words.object, slot.object, sources.object, targets, py::none(),
                        scale ? by.object : py::none());
}

const Ops kPasses([](py::module_& module) {
  module.def("root_rows", root_rows);
  module.def("level_rows", level_rows);
});

}  // namespace
}  // namespace ops
