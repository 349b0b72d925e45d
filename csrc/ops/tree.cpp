// Ops on a tree's arrays, and the way down a tree.
#include "ops/ops.hpp"
#include "spec/compaction.hpp"

namespace ops {
namespace {

py::object ancestor_words(handle parents) {
  const auto above = take_input<int64_t>(parents, "parents", {kAny});
  const int64_t nodes = above.size(0), words = spec::words_for(nodes);
  const auto out = make<int64_t>({nodes, words});
  if (!spec::ancestor_words(above.at(), nodes, words, static_cast<uint64_t*>(out.data)))
    refuse("parents: the root's must be -1, every other's an earlier node");
  return out.object;
}

py::object append_nodes(handle tree, handle size, handle parents, handle tokens, handle log_probs, handle count,
                        handle overflow) {
  const Tree grown = take_tree(tree, size);
  const auto above = take_input<int64_t>(parents, "parents", {kAny});
  const int64_t room = above.size(0), first = *grown.size;
  const auto carried = take_input<int64_t>(tokens, "tokens", {room});
  const auto edges = take_input<float>(log_probs, "log_probs", {room});
  const int64_t given = take_count(count, "count", room);
  int32_t& over = take_one<int32_t>(overflow, "overflow");
  return appended(first, append(grown, given, above.at(), carried.at(), edges.at(), over), room);
}

// counters: size, passes, overflow.
py::tuple append_children(handle tree, handle counters, handle frontier, handle tokens, handle log_probs, handle chosen,
                          handle most, handle limit) {
  const Parts numbers(counters, "counters", 3);
  take_one<int32_t>(numbers[1], "passes");
  const Tree grown = take_tree(tree, numbers[0]);
  const auto drawn = take_input<int64_t>(tokens, "tokens", {kAny, kAny});
  const int64_t rows = drawn.size(0), children = drawn.size(1), first = *grown.size;
  const Frontier nodes = take_nodes(frontier, "frontier", rows);
  const auto edges = take_input<float>(log_probs, "log_probs", {rows, children});
  const auto taken = take_input_or_none<bool>(chosen, "chosen", {rows, children});
  const int64_t room = std::clamp<int64_t>(number_or<int64_t>(most, "most", INT64_MAX), 0, rows * children);
  const int64_t wanted = wanted_of(limit, room);
  int32_t& over = take_one<int32_t>(numbers[2], "overflow");
  const auto given = spec::chosen_children(nodes.ids.at(), nodes.live, children, drawn.at(), edges.at(),
                                           static_cast<const uint8_t*>(taken.data), wanted);
  const auto entries = static_cast<int64_t>(given.parents.size());
  const int64_t added = append(grown, entries, given.parents.data(), given.tokens.data(), given.log_probs.data(), over);
  return py::make_tuple(appended(first, added, room), make_count(entries));
}

// Ancestor words of which only the meaning makes the new ones.
void require_words(handle ancestors) {
  border::Tensor old;
  if (!border::read(ancestors, old) || !(old.dtype == border::DtypeOf<int64_t>::dtype) || old.rank != 2)
    border::refuse_array<int64_t>(ancestors, "ancestors", "[any, any]");
}

py::tuple subtree(handle parents, handle ancestors, handle nodes, handle live) {
  const auto above = take_input<int64_t>(parents, "parents", {kAny}), kept = take_input<int64_t>(nodes, "nodes", {kAny});
  require_words(ancestors);
  const int64_t room = kept.size(0), count = take_count(live, "live", room);
  const auto renumbered = make<int64_t>({room}), words = make<int64_t>({room, spec::words_for(room)});
  if (!spec::subtree(above.at(), above.size(0), kept.at(), count, room, renumbered.at(), static_cast<uint64_t*>(words.data)))
    refuse("nodes: must be ascending, start with the root and contain every node's parent");
  return py::make_tuple(renumbered.object, words.object);
}

// The arrays of some nodes alone; -1 as parent and 0 elsewhere behind them.
py::tuple extract(handle tree, handle nodes, handle live) {
  const Parts given(tree, "tree", 6);
  const auto kept = take_input<int64_t>(nodes, "nodes", {kAny});
  const int64_t room = kept.size(0), count = take_count(live, "live", room);
  const auto above = take_input<int64_t>(given[1], "parents", {kAny});
  const int64_t size = above.size(0);
  require_words(given[5]);
  const auto renumbered = make<int64_t>({room}), words = make<int64_t>({room, spec::words_for(room)});
  if (!spec::subtree(above.at(), size, kept.at(), count, room, renumbered.at(), static_cast<uint64_t*>(words.data)))
    refuse("nodes: must be ascending, start with the root and contain every node's parent");
  const auto whole = [&](py::ssize_t part, const char* name) {
    const auto from = take_input<int64_t>(given[part], name, {size});
    const auto out = make<int64_t>({room});
    for (int64_t i = 0; i < room; ++i) out[i] = i < count ? from[kept[i]] : 0;
    return out.object;
  };
  const auto real = [&](py::ssize_t part, const char* name) {
    const auto from = take_input<float>(given[part], name, {size});
    const auto out = make<float>({room});
    for (int64_t i = 0; i < room; ++i) out[i] = i < count ? from[kept[i]] : 0.0f;
    return out.object;
  };
  return py::make_tuple(whole(0, "tokens"), renumbered.object, whole(2, "depths"), real(3, "log_probs"),
                        real(4, "path_log_probs"), words.object);
}

py::object tree_mask(handle ancestors, int64_t columns) {
  const auto words = take_input<uint64_t>(ancestors, "ancestors", {kAny, kAny});
  const int64_t bits = words.size(1) * spec::kWordBits;
  require(columns >= 0 && columns <= bits, "columns", columns, "0 to " + std::to_string(bits));
  const auto mask = make<bool>({words.size(0), columns});
  spec::tree_mask(words.at(), words.size(0), words.size(1), columns, static_cast<uint8_t*>(mask.data));
  return mask.object;
}

py::tuple select_best(handle scores, handle live, int64_t most, handle limit) {
  const auto given = take_input<float>(scores, "scores", {kAny});
  require_width(most, 0, "most");
  const int64_t count = take_count(live, "live", given.size(0)), wanted = wanted_of(limit, most);
  const auto ids = make<int64_t>({most});
  const int64_t kept = spec::select_best(given.at(), count, wanted, ids.at());
  if (kept < 0) refuse(kHasNaN);
  return nodes_of(ids, kept);
}

py::tuple walk(handle tokens, handle parents, handle chosen, handle size) {
  const auto carried = take_input<int64_t>(tokens, "tokens", {kAny});
  const int64_t room = carried.size(0);
  const auto above = take_input<int64_t>(parents, "parents", {room}), choices = take_input<int64_t>(chosen, "chosen", {room});
  const int64_t nodes = take_count(size, "size", room);
  const auto path = make<int64_t>({room}), bonus = make<int64_t>({1});
  const int64_t found = spec::walk(carried.at(), above.at(), choices.at(), nodes, path.at());
  bonus[0] = found ? choices[path[found - 1]] : -1;
  const py::tuple walked = nodes_of(path, found);
  return py::make_tuple(walked[0], walked[1], bonus.object);
}

void compact_kv(handle slab, handle path, handle count, handle prefix) {
  border::Tensor rows;
  if (!border::read(slab, rows) || rows.rank != 5 || !rows.is_contiguous() || rows.dtype.bits % 8 != 0)
    border::refuse("slab", border::described(slab), "[layers, 2, heads, capacity, size], contiguous, on the CPU");
  const auto nodes = take_input<int64_t>(path, "path", {kAny});
  const int64_t start = take_one<int32_t>(prefix, "prefix"), moved = take_count(count, "count", nodes.size(0));
  if (!spec::compact_rows(static_cast<char*>(rows.data), rows.size(0) * rows.size(1) * rows.size(2), rows.size(3),
                          rows.size(4) * (rows.dtype.bits / 8), start, nodes.at(), moved))
    refuse("path: ascending node ids from 0 within the slots of the slab are needed");
}

const Ops kTree([](py::module_& module) {
  module.def("ancestor_words", ancestor_words);
  module.def("append_nodes", append_nodes);
  module.def("append_children", append_children);
  module.def("subtree", subtree);
  module.def("extract", extract);
  module.def("tree_mask", tree_mask);
  module.def("select_best", select_best);
  module.def("walk", walk);
  module.def("compact_kv", compact_kv);
});

}  // namespace
}  // namespace ops
