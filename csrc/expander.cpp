// specengine._expander: the functions of csrc/spec over raw addresses. Their only caller is specengine/ops.py, which
// has checked device, dtype, shape and contiguity; an address as an integer costs the least per call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "spec/compaction.hpp"
#include "spec/gumbel.hpp"
#include "spec/top_children.hpp"
#include "spec/tree.hpp"

namespace py = pybind11;

namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

PYBIND11_MODULE(_expander, module) {
  module.def("ancestor_words", [](uintptr_t parents, int64_t nodes, uintptr_t out) {
    return spec::ancestor_words(at<const int64_t>(parents), nodes, at<uint64_t>(out));
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
  module.def("keyed_gumbel_argmax", [](uintptr_t scores, int64_t size, uint64_t seed, uint64_t position) {
    py::gil_scoped_release release;
    return spec::keyed_gumbel_argmax(at<const float>(scores), size, seed, position);
  });
}
