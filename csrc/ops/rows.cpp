// Ops over rows of logits: float32 or bfloat16 as they stand, float16 as a copy.
#include <pybind11/stl.h>

#include "ops/ops.hpp"
#include "spec/candidates.hpp"
#include "spec/coupling.hpp"
#include "spec/entropy.hpp"
#include "spec/gumbel.hpp"
#include "spec/mixing.hpp"
#include "spec/top_children.hpp"

namespace ops {
namespace {

constexpr int64_t kMostTokens = 1 << 24;  // as of a config

py::tuple top_children(handle logits, int64_t k, bool normalized) {
  const auto given = take_rows_input(logits, "logits");
  require(k >= 1 && given.columns() >= 1, "k", k, "1 or more, of 1 column or more");
  k = std::min(k, given.columns());
  const auto log_probs = make<float>({given.rows(), k});
  const auto columns = make<int64_t>({given.rows(), k});
  {
    py::gil_scoped_release release;
    by_dtype(given, [&](const auto* rows) {
      spec::top_children(rows, given.rows(), given.columns(), given.stride(), k, normalized, log_probs.at(), columns.at());
    });
  }
  return py::make_tuple(log_probs.object, columns.object);
}

// limit: an int32 tensor, or a number, than which the results are no wider then.
py::tuple best_candidates(handle logits, handle scores, handle live, int64_t most, handle limit, handle log_gate,
                          handle bound, bool normalized) {
  const auto given = take_rows_input(logits, "logits", 1);
  const int64_t rows = given.rows(), columns = given.columns();
  const auto paths = take_input<float>(scores, "scores", {rows});
  require_width(most, 1, "most");
  const int64_t limited = number_or<int32_t>(limit, "limit", INT32_MAX);
  if (PyLong_Check(limit.ptr())) most = std::clamp<int64_t>(limited, 1, most);
  const int64_t wanted = std::clamp<int64_t>(limited, 0, std::min(most, rows * columns)), there = take_count(live, "live", rows);
  const float gate = number_or<float>(log_gate, "log_gate", spec::kLowest);
  const float above = number_or<float>(bound, "bound", spec::kLowest);
  const auto out_rows = make<int64_t>({most}), out_columns = make<int64_t>({most});
  const auto log_probs = make<float>({most}), sums = make<float>({most});
  size_t count = 0;
  {
    py::gil_scoped_release release;
    std::vector<spec::Candidate> found;
    if (wanted > 0)
      found = by_dtype(given, [&](const auto* values) {
        return spec::best_candidates(values, there, columns, given.stride(), paths.at(), wanted, gate, above, normalized);
      });
    count = found.size();
    found.resize(static_cast<size_t>(most), spec::Candidate{0.0f, 0.0f, 0.0f, 0, 0});
    for (int64_t i = 0; i < most; ++i) {
      const spec::Candidate& candidate = found[static_cast<size_t>(i)];
      out_rows[i] = candidate.row;
      out_columns[i] = candidate.column;
      log_probs[i] = candidate.log_prob;
      sums[i] = candidate.score;
    }
  }
  return py::make_tuple(out_rows.object, out_columns.object, log_probs.object, sums.object,
                        make_count(static_cast<int64_t>(count)));
}

py::object top_entropy(handle logits, int64_t top, bool normalized) {
  const auto given = take_rows_input(logits, "logits");
  require(top >= 1 && given.columns() >= 1, "top", top, "1 or more, of 1 column or more");
  const auto entropies = make<float>({given.rows()});
  {
    py::gil_scoped_release release;
    by_dtype(given, [&](const auto* rows) {
      spec::top_entropy(rows, given.rows(), given.columns(), given.stride(), top, normalized, entropies.at());
    });
  }
  return entropies.object;
}

template <typename T>
py::tuple mixed(const Rows& given, int64_t more, bool normalized, const std::vector<double>& shares,
                const std::vector<int64_t>& places, const std::vector<double>& probabilities) {
  using Bits = std::conditional_t<std::is_same_v<T, border::bfloat16>, uint16_t, float>;
  const int64_t rows = given.rows(), columns = given.columns();
  const auto wide = make<T>({rows, columns + more});
  const auto raised = make<uint8_t>({rows, columns + more});
  std::fill(raised.at(), raised.at() + raised.count(), uint8_t{0});
  if (std::any_of(places.begin(), places.end(), [&](int64_t place) { return place < 0 || place >= wide.count(); }))
    refuse("places: not all of them are in the rows");
  {
    py::gil_scoped_release release;
    spec::mix_rows(static_cast<const Bits*>(given.data), rows, columns, given.stride(), more, normalized, kFaint, shares,
                   places, probabilities, static_cast<Bits*>(wide.data), raised.at());
  }
  return py::make_tuple(wide.object, raised.object);
}

}  // namespace

py::tuple mix_rows(handle logits, int64_t more, const std::vector<double>& left, const std::vector<int64_t>& places,
                   const std::vector<double>& probabilities, bool normalized) {
  const auto given = take_rows_input(logits, "logits");
  require(static_cast<int64_t>(left.size()) == given.rows(), "left", static_cast<int64_t>(left.size()), "one for each row");
  require(places.size() == probabilities.size(), "probabilities", static_cast<int64_t>(probabilities.size()),
          "one for each place");
  require_width(more, 0, "more");
  return given.half() ? mixed<border::bfloat16>(given, more, normalized, left, places, probabilities)
                      : mixed<float>(given, more, normalized, left, places, probabilities);
}

namespace {

int64_t keyed_gumbel_argmax(handle scores, uint64_t seed, uint64_t position) {
  const auto given = take_input<float>(scores, "scores", {kAny});
  py::gil_scoped_release release;
  return spec::keyed_gumbel_argmax(given.at(), given.size(0), seed, position);
}

py::object couple(handle logits, handle token_ids, handle positions, handle seed, handle scale) {
  border::Tensor read;
  py::object floats;  // the coupling reads float32
  if (border::read(logits, read) && read.dtype == border::DtypeOf<border::bfloat16>::dtype) floats = logits.attr("float")();
  const auto given = take_rows_input(floats ? handle(floats) : logits, "logits", 1);
  const int64_t rows = given.rows(), columns = given.columns();
  const auto tokens = take_input_or_none<int64_t>(token_ids, "token_ids", {columns});
  const auto places = take_input<int64_t>(positions, "positions", {rows});
  if (tokens) require_below(tokens.at(), columns, kMostTokens, "token_ids");
  const uint64_t key = take_one<uint64_t>(seed, "seed");
  const float by = take_one<float>(scale, "scale");
  const auto coupled = make<float>({rows, columns});
  {
    py::gil_scoped_release release;
    spec::couple(given.floats(), rows, columns, given.stride(), tokens.at(), places.at(), key, by, coupled.at());
  }
  return coupled.object;
}

const Ops kRows([](py::module_& module) {
  module.def("top_children", top_children);
  module.def("best_candidates", best_candidates);
  module.def("top_entropy", top_entropy);
  module.def("mix_rows", mix_rows);
  module.def("keyed_gumbel_argmax", keyed_gumbel_argmax);
  module.def("couple", couple);
});

}  // namespace
}  // namespace ops
