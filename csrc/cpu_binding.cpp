// specengine._cpu: the forward of csrc/cpu over raw addresses. Its only caller is specengine/modeling/native.py, which has
// checked device, dtype, shape and contiguity.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/checksum.hpp"
#include "cpu/decoder.hpp"
#include "cpu/eagle.hpp"
#include "cpu/isa.hpp"

namespace py = pybind11;

namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

cpu::Kind kind_of(const std::string& name) {
  static const std::vector<std::string> names{"f32", "bf16", "i8", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k"};
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return static_cast<cpu::Kind>(i);
  throw std::invalid_argument("kind: got " + name);
}

const cpu::Kernels& kernels_of(const std::string& name) {
  for (const cpu::Kernels* kernels : cpu::available_kernels())
    if (kernels->name == name) return *kernels;
  throw std::invalid_argument("instruction set: this machine has no " + name);
}

// rows: (positions, count, prefix, start, seen, words)
cpu::Rows rows_of(const std::vector<int64_t>& rows) {
  cpu::Rows given;
  given.positions = reinterpret_cast<const int64_t*>(rows[0]);
  given.count = rows[1];
  given.prefix = rows[2];
  given.start = rows[3];
  given.seen = reinterpret_cast<const uint64_t*>(rows[4]);
  given.words = rows[5];
  return given;
}

// A decoder with the weights that it reads.
struct Model {
  std::shared_ptr<cpu::Weights> weights;
  cpu::Decoder decoder;
};

struct Draft {
  std::shared_ptr<cpu::Weights> weights;
  cpu::Eagle head;
};

}  // namespace

PYBIND11_MODULE(_cpu, module) {
  module.attr("INTERFACE") = 3;  // specengine/modeling/native.py asks for it: an extension may be left from other sources
  module.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const cpu::Kernels* kernels : cpu::available_kernels()) names.push_back(kernels->name);
    return names;
  });
  module.def("checksum", [](uintptr_t bytes, int64_t count, int threads) {
    py::gil_scoped_release release;
    return cpu::checksum(at<const unsigned char>(bytes), count, threads);
  });
  py::class_<cpu::Weights, std::shared_ptr<cpu::Weights>>(module, "Weights")
      .def(py::init<int>())
      .def_property_readonly("bytes", &cpu::Weights::bytes)
      .def("add_matrix",
           [](cpu::Weights& weights, const std::string& name, const std::string& kind, int64_t outputs,
              int64_t inputs) { weights.add_matrix(name, kind_of(kind), outputs, inputs); })
      .def("pack",
           [](cpu::Weights& weights, const std::string& name, const std::string& from, int64_t first, int64_t count,
              uintptr_t rows, uintptr_t order) {
             py::gil_scoped_release release;
             weights.pack(name, kind_of(from), first, count, at<const uint8_t>(rows), at<const int32_t>(order));
           })
      .def("add_vector", [](cpu::Weights& weights, const std::string& name, uintptr_t values, int64_t count) {
        weights.add_vector(name, at<const float>(values), count);
      });
  py::class_<Model>(module, "Decoder")
      // sizes: layers, hidden, vocabulary, query heads, key-value heads, head size
      .def(py::init([](const std::string& kernels, const std::vector<int64_t>& sizes, float eps,
                       std::shared_ptr<cpu::Weights> weights, std::vector<float> frequencies, float factor) {
        const cpu::Shape shape{sizes[0], sizes[1], sizes[2], {sizes[3], sizes[4], sizes[5]}, eps};
        const cpu::Weights& given = *weights;
        return new Model{std::move(weights), cpu::Decoder(kernels_of(kernels), shape, given,
                                                          cpu::Rope(std::move(frequencies), factor))};
      }))
      // chosen: (tokens, logits, count)
      .def("forward",
           [](Model& model, const std::vector<int64_t>& rows, uintptr_t tokens, uintptr_t slab, int64_t capacity,
              bool half, const std::vector<int64_t>& features, uintptr_t states, uintptr_t logits, int64_t first_logits,
              const std::vector<int64_t>& chosen, int64_t layers, int threads) {
             const cpu::Decoder::Call call{rows_of(rows), at<const int64_t>(tokens), at<void>(slab), capacity, half,
                                           features, at<float>(states), at<float>(logits), first_logits, chosen[2],
                                           reinterpret_cast<int64_t*>(chosen[0]), reinterpret_cast<float*>(chosen[1]),
                                           layers};
             py::gil_scoped_release release;
             model.decoder.forward(call, threads);
           })
      .def("read",
           [](Model& model, uintptr_t states, int64_t rows, uintptr_t logits, int threads) {
             py::gil_scoped_release release;
             model.decoder.read(at<const float>(states), rows, at<float>(logits), threads);
           })
      .def("embedding", [](Model& model, int64_t token, uintptr_t out) {
        model.decoder.embedding(token, at<float>(out));
      });
  py::class_<Draft>(module, "Eagle")
      // sizes: hidden, draft vocabulary, query heads, key-value heads, head size; flags: norm_before_residual,
      // norm_logits, norm_recurrent
      .def(py::init([](const std::string& kernels, const std::vector<int64_t>& sizes, const std::vector<bool>& flags,
                       float eps, std::shared_ptr<cpu::Weights> weights, std::vector<float> frequencies, float factor) {
        const cpu::EagleShape shape{sizes[0], sizes[1], {sizes[2], sizes[3], sizes[4]}, eps, flags[0], flags[1], flags[2]};
        const cpu::Weights& given = *weights;
        return new Draft{std::move(weights), cpu::Eagle(kernels_of(kernels), shape, given,
                                                        cpu::Rope(std::move(frequencies), factor))};
      }))
      .def("forward",
           [](Draft& draft, const std::vector<int64_t>& rows, uintptr_t hidden, uintptr_t embeddings, uintptr_t slab,
              int64_t capacity, bool half, uintptr_t states, uintptr_t logits, int64_t first_logits, int threads) {
             const cpu::Eagle::Call call{rows_of(rows), at<const float>(hidden), at<const float>(embeddings),
                                         at<void>(slab), capacity, half, at<float>(states), at<float>(logits),
                                         first_logits};
             py::gil_scoped_release release;
             draft.head.forward(call, threads);
           })
      .def("fuse", [](Draft& draft, uintptr_t features, int64_t rows, uintptr_t out, int threads) {
        py::gil_scoped_release release;
        draft.head.fuse(at<const float>(features), rows, at<float>(out), threads);
      });
}
