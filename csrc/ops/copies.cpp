// The classes of csrc/spec/copies.hpp for Python; tensors and indices are checked here.
#include <pybind11/stl.h>

#include "ops/ops.hpp"
#include "spec/copies.hpp"

namespace ops {
namespace {

constexpr int64_t kMostColumns = int64_t{1} << 31, kMostFree = 1 << 20, kMostLength = int64_t{1} << 31;

py::dict dict_of(const spec::Shares& shares) {
  py::dict out;
  for (const spec::Share& share : shares) out[py::int_(share.token)] = share.probability;
  return out;
}

// Length and followers of each match, the longest first.
py::list matches(const spec::Suffixes& suffixes, const spec::Tokens& context) {
  py::list out;
  for (const auto& match : suffixes.matches(spec::Context(context.rbegin(), context.rend()))) {
    py::dict followers;
    if (match.followers)
      for (const auto& count : match.followers->counts()) followers[py::int_(count.token)] = count.times;
    else
      followers[py::int_(suffixes.follower(match))] = 1;
    out.append(py::make_tuple(match.length, followers));
  }
  return out;
}

// Plan the copies for the rows of these nodes; false if there are none. tree: tokens and parents.
bool planned(const spec::Copies& copies, handle tree, handle nodes, handle live, int64_t width, spec::MixturePlan& out) {
  const border::Parts given(tree, "tree", 2);
  const auto carried = take_input<int64_t>(given[0], "tokens", {kAny});
  const auto above = take_input<int64_t>(given[1], "parents", {carried.size(0)});
  const auto rows = take_input<int64_t>(nodes, "nodes", {kAny});
  const int64_t count = take_count(live, "live", rows.size(0));
  border::require_below(rows.at(), count, carried.size(0), "nodes");
  require(width >= 0 && width < kMostColumns, "width", width, "0 to 2^31 - 1");
  return copies.plan(carried.at(), above.at(), rows.at(), count, width, out);
}

// None where nothing is copied, else what ops.mix_rows takes, and the tokens of the new columns.
py::object plan(const spec::Copies& copies, handle tree, handle nodes, handle live, int64_t width) {
  spec::MixturePlan out;
  if (!planned(copies, tree, nodes, live, width, out)) return py::none();
  return py::make_tuple(out.left, out.places, out.gains, out.fresh);
}

// None where nothing is copied, else the results of ops.mix_rows for that plan, and the tokens of the new columns.
py::object mix(const spec::Copies& copies, handle logits, handle tree, handle nodes, handle live, bool normalized) {
  const auto given = take_rows_input(logits, "logits");
  border::Tensor asked;
  if (border::read(logits, asked) && asked.dtype == border::Dtype{border::kFloat, 16})  // the results would be others
    border::refuse("logits", border::described(logits), "float32 or bfloat16");
  take_input<int64_t>(nodes, "nodes", {given.rows()});
  spec::MixturePlan out;
  if (!planned(copies, tree, nodes, live, given.columns(), out)) return py::none();
  out.left.resize(static_cast<size_t>(given.rows()), 1.0);
  const py::tuple mixed = mix_rows(logits, static_cast<int64_t>(out.fresh.size()), out.left, out.places, out.gains, normalized);
  return py::make_tuple(mixed[0], mixed[1], out.fresh);
}

// None where there are none, else the parts of an ops.select.Free.
// tree: tokens, parents, path log-probabilities and size.
py::object free_nodes(const spec::Copies& copies, handle tree, handle nodes, handle live, int64_t most,
                             double least, const spec::SuccessorTable* table) {
  const border::Parts given(tree, "tree", 4);
  const auto carried = take_input<int64_t>(given[0], "tokens", {kAny});
  const int64_t room = carried.size(0), there = take_count(given[3], "size", room);
  const auto above = take_input<int64_t>(given[1], "parents", {room});
  const auto paths = take_input<float>(given[2], "scores", {room});
  const auto below = take_input<int64_t>(nodes, "nodes", {kAny});
  const int64_t count = take_count(live, "live", below.size(0));
  border::require_below(below.at(), count, there, "nodes");
  require(most <= kMostFree, "most", most, "at most 2^20");
  const spec::FreeNodes out =
      copies.free({carried.at(), above.at(), paths.at(), there, below.at(), count}, most, least, table);
  if (out.tokens.empty()) return py::none();
  return py::make_tuple(out.parents, out.tokens, out.log_probs, out.marks, out.ranks);
}

// Where copies are given, they are told what was committed in the same call.
void learn(spec::SuccessorTable& table, handle tokens, const spec::Tokens& path, handle successors,
           handle probabilities, spec::Copies* copies, const spec::Tokens& committed) {
  const auto carried = take_input<int64_t>(tokens, "tokens", {kAny});
  const int64_t nodes = carried.size(0);
  const auto next = take_input<int64_t>(successors, "successors", {border::at_least(nodes), kAny});
  const auto shares = take_input<float>(probabilities, "probabilities", {next.size(0), next.size(1)});
  border::require_below(path.data(), static_cast<int64_t>(path.size()), nodes, "path");
  table.learn(carried.at(), nodes, path, next.at(), shares.at(), next.size(1));
  if (copies) copies->observe(committed);
}

// Length and followers, with their counts, of each length of match, the longest first.
py::list recall(const spec::TextMemory& memory, const spec::Tokens& context) {
  py::list out;
  for (const spec::Recalled& match : memory.recall(spec::Context(context.rbegin(), context.rend()), 0)) {
    py::dict followers;
    for (const spec::Share& share : match.followers) followers[py::int_(share.token)] = static_cast<int64_t>(share.probability);
    out.append(py::make_tuple(match.length, followers));
  }
  return out;
}

bool remember(spec::TextMemory& memory, const spec::Tokens& tokens) {
  for (const int64_t token : tokens) require(token >= 0 && token < kMostLength, "tokens", token, "0 to 2^31 - 1");
  return memory.add(tokens);
}

void limit(spec::TextMemory& memory, int64_t bytes) {
  require(bytes >= 0 && bytes < kMostLength, "bytes", bytes, "0 to 2^31 - 1");
  memory.limit(bytes);
}

py::bytes records(const std::vector<spec::Tokens>& texts) {
  std::string out;
  for (const spec::Tokens& text : texts) spec::TextMemory::record(text, out);
  return out;
}

void add_to(py::module_& module) {
  py::class_<spec::TextMemory, std::shared_ptr<spec::TextMemory>>(module, "TextMemory")
      .def(py::init([](int64_t bytes) {
        auto made = std::make_shared<spec::TextMemory>(0);
        limit(*made, bytes);
        return made;
      }))
      .def("limit", limit)
      .def("add", remember)
      .def("recall", recall)
      .def("read",
           [](spec::TextMemory& memory, const py::bytes& data, int64_t vocabulary) {
             require(vocabulary <= kMostLength, "vocabulary", vocabulary, "up to 2^31");
             return memory.read(data, vocabulary);
           })
      .def_static("records", records)
      .def("texts", &spec::TextMemory::texts)
      .def_property_readonly("bytes", &spec::TextMemory::bytes);
  py::class_<spec::Suffixes>(module, "Suffixes")
      .def(py::init([](int64_t shortest, int64_t longest) {
        require(longest >= 1 && longest < kMostLength, "longest", longest, "1 to 2^31 - 1");
        return new spec::Suffixes(shortest, longest);
      }))
      .def_property_readonly("tail",
                             [](const spec::Suffixes& suffixes) {
                               const spec::Context last = suffixes.context();
                               return spec::Tokens(last.rbegin(), last.rend());
                             })
      .def("become", &spec::Suffixes::become)
      .def("restart", [](spec::Suffixes& suffixes, spec::Tokens before) { suffixes.restart(std::move(before)); })
      .def("extend",
           [](spec::Suffixes& suffixes, const spec::Tokens& tokens) {
             for (const int64_t token : tokens) suffixes.extend(token);
           })
      .def("matches", matches);
  py::class_<spec::SuccessorTable>(module, "SuccessorTable")
      .def(py::init<>())
      .def("learn", learn, py::arg("tokens"), py::arg("path"), py::arg("successors"), py::arg("probabilities"),
           py::arg("copies") = nullptr, py::arg("committed") = spec::Tokens())
      .def("row", [](const spec::SuccessorTable& table, int64_t token) { return dict_of(table.row(token)); })
      .def("clear", &spec::SuccessorTable::clear);
  py::class_<spec::Copies>(module, "Copies")
      .def(py::init([](std::vector<double> hits, double weight, double ceiling, int64_t followers) {
        require(!hits.empty(), "hits", 0, "one length or more");
        require(followers >= 1, "followers", followers, "1 or more");
        return new spec::Copies(std::move(hits), weight, ceiling, static_cast<size_t>(followers));
      }))
      .def("begin", &spec::Copies::begin, py::arg("prompt"), py::arg("expected"), py::arg("memory") = nullptr)
      .def("clear", &spec::Copies::clear)
      .def("observe", &spec::Copies::observe)
      .def("columns",
           [](spec::Copies& copies, handle ids) {
             const auto known = border::take_input_or_none<int64_t>(ids, "token_ids", {kAny});
             if (ids.is_none()) return copies.columns(nullptr, 0);
             static const int64_t none = 0;  // an empty tensor has no address
             copies.columns(known.at() ? known.at() : &none, known.size(0));
           })
      .def("plan", plan)
      .def("mix", mix)
      .def("free", free_nodes);
}

const Ops kCopies(add_to);

}  // namespace
}  // namespace ops
