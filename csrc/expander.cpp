// specengine._expander: the functions of csrc/spec over tensors. specengine/ops/cpp.py calls them with outputs that it has
// made; every tensor is checked here for what csrc/spec relies on, and every index that becomes an address.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "border.hpp"
#include "copies_binding.hpp"
#include "spec/best_first.hpp"
#include "spec/candidates.hpp"
#include "spec/classifier.hpp"
#include "spec/compaction.hpp"
#include "spec/coupling.hpp"
#include "spec/decisions.hpp"
#include "spec/entropy.hpp"
#include "spec/gumbel.hpp"
#include "spec/mixing.hpp"
#include "spec/strict_attention.hpp"
#include "spec/top_children.hpp"
#include "spec/tree.hpp"
#include "spec/worth.hpp"

namespace py = pybind11;
using border::Array;
using border::at_least;
using border::kAny;
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
using border::take_or_none;
using border::take_rows;
using border::one_or;
using py::handle;

namespace {

constexpr int64_t kMostRounds = 1024, kMostPlaces = int64_t{1} << 31;
constexpr int64_t kMostTokens = 1 << 24;  // as of a config

// How many are wanted, of `most` at most; limit may be None.
int64_t wanted_of(handle limit, int64_t most) {
  return std::clamp<int64_t>(one_or<int32_t>(limit, "limit", INT32_MAX), 0, most);
}

const uint8_t* flags(const Array<bool>& given) { return reinterpret_cast<const uint8_t*>(given.data); }

// Behind what was found stands 0.
void write(const std::vector<spec::Candidate>& found, size_t most, int64_t* rows, int64_t* columns, float* log_probs,
           float* scores) {
  for (size_t i = 0; i < most; ++i) {
    const spec::Candidate candidate = i < found.size() ? found[i] : spec::Candidate{0.0f, 0.0f, 0.0f, 0, 0};
    rows[i] = candidate.row;
    columns[i] = candidate.column;
    log_probs[i] = candidate.log_prob;
    scores[i] = candidate.score;
  }
}

// A tree's arrays, and how many nodes it has room for and holds.
struct Tree {
  spec::TreeArrays arrays;
  int64_t capacity;
  int32_t* size;
};

Tree take_tree(handle parts, handle size) {
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

// What became of drafted tokens, and how many cells the tables have.
struct Outcomes {
  spec::OutcomeCounts counts;
  int64_t cells;
};

Outcomes take_outcomes(handle object) {
  const Parts parts(object, "counts", 7);
  const auto hits = take<float>(parts[0], "hits", {kAny, spec::kKnots});
  const int64_t cells = hits.size(0), group = take_one<int64_t>(parts[6], "group");
  const auto tries = take<float>(parts[1], "tries", {cells, spec::kKnots});
  const auto table = take<float>(parts[2], "table", {cells, spec::kKnots});
  const auto gains = take<float>(parts[3], "gains", {spec::kLevels, spec::kPlaces});
  const auto passes = take<float>(parts[4], "passes", {spec::kLevels});
  const auto profile = take<float>(parts[5], "profile", {spec::kLevels, spec::kPlaces});
  const int64_t groups = cells / (spec::kSources * spec::kDepths * spec::kRanks);
  require(group >= 0 && group < groups, "group", group, "0 to " + std::to_string(groups - 1));
  return {{hits.at(), tries.at(), table.at(), gains.at(), passes.at(), profile.at(), group}, cells};
}

spec::SearchNotes take_notes(handle object, int64_t capacity) {
  const Parts parts(object, "notes", 5);
  const int64_t nodes = at_least(capacity);
  return {take<float>(parts[0], "stated", {nodes}).at(), take<int64_t>(parts[1], "cells", {nodes}).at(),
          take<int64_t>(parts[2], "places", {nodes}).at(), take<bool>(parts[3], "waiting", {nodes}).at(),
          take<bool>(parts[4], "drafted", {nodes}).at()};
}

// Hangs `given` nodes where they fit, else says that they do not; ids: [room], 0 behind those of the nodes.
bool append(const Tree& tree, int64_t given, int64_t room, const int64_t* parents, const int64_t* tokens,
            const float* log_probs, int32_t* overflow, int64_t* ids) {
  const int64_t before = *tree.size;
  const bool fits = before + given <= tree.capacity;
  const int64_t added = fits ? given : 0;
  if (!fits) *overflow = 1;
  if (!spec::append_nodes(tree.arrays, before, added, parents, tokens, log_probs)) return false;
  for (int64_t i = 0; i < room; ++i) ids[i] = i < added ? before + i : 0;
  *tree.size = static_cast<int32_t>(before + added);
  return true;
}

// parameters: hidden weight and bias, output weight and bias.
spec::Network take_network(handle object) {
  const Parts parameters(object, "net", 4);
  const auto weight = take<float>(parameters[0], "hidden weight", {kAny, kAny});
  const int64_t hidden = weight.size(0), inputs = weight.size(1);
  return {weight.at(), take<float>(parameters[1], "hidden bias", {hidden}).at(),
          take_flat<float>(parameters[2], "output weight", hidden).at(), take_one<float>(parameters[3], "output bias"),
          inputs, hidden};
}

// Runs `run` with the rows as floats or as bfloat16.
template <typename Run>
auto by_dtype(const Rows& rows, const Run& run) {
  return rows.half() ? run(rows.halves()) : run(rows.floats());
}

}  // namespace

PYBIND11_MODULE(_expander, module) {
  border::start();
  module.attr("INTERFACE") = 12;  // specengine/ops/cpp.py asks for it: an extension may be left from other sources
  module.def("ancestor_words", [](handle parents, handle out) {
    const auto above = take_input<int64_t>(parents, "parents", {kAny});
    const int64_t nodes = above.size(0);
    const auto words = take<uint64_t>(out, "out", {nodes, at_least(spec::words_for(nodes))});
    return spec::ancestor_words(above.at(), nodes, words.size(1), words.at());
  });
  module.def("append_nodes", [](handle tree, handle size, handle live, handle parents, handle tokens, handle log_probs,
                                handle overflow, handle ids) {
    const Tree grown = take_tree(tree, size);
    const auto above = take_input<int64_t>(parents, "parents", {kAny});
    const int64_t room = above.size(0);
    return append(grown, take_count(live, "count", room), room, above.at(), take_input<int64_t>(tokens, "tokens", {room}).at(),
                  take_input<float>(log_probs, "log_probs", {room}).at(), &take_one<int32_t>(overflow, "overflow"),
                  take<int64_t>(ids, "ids", {room}).at());
  });
  module.def("append_children", [](handle tree, handle size, handle nodes, handle live, handle tokens, handle log_probs,
                                   handle chosen, handle limit, handle overflow, handle ids, handle found) {
    const Tree grown = take_tree(tree, size);
    const auto drawn = take_input<int64_t>(tokens, "tokens", {kAny, kAny});
    const int64_t rows = drawn.size(0), children = drawn.size(1);
    const auto frontier = take_input<int64_t>(nodes, "nodes", {at_least(rows)});
    const auto out = take<int64_t>(ids, "ids", {kAny});
    const int64_t most = out.size(0);
    const auto edges = take_input<float>(log_probs, "log_probs", {rows, children});
    const auto taken = take_input_or_none<bool>(chosen, "chosen", {rows, children});
    int32_t &over = take_one<int32_t>(overflow, "overflow"), &count = take_one<int32_t>(found, "found");
    const auto given = spec::chosen_children(frontier.at(), take_count(live, "live", rows), children, drawn.at(),
                                             edges.at(), flags(taken), wanted_of(limit, most));
    const auto entries = static_cast<int64_t>(given.parents.size());
    count = static_cast<int32_t>(entries);
    return append(grown, entries, most, given.parents.data(), given.tokens.data(), given.log_probs.data(), &over, out.at());
  });
  module.def("subtree", [](handle parents, handle nodes, handle live, handle new_parents, handle ancestors) {
    const auto above = take_input<int64_t>(parents, "parents", {kAny}), kept = take_input<int64_t>(nodes, "nodes", {kAny});
    const int64_t room = kept.size(0);
    return spec::subtree(above.at(), above.size(0), kept.at(), take_count(live, "live", room), room,
                         take<int64_t>(new_parents, "new_parents", {room}).at(),
                         take<uint64_t>(ancestors, "ancestors", {room, spec::words_for(room)}).at());
  });
  module.def("tree_mask", [](handle ancestors, handle out) {
    const auto words = take_input<uint64_t>(ancestors, "ancestors", {kAny, kAny});
    const auto mask = take<bool>(out, "out", {words.size(0), kAny});
    const int64_t columns = mask.size(1);
    require(columns <= words.size(1) * spec::kWordBits, "columns", columns, "as many as there are bits");
    spec::tree_mask(words.at(), words.size(0), words.size(1), columns, static_cast<uint8_t*>(mask.data));
  });
  module.def("select_best", [](handle scores, handle live, handle limit, handle out, handle found) {
    const auto given = take_input<float>(scores, "scores", {kAny});
    const auto ids = take<int64_t>(out, "out", {kAny});
    const int64_t most = ids.size(0);
    int32_t& count = take_one<int32_t>(found, "found");
    const int64_t kept = spec::select_best(given.at(), take_count(live, "live", given.size(0)), wanted_of(limit, most), ids.at());
    if (kept < 0) return false;
    std::fill(ids.at() + kept, ids.at() + most, int64_t{0});
    count = static_cast<int32_t>(kept);
    return true;
  });
  module.def("walk", [](handle tokens, handle parents, handle chosen, handle size, handle path, handle live, handle bonus) {
    const auto carried = take_input<int64_t>(tokens, "tokens", {kAny});
    const int64_t room = carried.size(0);
    const auto above = take_input<int64_t>(parents, "parents", {room}), choices = take_input<int64_t>(chosen, "chosen", {room});
    const auto out = take<int64_t>(path, "path", {room});
    int32_t& count = take_one<int32_t>(live, "live");
    int64_t& last = take_one<int64_t>(bonus, "bonus");
    const int64_t found = spec::walk(carried.at(), above.at(), choices.at(), take_count(size, "size", room), out.at());
    last = found ? choices[out[found - 1]] : -1;
    count = static_cast<int32_t>(found);
    std::fill(out.at() + found, out.at() + room, int64_t{0});
  });
  module.def("compact_rows", [](handle slab, handle path, handle live, handle prefix) {
    border::Tensor rows;
    if (!border::read(slab, rows) || rows.rank != 5 || !rows.is_contiguous() || rows.dtype.bits % 8 != 0)
      border::refuse("slab", border::described(slab), "[layers, 2, heads, capacity, size], contiguous, on the CPU");
    const auto nodes = take_input<int64_t>(path, "path", {kAny});
    const int64_t start = take_one<int32_t>(prefix, "prefix"), moved = take_count(live, "count", nodes.size(0));
    return spec::compact_rows(static_cast<char*>(rows.data), rows.size(0) * rows.size(1) * rows.size(2), rows.size(3),
                              rows.size(4) * (rows.dtype.bits / 8), start, nodes.at(), moved);
  });
  module.def("top_children", [](handle logits, bool normalized, handle log_probs, handle best) {
    const Rows given = take_rows(logits, "logits", 1);
    const auto values = take<float>(log_probs, "log_probs", {given.rows(), kAny});
    const int64_t k = values.size(1);
    require(k >= 1 && k <= given.columns(), "k", k, "1 to " + std::to_string(given.columns()));
    const auto columns = take<int64_t>(best, "best", {given.rows(), k});
    py::gil_scoped_release release;
    by_dtype(given, [&](const auto* rows) {
      spec::top_children(rows, given.rows(), given.columns(), given.stride(), k, normalized, values.at(), columns.at());
    });
  });
  module.def("best_candidates", [](handle logits, handle scores, handle live, handle limit, handle log_gate, handle bound,
                                   bool normalized, handle out_rows, handle out_columns, handle log_probs,
                                   handle out_scores, handle out_live) {
    const Rows given = take_rows(logits, "logits");
    const int64_t rows = given.rows(), columns = given.columns();
    const auto paths = take_input<float>(scores, "scores", {rows});
    const auto places = take<int64_t>(out_rows, "rows", {kAny});
    const int64_t most = places.size(0), room = std::min(most, rows * columns), there = take_count(live, "live", rows);
    const auto tokens = take<int64_t>(out_columns, "columns", {most});
    const auto edges = take<float>(log_probs, "log_probs", {most}), sums = take<float>(out_scores, "scores", {most});
    const int64_t wanted = wanted_of(limit, room);
    const float gate = one_or<float>(log_gate, "log_gate", spec::kLowest);
    const float above = one_or<float>(bound, "bound", spec::kLowest);
    int32_t& count = take_one<int32_t>(out_live, "live");
    py::gil_scoped_release release;
    std::vector<spec::Candidate> found;
    if (wanted > 0)
      found = by_dtype(given, [&](const auto* values) {
        return spec::best_candidates(values, there, columns, given.stride(), paths.at(), wanted, gate, above, normalized);
      });
    write(found, static_cast<size_t>(most), places.at(), tokens.at(), edges.at(), sums.at());
    count = static_cast<int32_t>(found.size());
  });
  module.def("top_entropy", [](handle logits, int64_t top, bool normalized, handle out) {
    const Rows given = take_rows(logits, "logits");
    const auto entropies = take<float>(out, "out", {given.rows()});
    require(top >= 1, "top", top, "1 or more");
    py::gil_scoped_release release;
    by_dtype(given, [&](const auto* rows) {
      spec::top_entropy(rows, given.rows(), given.columns(), given.stride(), top, normalized, entropies.at());
    });
  });
  module.def("mix_rows", [](handle logits, bool normalized, float faint, const std::vector<double>& left,
                            const std::vector<int64_t>& places, const std::vector<double>& probabilities, handle out,
                            handle raised) {
    const Rows given = take_rows(logits, "logits");
    const int64_t rows = given.rows(), columns = given.columns();
    const border::Tensor wide = border::take_real(out, "out", {rows, at_least(columns)});
    const auto marks = take<uint8_t>(raised, "raised", {rows, wide.size(1)});
    if (!(wide.dtype == given.dtype)) border::refuse("out", border::described(out), "the dtype of logits");
    require(static_cast<int64_t>(left.size()) == rows, "left", static_cast<int64_t>(left.size()), "one for each row");
    require(places.size() == probabilities.size(), "probabilities", static_cast<int64_t>(probabilities.size()),
            "one for each place");
    if (std::any_of(places.begin(), places.end(), [&](int64_t place) { return place < 0 || place >= wide.count(); }))
      return false;
    py::gil_scoped_release release;
    const int64_t more = wide.size(1) - columns;
    if (given.half())
      spec::mix_rows(given.halves(), rows, columns, given.stride(), more, normalized, faint, left, places, probabilities,
                     static_cast<uint16_t*>(wide.data), marks.at());
    else
      spec::mix_rows(given.floats(), rows, columns, given.stride(), more, normalized, faint, left, places, probabilities,
                     static_cast<float*>(wide.data), marks.at());
    return true;
  });
  module.def("mlp", [](handle net, handle features, handle out) {
    const spec::Network known = take_network(net);
    const auto rated = take_flat<float>(out, "out");
    const auto given = take_flat_input<float>(features, "features", rated.count() * known.inputs);
    spec::probabilities(known, given.at(), rated.count(), rated.at());
  });
  module.def("classify_paths", [](handle net, handle paths, handle entropies, handle depth, handle out) {
    const spec::Network known = take_network(net);
    require(known.inputs == 3, "inputs", known.inputs, "3");
    const auto given = take_input<float>(paths, "paths", {kAny, kAny});
    const int64_t rows = given.size(0), children = given.size(1);
    const auto entropy = take_flat_input<float>(entropies, "entropies", rows);
    const auto level = static_cast<float>(take_one<int32_t>(depth, "depth"));
    spec::classify_paths(known, given.at(), entropy.at(), level, rows, children,
                         take<float>(out, "out", {rows, children}).at());
  });
  module.def("classify_row", [](handle net, handle logits, int64_t top, bool normalized, handle depth, handle out) {
    const spec::Network known = take_network(net);
    require(known.inputs >= 2, "inputs", known.inputs, "2 or more");
    const Rows given = take_rows(logits, "logits", 1);
    require(given.rows() >= 1, "rows", given.rows(), "1 or more");
    require(top >= 1, "top", top, "1 or more");
    const auto at_depth = static_cast<float>(take_one<int32_t>(depth, "depth"));
    take_one<float>(out, "out") = by_dtype(given, [&](const auto* row) {
      return spec::classify_row(known, row, given.columns(), std::min(top, given.columns()), normalized, at_depth);
    });
  });
  module.def("step_queues", [](handle queues, handle rows, handle columns, handle found_log_probs, handle found_scores,
                               handle found_live, handle nodes, handle frontier_live, handle depths, handle token_ids,
                               handle passes, int64_t batch, int64_t max_depth, double threshold, bool fill,
                               handle parents, handle tokens, handle log_probs, handle live, handle expand,
                               handle expand_live) {
    const Parts parts(queues, "queues", 7);
    const auto accepted = take<float>(parts[0], "accepted", {at_least(1)});
    const int64_t budget = accepted.size(0);
    require(batch >= 1, "batch", batch, "1 or more");
    const spec::QueueArrays arrays{accepted.at(),
                                   take<float>(parts[1], "scores", {budget}).at(),
                                   take<float>(parts[2], "log_probs", {budget}).at(),
                                   take<int64_t>(parts[3], "parents", {budget}).at(),
                                   take<int64_t>(parts[4], "depths", {budget}).at(),
                                   take<int64_t>(parts[5], "tokens", {budget}).at(),
                                   &take_one<float>(parts[6], "bound"),
                                   budget};
    const auto scores = take_input<float>(found_scores, "scores", {kAny});
    const int64_t room = scores.size(0), count = take_count(found_live, "live", room);
    const auto row = take_input<int64_t>(rows, "rows", {room}), column = take_input<int64_t>(columns, "columns", {room});
    const auto frontier = take_input<int64_t>(nodes, "nodes", {kAny}), levels = take_input<int64_t>(depths, "depths", {kAny});
    const auto ids = take_input_or_none<int64_t>(token_ids, "token_ids", {kAny});
    const bool going = take_one<int32_t>(frontier_live, "frontier") > 0, begins = take_one<int32_t>(passes, "passes") == 1;
    if (going) {
      require_below(row.at(), count, frontier.size(0), "rows");
      for (int64_t i = 0; i < count; ++i) require_below(&frontier[row[i]], 1, levels.size(0), "nodes");
      if (ids) require_below(column.at(), count, ids.size(0), "columns");
    }
    const auto edges = take_input<float>(found_log_probs, "log_probs", {room});
    const spec::FoundArrays given{row.at(),    column.at(),   edges.at(),  scores.at(),
                                  count,       frontier.at(), levels.at(), ids.at()};
    const spec::Search search{batch, max_depth, threshold, fill};
    const spec::DrawnArrays drawn{take<int64_t>(parents, "parents", {budget}).at(),
                                  take<int64_t>(tokens, "tokens", {budget}).at(),
                                  take<float>(log_probs, "log_probs", {budget}).at(),
                                  &take_one<int32_t>(live, "live"),
                                  take<int64_t>(expand, "expand", {std::min(batch, budget)}).at(),
                                  &take_one<int32_t>(expand_live, "expand")};
    return spec::step_queues(arrays, given, going, begins, search, drawn);
  });
  module.def("strict_cached_attention", [](handle query, handle keys, handle values, handle nodes, handle counts,
                                           handle prefix, handle live, float scale, handle out) {
    const border::Tensor asked = border::take_real(query, "query", {kAny, kAny, kAny});
    const int64_t heads = asked.size(0), rows = asked.size(1), size = asked.size(2);
    border::Tensor kept[2];
    const handle given[2] = {keys, values};
    const char* const names[2] = {"keys", "values"};
    for (int i = 0; i < 2; ++i)
      if (!border::read(given[i], kept[i]) || !(kept[i].dtype == asked.dtype) || !border::is_real(kept[i]) ||
          !kept[i].fits({at_least(1), kAny, size}) || !kept[i].is_dense(2))
        border::refuse(names[i], border::described(given[i]),
                       "the dtype of query, " + border::shown({at_least(1), kAny, size}) + ", dense channels, on the CPU");
    const int64_t kv_heads = kept[0].size(0), capacity = kept[0].size(1);
    if (kept[1].size(0) != kv_heads || kept[1].size(1) != capacity)
      border::refuse("values", border::described(values), "the sizes of keys");
    require(heads % kv_heads == 0, "heads", heads, "a multiple of " + std::to_string(kv_heads));
    const auto places = take_input<int32_t>(nodes, "nodes", {rows, kAny});
    const auto seen = take_input<int32_t>(counts, "counts", {rows});
    const int64_t columns = places.size(1), before = take_one<int32_t>(prefix, "prefix"), alive = take_one<int32_t>(live, "live");
    require(before >= 0 && before <= capacity, "prefix", before, "0 to " + std::to_string(capacity));
    for (int64_t row = 0; row < std::min(rows, alive); ++row) {
      require(seen[row] >= 0 && seen[row] <= columns, "counts", seen[row], "0 to " + std::to_string(columns));
      const int32_t* path = places.at() + row * columns;
      require_below(path, seen[row], capacity - before, "nodes");
      for (int64_t i = 1; i < seen[row]; ++i) require(path[i] > path[i - 1], "nodes", path[i], "ascending ones");
    }
    const border::Tensor given_out = border::take_real(out, "out", {heads, rows, size});
    if (!(given_out.dtype == asked.dtype)) border::refuse("out", border::described(out), "the dtype of query");
    const spec::AttentionShape sizes{kv_heads, heads / kv_heads, rows, size, kept[0].strides[0], kept[0].strides[1],
                                     kept[1].strides[0], kept[1].strides[1], scale};
    const spec::RowPaths paths{columns, before, alive, places.at(), seen.at()};
    const auto run = [&](const auto* like) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(like)>>;
      spec::strict_attention(sizes, like, static_cast<const T*>(kept[0].data), static_cast<const T*>(kept[1].data), paths,
                             static_cast<T*>(given_out.data));
    };
    py::gil_scoped_release release;
    if (asked.dtype.bits == 16)
      run(static_cast<const uint16_t*>(asked.data));
    else
      run(static_cast<const float*>(asked.data));
  });
  // shape: width, whether the last level alone is shown, room, repeats; numbers: pad, lowest, units of the two facts.
  module.def("beam_observation", [](const std::vector<int64_t>& shape, const std::vector<double>& numbers, handle scores,
                                    handle depths, handle live, handle expansions, handle context, handle out) {
    require(shape.size() == 4, "shape", static_cast<int64_t>(shape.size()), "4 numbers");
    require(numbers.size() == 4, "numbers", static_cast<int64_t>(numbers.size()), "4 numbers");
    const int64_t width = shape[0], room = shape[2], repeats = shape[3];
    require(width >= 1 && width < (1 << 20), "width", width, "1 or more");
    require(room >= 0 && room < kMostPlaces, "room", room, "0 or more");
    require(repeats >= 0 && repeats < kMostPlaces, "repeats", repeats, "0 or more");
    const int64_t done = take_one<int32_t>(expansions, "expansions");
    require(done >= 0 && done < (1 << 16), "expansions", done, "0 or more");
    const int64_t first = shape[1] && done > 0 ? width + (done - 1) * width * width : 0;
    const int64_t last = std::min(width + done * width * width, first + room);
    const auto given = take_input<float>(scores, "scores", {kAny});
    const int64_t nodes = given.size(0);
    const auto levels = take_input<int64_t>(depths, "depths", {nodes});
    const int64_t count = take_count(live, "live", nodes);
    require_below(levels.at(), count, 1 << 16, "depths");
    const spec::BeamWindow shown{width, first, last, room, repeats,
                                 static_cast<float>(numbers[0]), static_cast<float>(numbers[1])};
    const double tokens = static_cast<double>(take_one<int64_t>(context, "context"));
    spec::beam_observation(shown, given.at(), levels.at(), count, static_cast<float>(tokens / numbers[2]),
                           static_cast<float>(static_cast<double>(done) / numbers[3]),
                           take<float>(out, "out", {room + 2 * repeats}).at());
  });
  module.def("best_action", [](handle layers, bool tanh, handle observation, handle out) {
    const Parts parameters(layers, "layers", -1);
    require(parameters.size() >= 2 && parameters.size() % 2 == 0, "layers", parameters.size(), "weights and biases");
    const auto seen = take_flat_input<float>(observation, "observation", at_least(1));
    std::vector<int64_t> sizes{seen.count()};
    std::vector<const float*> addresses;
    for (py::ssize_t i = 0; i < parameters.size(); i += 2) {
      const auto weight = take<float>(parameters[i], "weight", {at_least(1), sizes.back()});
      sizes.push_back(weight.size(0));
      addresses.push_back(weight.at());
      addresses.push_back(take<float>(parameters[i + 1], "bias", {weight.size(0)}).at());
    }
    take_one<int64_t>(out, "out") = spec::best_action(sizes, addresses, tanh, seen.at());
  });
  module.def("chances", [](handle stated, handle cells, handle table, handle out) {
    const auto given = take_flat_input<float>(stated, "stated");
    const int64_t entries = given.count();
    const auto rows = take_flat_input<int64_t>(cells, "cells", entries);
    const auto known = take_input<float>(table, "table", {kAny, at_least(2)});
    const auto rated = take_flat<float>(out, "out", entries);
    require_below(rows.at(), entries, known.size(0), "cells");
    const int64_t knots = known.size(1);
    for (int64_t i = 0; i < entries; ++i) rated[i] = spec::log_chance(given[i], known.at() + rows[i] * knots, knots);
  });
  module.def("hang_likely", [](handle tree, handle size, handle overflow, handle nodes, handle live, handle tokens,
                               handle stated, handle sources, handle counts, handle notes, double least, handle ids,
                               handle found) {
    const Tree grown = take_tree(tree, size);
    const Outcomes outcomes = take_outcomes(counts);
    const spec::SearchNotes noted = take_notes(notes, grown.capacity);
    const auto drawn = take_input<int64_t>(tokens, "tokens", {kAny, kAny});
    const int64_t rows = drawn.size(0), places = drawn.size(1);
    require(places <= spec::kPlaces, "places", places, "at most " + std::to_string(spec::kPlaces));
    const auto frontier = take_input<int64_t>(nodes, "nodes", {at_least(rows)});
    const auto out = take<int64_t>(ids, "ids", {kAny});
    const auto edges = take_input<float>(stated, "stated", {rows, places});
    const auto marks = take_input_or_none<uint8_t>(sources, "sources", {rows, places});
    int32_t &over = take_one<int32_t>(overflow, "overflow"), &count = take_one<int32_t>(found, "found");
    const int64_t drafted = take_count(live, "live", rows), first = *grown.size, most = out.size(0);
    require_below(frontier.at(), drafted, first, "nodes");
    if (marks) require_below(marks.at(), drafted * places, spec::kSources, "sources");
    const auto likely = spec::likely_children(grown.arrays, frontier.at(), drafted, places, edges.at(), marks.at(),
                                              outcomes.counts, least, most);
    spec::Children given;
    for (const spec::LikelyChild& child : likely) {
      given.parents.push_back(frontier[child.entry / places]);
      given.tokens.push_back(drawn[child.entry]);
      given.log_probs.push_back(child.edge);
    }
    for (int64_t row = 0; row < drafted; ++row) {
      noted.waiting[frontier[row]] = false;
      noted.drafted[frontier[row]] = true;
    }
    const auto entries = static_cast<int64_t>(likely.size());
    count = static_cast<int32_t>(entries);
    if (!append(grown, entries, most, given.parents.data(), given.tokens.data(), given.log_probs.data(), &over, out.at()))
      return false;
    for (int64_t node = first; node < *grown.size; ++node) {
      const spec::LikelyChild& child = likely[static_cast<size_t>(node - first)];
      noted.stated[node] = edges[child.entry];
      noted.cells[node] = child.cell;
      noted.places[node] = child.entry % places;
      noted.waiting[node] = true;
    }
    return true;
  });
  module.def("count_outcomes", [](handle tree, handle size, handle path, handle live, handle chosen, handle counts,
                                  handle notes) {
    const Tree grown = take_tree(tree, size);
    const Outcomes outcomes = take_outcomes(counts);
    const spec::SearchNotes noted = take_notes(notes, grown.capacity);
    const auto nodes = take_input<int64_t>(path, "path", {kAny}), choices = take_input<int64_t>(chosen, "chosen", {nodes.size(0)});
    const int64_t length = take_count(live, "live", nodes.size(0)), there = *grown.size;
    require_below(nodes.at(), length, there, "path");
    for (int64_t node = 1; node < there; ++node) require_below(grown.arrays.parents + node, 1, node, "parents");
    require_below(noted.cells, there, outcomes.cells, "cells");
    require_below(noted.places, there, spec::kPlaces, "places");
    spec::count_outcomes(grown.arrays, there, nodes.at(), choices.at(), length, outcomes.counts, noted);
  });
  module.def("settle", [](handle parts, handle verified, handle beside, handle committed, double memory) {
    const Parts given(parts, "ledger", 6);
    const auto verify = take<float>(given[0], "verify", {at_least(2)}), draft = take<float>(given[1], "draft", {kAny});
    const spec::Ledger ledger{verify.at(),
                              draft.at(),
                              take<float>(given[2], "verify prices", {verify.size(0)}).at(),
                              take<float>(given[3], "draft prices", {draft.size(0)}).at(),
                              take<float>(given[4], "earned", {2}).at(),
                              verify.size(0),
                              draft.size(0)};
    const float took = verify[take_count(verified, "verified", verify.size(0) - 1)] +
                       take_one<float>(given[5], "spent") + take_one<float>(beside, "beside");
    spec::settle(ledger, take_one<int32_t>(committed, "committed"), took, static_cast<float>(memory));
  });
  module.def("select_worth", [](handle paths, handle size, handle price, handle ids, handle live) {
    const auto scores = take_input<float>(paths, "paths", {kAny});
    const auto prices = take_input<float>(price, "price", {at_least(1)});
    const auto out = take<int64_t>(ids, "ids", {kAny});
    const int64_t room = scores.size(0), nodes = take_count(size, "size", room), most = out.size(0);
    int32_t& count = take_one<int32_t>(live, "live");
    const int64_t n = spec::worth_most(scores.at(), nodes, prices.at(), std::min({most, prices.size(0) - 1, room}));
    const int64_t found = spec::select_best(scores.at(), nodes, std::min(n, most), out.at());
    if (found < 0) return false;
    std::fill(out.at() + found, out.at() + most, int64_t{0});
    count = static_cast<int32_t>(found);
    return true;
  });
  module.def("next_pass", [](handle paths, handle edges, handle waiting, handle size, handle profile, handle prices,
                             int64_t rounds, handle ids, handle live) {
    const auto scores = take_input<float>(paths, "paths", {kAny});
    const int64_t room = scores.size(0);
    const auto steps = take_input<float>(edges, "edges", {room});
    const auto open = take_input<bool>(waiting, "waiting", {room});
    const auto chances = take_input<float>(profile, "profile", {at_least(1), kAny});
    const Parts parts(prices, "prices", 3);
    const auto verify = take_input<float>(parts[0], "verify", {at_least(1)}), draft = take_input<float>(parts[1], "draft", {at_least(1)});
    const auto widths = take_input<int64_t>(parts[2], "widths", {at_least(1)});
    require_below(widths.at(), widths.size(0), draft.size(0), "widths");
    require(rounds >= 1 && rounds <= kMostRounds, "rounds", rounds, "1 to " + std::to_string(kMostRounds));
    const auto out = take<int64_t>(ids, "ids", {draft.size(0) - 1});
    int32_t& count = take_one<int32_t>(live, "live");
    const spec::SearchPrices asked{verify.at(),         draft.at(),  verify.size(0) - 1,
                                   draft.size(0) - 1, widths.at(), widths.size(0)};
    const auto found = spec::next_pass(scores.at(), steps.at(), open.at(), take_count(size, "size", room),
                                       {chances.at(), chances.size(0), chances.size(1)}, asked, rounds);
    std::fill(std::copy(found.begin(), found.end(), out.at()), out.at() + out.size(0), int64_t{0});
    count = static_cast<int32_t>(found.size());
  });
  module.def("keyed_gumbel_argmax", [](handle scores, uint64_t seed, uint64_t position) {
    const auto given = take_input<float>(scores, "scores", {kAny});
    py::gil_scoped_release release;
    return spec::keyed_gumbel_argmax(given.at(), given.size(0), seed, position);
  });
  module.def("couple", [](handle logits, handle ids, handle positions, handle seed, handle scale, handle out) {
    const Rows given = take_rows(logits, "logits");
    if (given.half()) border::refuse("logits", border::described(logits), "float32");
    const int64_t rows = given.rows(), columns = given.columns();
    const auto tokens = take_input_or_none<int64_t>(ids, "token_ids", {columns});
    const auto places = take_input<int64_t>(positions, "positions", {rows});
    const auto coupled = take<float>(out, "out", {rows, columns});
    if (tokens) require_below(tokens.at(), columns, kMostTokens, "token_ids");
    const uint64_t key = take_one<uint64_t>(seed, "seed");
    const float by = take_one<float>(scale, "scale");
    if (columns == 0) return;
    py::gil_scoped_release release;
    spec::couple(given.floats(), rows, columns, given.stride(), tokens.at(), places.at(), key, by, coupled.at());
  });
  copies_binding::add_to(module);
}
