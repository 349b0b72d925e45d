// specengine._expander: the functions of csrc/spec over raw addresses. Their only caller is specengine/ops/cpp.py, which
// has checked device, dtype, shape and contiguity; an address as an integer costs the least per call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

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

namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A number that may be left out.
template <typename T>
T number(uintptr_t address, T without) {
  return address ? *at<const T>(address) : without;
}

// A count, which may say more than there is room for.
int64_t count(uintptr_t address, int64_t most) {
  return std::clamp<int64_t>(*at<const int32_t>(address), 0, most);
}

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

spec::TreeArrays tree_arrays(const std::vector<uintptr_t>& tree, int64_t words) {
  return {at<int64_t>(tree[0]), at<int64_t>(tree[1]), at<int64_t>(tree[2]), at<float>(tree[3]),
          at<float>(tree[4]),   at<uint64_t>(tree[5]), words};
}

spec::OutcomeCounts outcome_counts(const std::vector<uintptr_t>& parts) {
  return {at<float>(parts[0]), at<float>(parts[1]), at<float>(parts[2]),          at<float>(parts[3]),
          at<float>(parts[4]), at<float>(parts[5]), *at<const int64_t>(parts[6])};
}

spec::SearchNotes search_notes(const std::vector<uintptr_t>& parts) {
  return {at<float>(parts[0]), at<int64_t>(parts[1]), at<int64_t>(parts[2]), at<bool>(parts[3]), at<bool>(parts[4])};
}

// Hangs `given` nodes where they fit, else says that they do not; ids: [room], 0 behind those of the nodes.
bool append(const std::vector<uintptr_t>& tree, int64_t capacity, int64_t words, int32_t* size, int64_t given,
            int64_t room, const int64_t* parents, const int64_t* tokens, const float* log_probs, int32_t* overflow,
            int64_t* ids) {
  const spec::TreeArrays arrays = tree_arrays(tree, words);
  const int64_t before = *size;
  const bool fits = before + given <= capacity;
  const int64_t added = fits ? given : 0;
  if (!fits) *overflow = 1;
  if (!spec::append_nodes(arrays, before, added, parents, tokens, log_probs)) return false;
  for (int64_t i = 0; i < room; ++i) ids[i] = i < added ? before + i : 0;
  *size = static_cast<int32_t>(before + added);
  return true;
}

// parameters: hidden weight and bias, output weight and bias.
spec::Network network(const std::vector<uintptr_t>& parameters, int64_t inputs, int64_t hidden) {
  return {at<const float>(parameters[0]), at<const float>(parameters[1]), at<const float>(parameters[2]),
          *at<const float>(parameters[3]), inputs, hidden};
}

}  // namespace

PYBIND11_MODULE(_expander, module) {
  module.attr("INTERFACE") = 9;  // specengine/ops/cpp.py asks for it: an extension may be left from other sources
  module.def("ancestor_words", [](uintptr_t parents, int64_t nodes, uintptr_t out) {
    return spec::ancestor_words(at<const int64_t>(parents), nodes, spec::words_for(nodes), at<uint64_t>(out));
  });
  module.def("append_nodes", [](const std::vector<uintptr_t>& tree, int64_t capacity, int64_t words, uintptr_t size,
                                uintptr_t live, int64_t room, uintptr_t parents, uintptr_t tokens, uintptr_t log_probs,
                                uintptr_t overflow, uintptr_t ids) {
    return append(tree, capacity, words, at<int32_t>(size), count(live, room), room, at<const int64_t>(parents),
                  at<const int64_t>(tokens), at<const float>(log_probs), at<int32_t>(overflow), at<int64_t>(ids));
  });
  module.def("append_children", [](const std::vector<uintptr_t>& tree, int64_t capacity, int64_t words, uintptr_t size,
                                   uintptr_t nodes, uintptr_t live, int64_t rows, int64_t children, uintptr_t tokens,
                                   uintptr_t log_probs, uintptr_t chosen, int64_t most, uintptr_t limit,
                                   uintptr_t overflow, uintptr_t ids, uintptr_t found) {
    const int64_t wanted = std::clamp<int64_t>(number<int32_t>(limit, INT32_MAX), 0, most);
    const auto given = spec::chosen_children(at<const int64_t>(nodes), count(live, rows), children,
                                             at<const int64_t>(tokens), at<const float>(log_probs),
                                             at<const uint8_t>(chosen), wanted);
    const auto entries = static_cast<int64_t>(given.parents.size());
    *at<int32_t>(found) = static_cast<int32_t>(entries);
    return append(tree, capacity, words, at<int32_t>(size), entries, most, given.parents.data(), given.tokens.data(),
                  given.log_probs.data(), at<int32_t>(overflow), at<int64_t>(ids));
  });
  module.def("subtree", [](uintptr_t parents, int64_t size, uintptr_t nodes, uintptr_t live, int64_t room,
                           uintptr_t new_parents, uintptr_t ancestors) {
    return spec::subtree(at<const int64_t>(parents), size, at<const int64_t>(nodes), count(live, room), room,
                         at<int64_t>(new_parents), at<uint64_t>(ancestors));
  });
  module.def("tree_mask", [](uintptr_t ancestors, int64_t nodes, int64_t words, int64_t columns, uintptr_t out) {
    spec::tree_mask(at<const uint64_t>(ancestors), nodes, words, columns, at<uint8_t>(out));
  });
  module.def("select_best", [](uintptr_t scores, int64_t size, uintptr_t live, int64_t most, uintptr_t limit,
                               uintptr_t out, uintptr_t found) {
    const int64_t wanted = std::clamp<int64_t>(number<int32_t>(limit, INT32_MAX), 0, most);
    const int64_t kept = spec::select_best(at<const float>(scores), count(live, size), wanted, at<int64_t>(out));
    if (kept < 0) return false;
    std::fill(at<int64_t>(out) + kept, at<int64_t>(out) + most, int64_t{0});
    *at<int32_t>(found) = static_cast<int32_t>(kept);
    return true;
  });
  module.def("walk", [](uintptr_t tokens, uintptr_t parents, uintptr_t chosen, uintptr_t size, int64_t room,
                        uintptr_t path, uintptr_t live, uintptr_t bonus) {
    const int64_t found = spec::walk(at<const int64_t>(tokens), at<const int64_t>(parents), at<const int64_t>(chosen),
                                     count(size, room), at<int64_t>(path));
    *at<int64_t>(bonus) = found ? at<const int64_t>(chosen)[at<const int64_t>(path)[found - 1]] : -1;
    *at<int32_t>(live) = static_cast<int32_t>(found);
    std::fill(at<int64_t>(path) + found, at<int64_t>(path) + room, int64_t{0});
  });
  module.def("compact_rows", [](uintptr_t slab, int64_t planes, int64_t capacity, int64_t row_bytes, uintptr_t path,
                                int64_t room, uintptr_t live, uintptr_t prefix) {
    const int64_t start = *at<const int32_t>(prefix), moved = count(live, room);
    return spec::compact_rows(at<char>(slab), planes, capacity, row_bytes, start, at<const int64_t>(path), moved);
  });
  module.def("top_children", [](uintptr_t logits, bool bfloat16, int64_t rows, int64_t columns, int64_t row_stride,
                                int64_t k, bool normalized, uintptr_t log_probs, uintptr_t best) {
    py::gil_scoped_release release;
    if (bfloat16)
      spec::top_children(at<const uint16_t>(logits), rows, columns, row_stride, k, normalized, at<float>(log_probs),
                         at<int64_t>(best));
    else
      spec::top_children(at<const float>(logits), rows, columns, row_stride, k, normalized, at<float>(log_probs),
                         at<int64_t>(best));
  });
  module.def("best_candidates", [](uintptr_t logits, bool bfloat16, int64_t rows, int64_t columns, int64_t row_stride,
                                   uintptr_t scores, uintptr_t live, int64_t most, uintptr_t limit, uintptr_t log_gate,
                                   uintptr_t bound, bool normalized, uintptr_t out_rows, uintptr_t out_columns,
                                   uintptr_t log_probs, uintptr_t out_scores, uintptr_t out_live) {
    py::gil_scoped_release release;
    const auto* paths = at<const float>(scores);
    const int64_t room = std::min(most, rows * columns), there = count(live, rows);
    const int64_t wanted = std::clamp<int64_t>(number<int32_t>(limit, INT32_MAX), 0, room);
    const float gate = number<float>(log_gate, spec::kLowest), above = number<float>(bound, spec::kLowest);
    std::vector<spec::Candidate> found;
    if (wanted > 0)
      found = bfloat16 ? spec::best_candidates(at<const uint16_t>(logits), there, columns, row_stride, paths, wanted,
                                               gate, above, normalized)
                       : spec::best_candidates(at<const float>(logits), there, columns, row_stride, paths, wanted, gate,
                                               above, normalized);
    write(found, static_cast<size_t>(most), at<int64_t>(out_rows), at<int64_t>(out_columns), at<float>(log_probs),
          at<float>(out_scores));
    *at<int32_t>(out_live) = static_cast<int32_t>(found.size());
  });
  module.def("top_entropy", [](uintptr_t logits, bool bfloat16, int64_t rows, int64_t columns, int64_t row_stride,
                               int64_t top, bool normalized, uintptr_t out) {
    py::gil_scoped_release release;
    if (bfloat16)
      spec::top_entropy(at<const uint16_t>(logits), rows, columns, row_stride, top, normalized, at<float>(out));
    else
      spec::top_entropy(at<const float>(logits), rows, columns, row_stride, top, normalized, at<float>(out));
  });
  module.def("mix_rows", [](uintptr_t logits, bool bfloat16, int64_t rows, int64_t columns, int64_t row_stride,
                            int64_t more, bool normalized, float faint, const std::vector<double>& left,
                            const std::vector<int64_t>& places, const std::vector<double>& probabilities, uintptr_t out,
                            uintptr_t raised) {
    if (std::any_of(places.begin(), places.end(),
                    [&](int64_t place) { return place < 0 || place >= rows * (columns + more); }))
      return false;
    py::gil_scoped_release release;
    if (bfloat16)
      spec::mix_rows(at<const uint16_t>(logits), rows, columns, row_stride, more, normalized, faint, left, places,
                     probabilities, at<uint16_t>(out), at<uint8_t>(raised));
    else
      spec::mix_rows(at<const float>(logits), rows, columns, row_stride, more, normalized, faint, left, places,
                     probabilities, at<float>(out), at<uint8_t>(raised));
    return true;
  });
  module.def("mlp", [](const std::vector<uintptr_t>& net, int64_t inputs, int64_t hidden, uintptr_t features,
                       int64_t count, uintptr_t out) {
    spec::probabilities(network(net, inputs, hidden), at<const float>(features), count, at<float>(out));
  });
  module.def("classify_paths", [](const std::vector<uintptr_t>& net, int64_t hidden, uintptr_t paths,
                                  uintptr_t entropies, uintptr_t depth, int64_t rows, int64_t children, uintptr_t out) {
    spec::classify_paths(network(net, 3, hidden), at<const float>(paths), at<const float>(entropies),
                         static_cast<float>(*at<const int32_t>(depth)), rows, children, at<float>(out));
  });
  module.def("classify_row", [](const std::vector<uintptr_t>& net, int64_t inputs, int64_t hidden, uintptr_t row,
                                bool bfloat16, int64_t columns, int64_t top, bool normalized, uintptr_t depth,
                                uintptr_t out) {
    const spec::Network known = network(net, inputs, hidden);
    const auto at_depth = static_cast<float>(*at<const int32_t>(depth));
    *at<float>(out) = bfloat16
                          ? spec::classify_row(known, at<const uint16_t>(row), columns, top, normalized, at_depth)
                          : spec::classify_row(known, at<const float>(row), columns, top, normalized, at_depth);
  });
  module.def("step_queues", [](const std::array<uintptr_t, 7>& queues, int64_t budget, uintptr_t rows,
                               uintptr_t columns, uintptr_t found_log_probs, uintptr_t found_scores,
                               uintptr_t found_live, int64_t room, uintptr_t nodes, uintptr_t frontier_live,
                               uintptr_t depths, uintptr_t token_ids, uintptr_t passes, int64_t batch,
                               int64_t max_depth, double threshold, bool fill, uintptr_t parents, uintptr_t tokens,
                               uintptr_t log_probs, uintptr_t live, uintptr_t expand, uintptr_t expand_live) {
    const spec::QueueArrays arrays{at<float>(queues[0]),   at<float>(queues[1]),   at<float>(queues[2]),
                                   at<int64_t>(queues[3]), at<int64_t>(queues[4]), at<int64_t>(queues[5]),
                                   at<float>(queues[6]),   budget};
    const spec::FoundArrays given{at<const int64_t>(rows),          at<const int64_t>(columns),
                                  at<const float>(found_log_probs), at<const float>(found_scores),
                                  count(found_live, room),          at<const int64_t>(nodes),
                                  at<const int64_t>(depths),        at<const int64_t>(token_ids)};
    const spec::Search search{batch, max_depth, threshold, fill};
    const spec::DrawnArrays drawn{at<int64_t>(parents), at<int64_t>(tokens), at<float>(log_probs),
                                  at<int32_t>(live),    at<int64_t>(expand), at<int32_t>(expand_live)};
    return spec::step_queues(arrays, given, *at<const int32_t>(frontier_live) > 0, *at<const int32_t>(passes) == 1,
                             search, drawn);
  });
  // shape: that of spec::AttentionShape, in its order.
  module.def("strict_cached_attention",
             [](bool bfloat16, const std::vector<int64_t>& shape, float scale, uintptr_t query, uintptr_t keys,
                uintptr_t values, int64_t columns, uintptr_t nodes, uintptr_t counts, uintptr_t prefix, uintptr_t live,
                uintptr_t out) {
               py::gil_scoped_release release;
               const spec::AttentionShape sizes{shape[0], shape[1], shape[2], shape[3], shape[4],
                                                shape[5], shape[6], shape[7], scale};
               const spec::RowPaths paths{columns, *at<const int32_t>(prefix), *at<const int32_t>(live),
                                          at<const int32_t>(nodes), at<const int32_t>(counts)};
               if (bfloat16)
                 spec::strict_attention(sizes, at<const uint16_t>(query), at<const uint16_t>(keys),
                                        at<const uint16_t>(values), paths, at<uint16_t>(out));
               else
                 spec::strict_attention(sizes, at<const float>(query), at<const float>(keys), at<const float>(values),
                                        paths, at<float>(out));
             });
  module.def("beam_observation", [](const std::vector<int64_t>& shape, const std::vector<double>& numbers,
                                    uintptr_t scores, uintptr_t depths, uintptr_t live, uintptr_t expansions,
                                    uintptr_t context, uintptr_t out) {
    const int64_t width = shape[0], done = *at<const int32_t>(expansions);
    const int64_t first = shape[1] && done > 0 ? width + (done - 1) * width * width : 0;
    const int64_t last = std::min(width + done * width * width, first + shape[2]);
    const spec::BeamWindow shown{width, first, last, shape[2], shape[3],
                                 static_cast<float>(numbers[0]), static_cast<float>(numbers[1])};
    const double tokens = static_cast<double>(*at<const int64_t>(context));
    spec::beam_observation(shown, at<const float>(scores), at<const int64_t>(depths), *at<const int32_t>(live),
                           static_cast<float>(tokens / numbers[2]),
                           static_cast<float>(static_cast<double>(done) / numbers[3]), at<float>(out));
  });
  module.def("best_action", [](const std::vector<int64_t>& sizes, const std::vector<uintptr_t>& parameters, bool tanh,
                               uintptr_t observation, uintptr_t out) {
    std::vector<const float*> addresses;
    for (const uintptr_t address : parameters) addresses.push_back(at<const float>(address));
    *at<int64_t>(out) = spec::best_action(sizes, addresses, tanh, at<const float>(observation));
  });
  module.def("chances", [](uintptr_t stated, uintptr_t cells, int64_t entries, uintptr_t table, int64_t knots,
                           uintptr_t out) {
    for (int64_t i = 0; i < entries; ++i)
      at<float>(out)[i] = spec::log_chance(at<const float>(stated)[i],
                                           at<const float>(table) + at<const int64_t>(cells)[i] * knots, knots);
  });
  module.def("hang_likely", [](const std::vector<uintptr_t>& tree, int64_t capacity, int64_t words, uintptr_t size,
                               uintptr_t overflow, uintptr_t nodes, uintptr_t live, int64_t rows, int64_t places,
                               uintptr_t tokens, uintptr_t stated, uintptr_t sources, const std::vector<uintptr_t>& counts,
                               const std::vector<uintptr_t>& notes, double least, int64_t most, uintptr_t ids,
                               uintptr_t found) {
    const spec::SearchNotes noted = search_notes(notes);
    const auto* frontier = at<const int64_t>(nodes);
    const int64_t drafted = count(live, rows);
    const auto likely = spec::likely_children(tree_arrays(tree, words), frontier, drafted, places,
                                              at<const float>(stated), at<const uint8_t>(sources),
                                              outcome_counts(counts), least, most);
    spec::Children given;
    for (const spec::LikelyChild& child : likely) {
      given.parents.push_back(frontier[child.entry / places]);
      given.tokens.push_back(at<const int64_t>(tokens)[child.entry]);
      given.log_probs.push_back(child.edge);
    }
    for (int64_t row = 0; row < drafted; ++row) {
      noted.waiting[frontier[row]] = false;
      noted.drafted[frontier[row]] = true;
    }
    const auto entries = static_cast<int64_t>(likely.size());
    const int64_t first = *at<const int32_t>(size);
    *at<int32_t>(found) = static_cast<int32_t>(entries);
    if (!append(tree, capacity, words, at<int32_t>(size), entries, most, given.parents.data(), given.tokens.data(),
                given.log_probs.data(), at<int32_t>(overflow), at<int64_t>(ids)))
      return false;
    for (int64_t node = first; node < *at<const int32_t>(size); ++node) {
      const spec::LikelyChild& child = likely[static_cast<size_t>(node - first)];
      noted.stated[node] = at<const float>(stated)[child.entry];
      noted.cells[node] = child.cell;
      noted.places[node] = child.entry % places;
      noted.waiting[node] = true;
    }
    return true;
  });
  module.def("count_outcomes", [](const std::vector<uintptr_t>& tree, int64_t capacity, int64_t words, uintptr_t size,
                                  uintptr_t path, uintptr_t live, int64_t room, uintptr_t chosen,
                                  const std::vector<uintptr_t>& counts, const std::vector<uintptr_t>& notes) {
    spec::count_outcomes(tree_arrays(tree, words), count(size, capacity), at<const int64_t>(path),
                         at<const int64_t>(chosen), count(live, room), outcome_counts(counts), search_notes(notes));
  });
  module.def("settle", [](const std::vector<uintptr_t>& parts, uintptr_t verified, uintptr_t beside, uintptr_t committed,
                          int64_t verify, int64_t draft, double memory) {
    const spec::Ledger ledger{at<const float>(parts[0]), at<const float>(parts[1]), at<float>(parts[2]),
                              at<float>(parts[3]), at<float>(parts[4]), verify, draft};
    const float took = ledger.verify[count(verified, verify - 1)] + *at<const float>(parts[5]) + *at<const float>(beside);
    spec::settle(ledger, *at<const int32_t>(committed), took, static_cast<float>(memory));
  });
  module.def("select_worth", [](uintptr_t paths, uintptr_t size, int64_t room, uintptr_t price, int64_t most,
                                int64_t wanted, uintptr_t ids, uintptr_t live) {
    const int64_t nodes = count(size, room);
    const int64_t n = spec::worth_most(at<const float>(paths), nodes, at<const float>(price), most);
    const int64_t found = spec::select_best(at<const float>(paths), nodes, n, at<int64_t>(ids));
    if (found < 0) return false;
    std::fill(at<int64_t>(ids) + found, at<int64_t>(ids) + wanted, int64_t{0});
    *at<int32_t>(live) = static_cast<int32_t>(found);
    return true;
  });
  module.def("next_pass", [](uintptr_t paths, uintptr_t edges, uintptr_t waiting, uintptr_t size, int64_t room,
                             uintptr_t profile, int64_t levels, int64_t places, const std::vector<uintptr_t>& prices,
                             const std::vector<int64_t>& sizes, int64_t rounds, uintptr_t ids, uintptr_t live) {
    const spec::SearchPrices asked{at<const float>(prices[0]), at<const float>(prices[1]), sizes[0], sizes[1],
                                   at<const int64_t>(prices[2]), sizes[2]};
    const auto found = spec::next_pass(at<const float>(paths), at<const float>(edges), at<const bool>(waiting),
                                       count(size, room), {at<const float>(profile), levels, places}, asked, rounds);
    std::fill_n(std::copy(found.begin(), found.end(), at<int64_t>(ids)), sizes[1] - static_cast<int64_t>(found.size()),
                int64_t{0});
    *at<int32_t>(live) = static_cast<int32_t>(found.size());
  });
  module.def("keyed_gumbel_argmax", [](uintptr_t scores, int64_t size, uint64_t seed, uint64_t position) {
    py::gil_scoped_release release;
    return spec::keyed_gumbel_argmax(at<const float>(scores), size, seed, position);
  });
  module.def("couple", [](uintptr_t logits, int64_t rows, int64_t columns, int64_t stride, uintptr_t ids,
                          uintptr_t positions, uintptr_t seed, uintptr_t scale, uintptr_t out) {
    py::gil_scoped_release release;
    spec::couple(at<const float>(logits), rows, columns, stride, at<const int64_t>(ids), at<const int64_t>(positions),
                 *at<const uint64_t>(seed), *at<const float>(scale), at<float>(out));
  });
}
