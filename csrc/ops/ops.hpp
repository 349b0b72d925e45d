// Shared by the files of this folder. Each file binds ops under their names in specengine/ops, with the same arguments in
// the same order, and allocates the outputs. Tensors are checked for the assumptions of csrc/spec, and so is every index
// that becomes an address. Named tuples of specengine/ops (Nodes, Candidates) are passed as tuples.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "border.hpp"
#include "spec/tree.hpp"

namespace ops {

namespace py = pybind11;
using border::Array;
using border::at_least;
using border::kAny;
using border::Made;
using border::make;
using border::make_count;
using border::number_or;
using border::one_or;
using border::Parts;
using border::require;
using border::require_below;
using border::Rows;
using border::take;
using border::take_count;
using border::take_flat;
using border::take_flat_input;
using border::take_input;
using border::take_input_or_none;
using border::take_one;
using border::take_rows_input;
using py::handle;

// `Ops tree([](py::module_& module) { module.def("walk", ...); });` at the end of a file puts its ops into the extension.
class Ops {
 public:
  using Define = void (*)(py::module_& module);

  explicit Ops(Define define) { all().push_back(define); }
  static std::vector<Define>& all() {
    static std::vector<Define> known;
    return known;
  }
};

py::tuple mix_rows(handle logits, int64_t more, const std::vector<double>& left, const std::vector<int64_t>& places,
                   const std::vector<double>& probabilities, bool normalized);  // of rows.cpp

[[noreturn]] inline void refuse(const std::string& message) { throw std::invalid_argument(message); }

constexpr int64_t kLargestWidth = 1 << 24;  // of results whose size a number says

inline void require_width(int64_t width, int64_t least, const char* name) {
  require(width >= least && width <= kLargestWidth, name, width, std::to_string(least) + " to " + std::to_string(kLargestWidth));
}

constexpr float kFaint = -20.0f;  // below a row's best logit: further columns that the row has no use for

inline const char* const kHasNaN = "scores: contains NaN";

// The limit, from 0 to `most`; `most` if it is None.
inline int64_t wanted_of(handle limit, int64_t most) {
  return std::clamp<int64_t>(one_or<int32_t>(limit, "limit", INT32_MAX), 0, most);
}

// Ids and how many of them count; behind these stands 0.
inline py::tuple nodes_of(const Made<int64_t>& ids, int64_t live) {
  std::fill(ids.at() + live, ids.at() + ids.size(0), int64_t{0});
  return py::make_tuple(ids.object, make_count(live));
}

// Some nodes: ids [width], of which `live` count.
struct Frontier {
  border::Input<int64_t> ids;
  int64_t live;
};

inline Frontier take_nodes(handle object, const char* name, int64_t width) {
  const Parts parts(object, name, 2);
  auto ids = take_input<int64_t>(parts[0], name, {width});
  const int64_t live = take_count(parts[1], "live", ids.size(0));
  return {std::move(ids), live};
}

// A tree's arrays, and how many nodes it has room for and holds.
struct Tree {
  spec::TreeArrays arrays;
  int64_t capacity;
  int32_t* size;
};

inline Tree take_tree(handle parts, handle size) {
  const Parts given(parts, "tree", 6);
  const Array<int64_t> tokens = take<int64_t>(given[0], "tokens", {kAny});
  const int64_t capacity = tokens.size(0);
  const auto parents = take<int64_t>(given[1], "parents", {capacity}), depths = take<int64_t>(given[2], "depths", {capacity});
  const auto edges = take<float>(given[3], "log_probs", {capacity}), paths = take<float>(given[4], "path_log_probs", {capacity});
  const auto ancestors = take<uint64_t>(given[5], "ancestors", {capacity, at_least(spec::words_for(capacity))});
  int32_t& nodes = take_one<int32_t>(size, "size");
  require(nodes >= 0 && nodes <= capacity, "size", nodes, "0 to " + std::to_string(capacity));
  return {{tokens.at(), parents.at(), depths.at(), edges.at(), paths.at(), ancestors.at(), ancestors.size(1)},
          capacity, &nodes};
}

// Appends `given` nodes where there is room, else raises the flag `overflow`; returns how many.
inline int64_t append(const Tree& tree, int64_t given, const int64_t* parents, const int64_t* tokens,
                      const float* log_probs, int32_t& overflow) {
  const int64_t before = *tree.size;
  const bool fits = before + given <= tree.capacity;
  if (!fits) overflow = 1;
  const int64_t added = fits ? given : 0;
  if (!spec::append_nodes(tree.arrays, before, added, parents, tokens, log_probs))
    refuse("parents: must be among the nodes that are there");
  *tree.size = static_cast<int32_t>(before + added);
  return added;
}

// The ids of nodes that were appended; 0 behind them.
inline py::object appended(int64_t first, int64_t added, int64_t room) {
  const auto ids = make<int64_t>({room});
  for (int64_t i = 0; i < room; ++i) ids[i] = i < added ? first + i : 0;
  return ids.object;
}

// Runs `run` with the rows as floats or as bfloat16.
template <typename Run>
auto by_dtype(const Rows& rows, const Run& run) {
  return rows.half() ? run(rows.halves()) : run(rows.floats());
}

}  // namespace ops
