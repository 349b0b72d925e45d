// The op of a best-first search.
#include "ops/ops.hpp"
#include "spec/best_first.hpp"

namespace ops {
namespace {

spec::QueueArrays take_queues(handle object) {
  const Parts parts(object, "queues", 7);
  const auto accepted = take<float>(parts[0], "accepted", {at_least(1)});
  const int64_t budget = accepted.size(0);
  return {accepted.at(),
          take<float>(parts[1], "scores", {budget}).at(),
          take<float>(parts[2], "log_probs", {budget}).at(),
          take<int64_t>(parts[3], "parents", {budget}).at(),
          take<int64_t>(parts[4], "depths", {budget}).at(),
          take<int64_t>(parts[5], "tokens", {budget}).at(),
          &take_one<float>(parts[6], "bound"),
          budget};
}

spec::Search take_search(const py::tuple& object) {
  require(object.size() == 4, "search", static_cast<int64_t>(object.size()), "4 parts");
  const spec::Search search{py::cast<int64_t>(object[0]), py::cast<int64_t>(object[1]), py::cast<double>(object[2]),
                            py::cast<bool>(object[3])};
  require(search.batch >= 1, "batch", search.batch, "1 or more");
  require(search.max_depth >= 1, "max_depth", search.max_depth, "1 or more");
  return search;
}

// found: rows, columns, log_probs, scores, live.
py::tuple step_queues(handle queues, handle found, handle frontier, handle depths, handle token_ids, handle passes,
                      const py::tuple& search) {
  const spec::QueueArrays arrays = take_queues(queues);
  const spec::Search wanted = take_search(search);
  const Parts parts(found, "found", 5);
  const auto scores = take_input<float>(parts[3], "scores", {kAny});
  const int64_t room = scores.size(0), count = take_count(parts[4], "live", room);
  const auto row = take_input<int64_t>(parts[0], "rows", {room}), column = take_input<int64_t>(parts[1], "columns", {room});
  const auto edges = take_input<float>(parts[2], "log_probs", {room});
  const Frontier nodes = take_nodes(frontier, "frontier", kAny);
  const auto levels = take_input<int64_t>(depths, "depths", {kAny});
  const auto ids = take_input_or_none<int64_t>(token_ids, "token_ids", {kAny});
  const Parts alive(frontier, "frontier", 2);
  const bool going = take_one<int32_t>(alive[1], "live") > 0, begins = take_one<int32_t>(passes, "passes") == 1;
  if (going) {
    require_below(row.at(), count, nodes.ids.size(0), "rows");
    for (int64_t i = 0; i < count; ++i) require_below(&nodes.ids[row[i]], 1, levels.size(0), "frontier");
    if (ids) require_below(column.at(), count, ids.size(0), "columns");
  }
  const spec::FoundArrays given{row.at(), column.at(),    edges.at(),  scores.at(),
                                count,    nodes.ids.at(), levels.at(), ids.at()};
  const int64_t budget = arrays.budget;
  const auto parents = make<int64_t>({budget}), tokens = make<int64_t>({budget});
  const auto log_probs = make<float>({budget});
  const auto expand = make<int64_t>({std::min(wanted.batch, budget)});
  const auto live = make<int32_t>({1}), expanded = make<int32_t>({1});
  const spec::DrawnArrays drawn{parents.at(), tokens.at(), log_probs.at(), live.at(), expand.at(), expanded.at()};
  if (!spec::step_queues(arrays, given, going, begins, wanted, drawn)) refuse(kHasNaN);
  return py::make_tuple(parents.object, tokens.object, log_probs.object, live.object,
                        py::make_tuple(expand.object, expanded.object));
}

const Ops kQueue([](py::module_& module) { module.def("step_queues", step_queues); });

}  // namespace
}  // namespace ops
