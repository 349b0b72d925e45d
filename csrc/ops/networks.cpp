// Ops of the small networks that some policies ask.
#include "ops/ops.hpp"
#include "spec/classifier.hpp"
#include "spec/decisions.hpp"

namespace ops {
namespace {

constexpr double kLowestShown = -1e4;  // finite, so that an impossible candidate does not silence a network

// parameters: hidden weight and bias, output weight and bias.
spec::Network take_network(handle object) {
  const Parts parameters(object, "net", 4);
  const auto weight = take<float>(parameters[0], "hidden weight", {kAny, kAny});
  const int64_t hidden = weight.size(0), inputs = weight.size(1);
  return {weight.at(), take<float>(parameters[1], "hidden bias", {hidden}).at(),
          take<float>(parameters[2], "output weight", {1, hidden}).at(), take_one<float>(parameters[3], "output bias"),
          inputs, hidden};
}

py::object mlp(handle features, handle net) {
  const spec::Network known = take_network(net);
  border::Tensor shape;
  if (!border::read(features, shape) || shape.rank < 1 || shape.size(shape.rank - 1) != known.inputs)
    border::refuse("features", border::described(features), "float32 [..., " + std::to_string(known.inputs) + "], on the CPU");
  const auto given = take_flat_input<float>(features, "features");
  py::tuple sizes(static_cast<size_t>(shape.rank - 1));
  for (int axis = 0; axis + 1 < shape.rank; ++axis) sizes[static_cast<size_t>(axis)] = py::int_(shape.size(axis));
  const int64_t rated = known.inputs ? given.count() / known.inputs : 0;
  const auto out = make<float>({rated});
  spec::probabilities(known, given.at(), rated, out.at());
  return shape.rank == 2 ? out.object : out.object.attr("view")(sizes);
}

py::object classify_paths(handle paths, handle entropies, handle depth, handle net) {
  const spec::Network known = take_network(net);
  require(known.inputs == 3, "net", known.inputs, "3 inputs");
  const auto given = take_input<float>(paths, "path_log_probs", {kAny, kAny});
  const int64_t rows = given.size(0), children = given.size(1);
  const auto entropy = take_input<float>(entropies, "entropies", {rows});
  const auto level = static_cast<float>(take_one<int32_t>(depth, "depth"));
  const auto out = make<float>({rows, children});
  spec::classify_paths(known, given.at(), entropy.at(), level, rows, children, out.at());
  return out.object;
}

py::object classify_row(handle logits, int64_t top, handle depth, handle net, bool normalized) {
  const spec::Network known = take_network(net);
  require(known.inputs >= 3, "net", known.inputs, "3 inputs or more");
  const auto given = take_rows_input(logits, "logits", 1);
  require(given.rows() == 1, "logits", given.rows(), "1 row");
  require(top >= 1, "top", top, "1 or more");
  const auto at_depth = static_cast<float>(take_one<int32_t>(depth, "depth"));
  const auto out = make<float>({1});
  out[0] = by_dtype(given, [&](const auto* row) {
    return spec::classify_row(known, row, given.columns(), std::min(top, given.columns()), normalized, at_depth);
  });
  return out.object;
}

// window: width, last, room, pad, repeats, units.
py::object beam_observation(handle scores, handle depths, handle live, handle expansions, handle context,
                            const py::tuple& window) {
  require(window.size() == 6, "window", static_cast<int64_t>(window.size()), "6 parts");
  const auto width = py::cast<int64_t>(window[0]), room = py::cast<int64_t>(window[2]), repeats = py::cast<int64_t>(window[4]);
  const auto pad = py::cast<double>(window[3]);
  const auto units = py::cast<std::pair<double, double>>(window[5]);
  require(width >= 1 && width < (1 << 20), "width", width, "1 or more");
  require_width(room, 0, "room");
  require_width(repeats, 0, "repeats");
  if (!(pad <= 0)) border::refuse("pad", std::to_string(pad), "0 or less");
  const int64_t done = take_one<int32_t>(expansions, "expansions");
  require(done >= 0 && done < (1 << 16), "expansions", done, "0 or more");
  const int64_t first = py::cast<bool>(window[1]) && done > 0 ? width + (done - 1) * width * width : 0;
  const int64_t last = std::min(width + done * width * width, first + room);
  const auto given = take_input<float>(scores, "scores", {kAny});
  const int64_t nodes = given.size(0);
  const auto levels = take_input<int64_t>(depths, "depths", {nodes});
  const int64_t count = take_count(live, "live", nodes);
  require_below(levels.at(), count, 1 << 16, "depths");
  const spec::BeamWindow shown{width,   first, last, room, repeats, static_cast<float>(pad),
                               static_cast<float>(pad < 0 ? pad : kLowestShown)};
  const double tokens = static_cast<double>(take_one<int64_t>(context, "context"));
  const auto out = make<float>({room + 2 * repeats});
  spec::beam_observation(shown, given.at(), levels.at(), count, static_cast<float>(tokens / units.first),
                         static_cast<float>(static_cast<double>(done) / units.second), out.at());
  return out.object;
}

py::object best_action(handle observation, handle layers, const std::string& activation) {
  if (activation != "relu" && activation != "tanh")
    border::refuse("activation", "'" + activation + "'", "relu, tanh");
  const Parts parameters(layers, "layers", -1);
  require(parameters.size() >= 2 && parameters.size() % 2 == 0, "layers", parameters.size(), "weights and biases");
  const auto first = take<float>(parameters[0], "weight", {at_least(1), at_least(1)});
  const auto seen = take_input<float>(observation, "observation", {first.size(1)});
  std::vector<int64_t> sizes{seen.count()};
  std::vector<const float*> addresses;
  for (py::ssize_t i = 0; i < parameters.size(); i += 2) {
    const auto weight = take<float>(parameters[i], "weight", {at_least(1), sizes.back()});
    sizes.push_back(weight.size(0));
    addresses.push_back(weight.at());
    addresses.push_back(take<float>(parameters[i + 1], "bias", {weight.size(0)}).at());
  }
  const auto out = make<int64_t>({1});
  out[0] = spec::best_action(sizes, addresses, activation == "tanh", seen.at());
  return out.object;
}

const Ops kNetworks([](py::module_& module) {
  module.def("mlp", mlp);
  module.def("classify_paths", classify_paths);
  module.def("classify_row", classify_row);
  module.def("beam_observation", beam_observation);
  module.def("best_action", best_action);
});

}  // namespace
}  // namespace ops
