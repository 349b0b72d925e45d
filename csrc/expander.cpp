// specengine._expander: the functions of csrc/spec over raw addresses. Their only caller is specengine/native.py, which
// has checked device, dtype, shape and contiguity; an address as an integer costs the least per call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "spec/strict_attention.hpp"
#include "spec/best_first.hpp"
#include "spec/candidates.hpp"
#include "spec/classifier.hpp"
#include "spec/compaction.hpp"
#include "spec/decisions.hpp"
#include "spec/entropy.hpp"
#include "spec/gumbel.hpp"
#include "spec/top_children.hpp"
#include "spec/tree.hpp"

namespace py = pybind11;

namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void write(const std::vector<spec::Candidate>& found, int64_t* rows, int64_t* columns, float* log_probs,
           float* scores) {
  for (size_t i = 0; i < found.size(); ++i) {
    rows[i] = found[i].row;
    columns[i] = found[i].column;
    log_probs[i] = found[i].log_prob;
    scores[i] = found[i].score;
  }
}

// parameters: hidden weight and bias, output weight and bias.
spec::Network network(const std::vector<uintptr_t>& parameters, int64_t inputs, int64_t hidden) {
  return {at<const float>(parameters[0]), at<const float>(parameters[1]), at<const float>(parameters[2]),
          *at<const float>(parameters[3]), inputs, hidden};
}

// (nodes, those of them to draft from, their mass)
py::tuple draw(spec::BestFirst& queue, int64_t count, bool expands, uintptr_t parents, uintptr_t tokens,
               uintptr_t log_probs, uintptr_t expand) {
  const spec::Drawn drawn = spec::draw(queue.state, count, expands, at<int64_t>(parents), at<int64_t>(tokens),
                                       at<float>(log_probs), at<int64_t>(expand));
  return py::make_tuple(drawn.nodes, drawn.expanded, drawn.mass);
}

// shape: that of spec::AttentionShape, in its order.
void attend(bool bfloat16, const std::vector<int64_t>& shape, float scale, uintptr_t query, uintptr_t keys,
            uintptr_t values, const spec::VisibleSlots& visible, uintptr_t out) {
  const spec::AttentionShape sizes{shape[0], shape[1], shape[2], shape[3], shape[4],
                                   shape[5], shape[6], shape[7], shape[8], scale};
  if (bfloat16)
    spec::strict_attention(sizes, at<const uint16_t>(query), at<const uint16_t>(keys), at<const uint16_t>(values),
                           visible, at<uint16_t>(out));
  else
    spec::strict_attention(sizes, at<const float>(query), at<const float>(keys), at<const float>(values), visible,
                           at<float>(out));
}

}  // namespace

PYBIND11_MODULE(_expander, module) {
  module.def("ancestor_words", [](uintptr_t parents, int64_t nodes, uintptr_t out) {
    return spec::ancestor_words(at<const int64_t>(parents), nodes, at<uint64_t>(out));
  });
  module.def("append_nodes", [](const std::vector<uintptr_t>& tree, int64_t words, int64_t size, int64_t count,
                                uintptr_t parents, uintptr_t tokens, uintptr_t log_probs) {
    const spec::TreeArrays arrays{at<int64_t>(tree[0]), at<int64_t>(tree[1]), at<int64_t>(tree[2]), at<float>(tree[3]),
                                  at<float>(tree[4]),   at<uint64_t>(tree[5]), words};
    return spec::append_nodes(arrays, size, count, at<const int64_t>(parents), at<const int64_t>(tokens),
                              at<const float>(log_probs));
  });
  module.def("subtree", [](uintptr_t parents, int64_t size, uintptr_t nodes, int64_t count, uintptr_t new_parents,
                           uintptr_t ancestors) {
    return spec::subtree(at<const int64_t>(parents), size, at<const int64_t>(nodes), count, at<int64_t>(new_parents),
                         at<uint64_t>(ancestors));
  });
  module.def("tree_mask", [](uintptr_t ancestors, int64_t nodes, int64_t words, int64_t columns, uintptr_t out) {
    spec::tree_mask(at<const uint64_t>(ancestors), nodes, words, columns, at<uint8_t>(out));
  });
  module.def("select_best", [](uintptr_t values, int64_t size, int64_t count, uintptr_t out) {
    return spec::select_best(at<const float>(values), size, count, at<int64_t>(out));
  });
  module.def("walk", [](uintptr_t tokens, uintptr_t parents, uintptr_t chosen, int64_t nodes) {
    return spec::walk(at<const int64_t>(tokens), at<const int64_t>(parents), at<const int64_t>(chosen), nodes);
  });
  module.def("compact_rows", [](uintptr_t slab, int64_t planes, int64_t plane_bytes, int64_t row_bytes, int64_t prefix,
                                const std::vector<int64_t>& path) {
    spec::compact_rows(at<char>(slab), planes, plane_bytes, row_bytes, prefix, path);
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
                                   uintptr_t scores, int64_t count, float log_gate, float bound, bool normalized,
                                   uintptr_t out_rows, uintptr_t out_columns, uintptr_t log_probs,
                                   uintptr_t out_scores) {
    py::gil_scoped_release release;
    const auto* paths = at<const float>(scores);
    const auto found = bfloat16 ? spec::best_candidates(at<const uint16_t>(logits), rows, columns, row_stride, paths,
                                                        count, log_gate, bound, normalized)
                                : spec::best_candidates(at<const float>(logits), rows, columns, row_stride, paths,
                                                        count, log_gate, bound, normalized);
    write(found, at<int64_t>(out_rows), at<int64_t>(out_columns), at<float>(log_probs), at<float>(out_scores));
    return found.size();
  });
  module.def("top_entropy", [](uintptr_t logits, bool bfloat16, int64_t rows, int64_t columns, int64_t row_stride,
                               int64_t top, bool normalized, uintptr_t out) {
    py::gil_scoped_release release;
    if (bfloat16)
      spec::top_entropy(at<const uint16_t>(logits), rows, columns, row_stride, top, normalized, at<float>(out));
    else
      spec::top_entropy(at<const float>(logits), rows, columns, row_stride, top, normalized, at<float>(out));
  });
  module.def("mlp", [](const std::vector<uintptr_t>& net, int64_t inputs, int64_t hidden, uintptr_t features,
                       int64_t count, uintptr_t out) {
    spec::probabilities(network(net, inputs, hidden), at<const float>(features), count, at<float>(out));
  });
  module.def("classify_paths", [](const std::vector<uintptr_t>& net, int64_t hidden, uintptr_t paths,
                                  uintptr_t entropies, float depth, int64_t rows, int64_t children, uintptr_t out) {
    spec::classify_paths(network(net, 3, hidden), at<const float>(paths), at<const float>(entropies), depth, rows,
                         children, at<float>(out));
  });
  module.def("classify_row", [](const std::vector<uintptr_t>& net, int64_t inputs, int64_t hidden, uintptr_t row,
                                bool bfloat16, int64_t columns, int64_t top, bool normalized, float depth) {
    const spec::Network known = network(net, inputs, hidden);
    return bfloat16 ? spec::classify_row(known, at<const uint16_t>(row), columns, top, normalized, depth)
                    : spec::classify_row(known, at<const float>(row), columns, top, normalized, depth);
  });
  py::class_<spec::BestFirst>(module, "BestFirst")
      .def(py::init<int64_t, int64_t, int64_t>())
      .def_property_readonly("bound", [](const spec::BestFirst& queue) { return spec::best_first_bound(queue.state); })
      .def("pop_count", [](const spec::BestFirst& queue) { return spec::pop_count(queue.state); })
      .def("fill_count", [](const spec::BestFirst& queue) { return spec::fill_count(queue.state); })
      .def("push",
           [](spec::BestFirst& queue, uintptr_t parents, uintptr_t depths_of_parents, uintptr_t tokens,
              uintptr_t log_probs, uintptr_t scores, int64_t count) {
             return spec::push(queue.state, at<const int64_t>(parents), at<const int64_t>(depths_of_parents),
                               at<const int64_t>(tokens), at<const float>(log_probs), at<const float>(scores), count);
           })
      .def("draw", &draw);
  module.def("strict_attention", [](bool bfloat16, const std::vector<int64_t>& shape, float scale, uintptr_t query,
                                    uintptr_t keys, uintptr_t values, uintptr_t mask, uintptr_t out) {
    py::gil_scoped_release release;
    const auto visible = spec::visible_by_mask(shape[2], shape[3], at<const uint8_t>(mask));
    attend(bfloat16, shape, scale, query, keys, values, visible, out);
  });
  module.def("strict_cached_attention",
             [](bool bfloat16, const std::vector<int64_t>& shape, float scale, uintptr_t query, uintptr_t keys,
                uintptr_t values, int64_t columns, uintptr_t nodes, uintptr_t counts, uintptr_t prefix, uintptr_t live,
                uintptr_t out) {
               py::gil_scoped_release release;
               const auto visible =
                   spec::visible_by_paths(shape[2], columns, at<const int32_t>(nodes), at<const int32_t>(counts),
                                          *at<const int32_t>(prefix), *at<const int32_t>(live));
               attend(bfloat16, shape, scale, query, keys, values, visible, out);
             });
  module.def("beam_observation", [](const std::vector<int64_t>& window, float pad, float lowest, uintptr_t scores,
                                    uintptr_t depths, int64_t count, float first_fact, float second_fact,
                                    uintptr_t out) {
    const spec::BeamWindow shown{window[0], window[1], window[2], window[3], window[4], pad, lowest};
    spec::beam_observation(shown, at<const float>(scores), at<const int64_t>(depths), count, first_fact, second_fact,
                           at<float>(out));
  });
  module.def("best_action", [](const std::vector<int64_t>& sizes, const std::vector<uintptr_t>& parameters, bool tanh,
                               uintptr_t observation) {
    std::vector<const float*> addresses;
    for (const uintptr_t address : parameters) addresses.push_back(at<const float>(address));
    return spec::best_action(sizes, addresses, tanh, at<const float>(observation));
  });
  module.def("keyed_gumbel_argmax", [](uintptr_t scores, int64_t size, uint64_t seed, uint64_t position) {
    py::gil_scoped_release release;
    return spec::keyed_gumbel_argmax(at<const float>(scores), size, seed, position);
  });
}
