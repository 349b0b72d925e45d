// specengine._cpu: the forward of csrc/cpu over tensors, each of which is checked here for what csrc/cpu relies on, as are
// tokens, positions and cache slots. Networks are checked once, when they are made. One call at a time runs in each.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "border.hpp"
#include "cpu/checksum.hpp"
#include "cpu/decoder.hpp"
#include "cpu/eagle.hpp"
#include "cpu/isa.hpp"

namespace py = pybind11;
using border::at_least;
using border::kAny;
using border::require;
using border::take;
using border::take_or_none;
using py::handle;

namespace {

constexpr int kMostThreads = 1024;
constexpr int64_t kMostSize = int64_t{1} << 31, kMostCount = 4096;
constexpr int64_t kMostPositions = 1 << 24;  // a table of their rotations is kept

cpu::Kind kind_of(const std::string& name) {
  for (int i = 0; i < cpu::kKinds; ++i)
    if (cpu::stored_as(static_cast<cpu::Kind>(i)).name == name) return static_cast<cpu::Kind>(i);
  throw std::invalid_argument("kind: got " + name);
}

const char* numerics_of(const std::string& name) {
  for (const char* known : {cpu::kBfloat16, cpu::kInteger})
    if (name == known) return known;
  throw std::invalid_argument("numerics: got " + name + ", accepted bfloat16 or integer");
}

cpu::Activation activation_of(const std::string& name) {
  if (name == "silu") return cpu::Activation::silu;
  if (name == "gelu_tanh") return cpu::Activation::gelu_tanh;
  if (name == "clamped") return cpu::Activation::clamped;
  if (name == "relu") return cpu::Activation::relu;
  throw std::invalid_argument("activation: got " + name + ", accepted silu, gelu_tanh, clamped or relu");
}

cpu::Rope rope(std::vector<float> frequencies, float factor, const std::string& numerics, cpu::QueryFactors queries = {}) {
  return cpu::Rope(std::move(frequencies), factor, numerics == cpu::kInteger, std::move(queries));
}

const cpu::Kernels& kernels_of(const std::string& name, const std::string& numerics) {
  for (const cpu::Kernels* kernels : cpu::available_kernels(numerics_of(numerics)))
    if (kernels->name == name) return *kernels;
  throw std::invalid_argument("instruction set: this machine has no " + name + " of " + numerics + " numerics");
}

int threads_of(int64_t threads) {
  require(threads >= 1 && threads <= kMostThreads, "threads", threads, "1 to " + std::to_string(kMostThreads));
  return static_cast<int>(threads);
}

const cpu::Weights& given(const std::shared_ptr<cpu::Weights>& weights) {
  if (!weights) throw std::invalid_argument("weights: got None, accepted Weights");
  return *weights;
}

void require_sizes(const std::vector<int64_t>& sizes, size_t count) {
  require(sizes.size() == count, "sizes", static_cast<int64_t>(sizes.size()), std::to_string(count) + " numbers");
  for (const int64_t size : sizes) require(size >= 0 && size < kMostSize, "sizes", size, "0 to 2^31 - 1");
}

cpu::Heads heads_of(const int64_t* sizes) {
  const cpu::Heads heads{sizes[0], sizes[1], sizes[2]};
  for (int i = 0; i < 3; ++i) require(sizes[i] >= 1 && sizes[i] < kMostSize, "heads", sizes[i], "1 or more");
  require(heads.queries % heads.keys == 0, "query heads", heads.queries, "a multiple of the key-value heads");
  require(heads.size % 2 == 0, "head size", heads.size, "an even number");
  return heads;
}

void require_finite(float value, bool holds, const char* name, const char* accepted) {
  if (!std::isfinite(value) || !holds) border::refuse(name, std::to_string(value), accepted);
}

// What few networks have, by name:
//   query factors   of how many positions each is, and the factors
//   layer norms     no numbers: norms of what attention, networks and the head read are centred
//   parallel        no numbers: networks read what attention reads
//   gated last      no numbers: gates of Mamba-2 multiply what was normed
//   added epsilon   of norms of what attention and networks give
//   ahead           of each layer 1 where its rows see those after them, else 0: calls have no words then
//   latent          the sizes of latent attention in the order of cpu::LatentSizes; heads are one of keys then
using Traits = std::map<std::string, std::vector<double>>;

void require_known(const Traits& traits) {
  for (const auto& [name, numbers] : traits) {
    const bool counted = name == "query factors" || name == "latent" || name == "added epsilon" || name == "ahead";
    if (!counted && name != "layer norms" && name != "parallel" && name != "gated last")
      throw std::invalid_argument("traits: got " + name +
                                  ", accepted query factors, layer norms, parallel, gated last, added epsilon, ahead, latent");
    if (!counted) require(numbers.empty(), "numbers of a trait", static_cast<int64_t>(numbers.size()), "none");
    for (const double number : numbers) require_finite(static_cast<float>(number), true, "traits", "finite numbers");
  }
}

// Return a count that stands among a trait's numbers.
int64_t count_of(const std::vector<double>& numbers, size_t at, const char* name, int64_t least) {
  const double number = at < numbers.size() ? numbers[at] : -1.0;
  const bool whole = number >= static_cast<double>(least) && number < static_cast<double>(kMostSize) &&
                     number == static_cast<double>(static_cast<int64_t>(number));
  require(whole, name, static_cast<int64_t>(number), "whole numbers from " + std::to_string(least) + " to 2^31 - 1");
  return static_cast<int64_t>(number);
}

cpu::LatentSizes latent_of(const Traits& traits, const cpu::Heads& heads) {
  const auto found = traits.find("latent");
  if (found == traits.end()) return {};
  const std::vector<double>& numbers = found->second;
  require(numbers.size() == 6, "latent", static_cast<int64_t>(numbers.size()), "5 sizes and an epsilon");
  cpu::LatentSizes of;
  int64_t* const sizes[] = {&of.rank, &of.plain, &of.turned, &of.value, &of.query_rank};
  for (size_t i = 0; i < 5; ++i) {
    *sizes[i] = count_of(numbers, i, "sizes of latent attention", i < 4 ? 1 : 0);
    require(*sizes[i] % 2 == 0, "sizes of latent attention", *sizes[i], "even numbers");
  }
  of.eps = static_cast<float>(numbers[5]);
  require(of.rank % cpu::kDepth == 0, "channels of a latent", of.rank, "a multiple of 32");
  require(heads.keys == 1 && heads.size == of.rank + of.turned, "head size", heads.size,
          "one key-value head, of a latent and what is turned");
  return of;
}

cpu::QueryFactors queries_of(const Traits& traits) {
  const auto found = traits.find("query factors");
  if (found == traits.end()) return {};
  const std::vector<double>& numbers = found->second;
  cpu::QueryFactors queries{count_of(numbers, 0, "positions of a factor on queries", 1), {}};
  require(numbers.size() >= 2, "query factors", static_cast<int64_t>(numbers.size()) - 1, "1 or more");
  for (size_t i = 1; i < numbers.size(); ++i) queries.factors.push_back(static_cast<float>(numbers[i]));
  return queries;
}

// Each turns two channels of a head.
void require_frequencies(const std::vector<float>& frequencies, int64_t least, const cpu::Heads& heads) {
  const auto count = static_cast<int64_t>(frequencies.size());
  require(count >= least && count <= heads.size / 2, "frequencies", count,
          least == heads.size / 2 ? "half the head size" : "1 to half the head size");
}

// numbers: epsilon of the norms, scale of attention's scores or 0 for the common one, and factors on embeddings and on what
// is added to the residual stream; the divisor of logits; what tanh leaves of them, or 0 for all; and a factor on embeddings
// that are inputs of single layers.
cpu::Shape shape_of(const std::vector<int64_t>& sizes, const std::string& activation, const std::vector<float>& numbers) {
  require_sizes(sizes, 6);
  require(numbers.size() == 7, "numbers", static_cast<int64_t>(numbers.size()), "7");
  require_finite(numbers[1], numbers[1] >= 0.0f, "attention scale", "0 or more");
  for (const size_t i : {2, 3, 6}) require_finite(numbers[i], true, "factors", "finite numbers");
  require_finite(numbers[4], numbers[4] != 0.0f, "divisor", "a number other than 0");
  require_finite(numbers[5], numbers[5] >= 0.0f, "cap", "0 or more");
  const cpu::Form form{sizes[1], numbers[0], activation_of(activation), numbers[1], numbers[3]};
  return {sizes[0], sizes[1], sizes[2], heads_of(&sizes[3]), form, numbers[2], numbers[4], {}, numbers[5], numbers[6]};
}

// How layers with experts choose them: by softmax or sigmoid, either behind `normalised ` or not; how many a row uses, in how
// many groups they are, how many of these are kept, and by how many of their best, 1 or 2; the least sum of their weights,
// and the factor on these.
using Choice = std::tuple<std::string, std::vector<int64_t>, std::vector<float>>;

cpu::Routing routing_of(const Choice& given) {
  const auto& [scores, counts, numbers] = given;
  const bool normalised = scores.rfind("normalised ", 0) == 0;
  const std::string kind = normalised ? scores.substr(11) : scores;
  if (kind != "softmax" && kind != "sigmoid")
    throw std::invalid_argument("scores: got " + scores + ", accepted softmax or sigmoid, with or without normalised");
  require(counts.size() == 4, "routing", static_cast<int64_t>(counts.size()), "4 counts");
  require(counts[3] == 1 || counts[3] == 2, "best experts of a group", counts[3], "1 or 2");
  require(numbers.size() == 2, "routing", static_cast<int64_t>(numbers.size()), "2 numbers");
  require_finite(numbers[0], numbers[0] >= 0.0f, "least weight", "0 or more");
  require_finite(numbers[1], true, "factor of experts", "a finite number");
  return {counts[0], kind == "sigmoid", normalised, numbers[0], numbers[1], counts[1], counts[2], counts[3]};
}

// Of each layer the table of positions, -1 for none, and its window, 0 for none.
std::vector<cpu::Place> places_of(const std::vector<std::pair<int64_t, int64_t>>& given, int64_t layers, int64_t ropes) {
  require(static_cast<int64_t>(given.size()) == layers, "places", static_cast<int64_t>(given.size()), "one of each layer");
  std::vector<cpu::Place> places;
  for (const auto& [rope, window] : given) {
    require(rope >= -1 && rope < ropes, "positions", rope, "-1 to " + std::to_string(ropes - 1));
    require(window >= 0 && window < kMostSize, "window", window, "0 to 2^31 - 1");
    places.push_back({static_cast<int>(rope), window});
  }
  return places;
}

// Of each layer its key-value heads, the size of a head, and the layer whose keys and values it reads, -1 for its own, or
// -2 - i for those in slab i, which are another model's; empty where all layers have those of the sizes.
void add_keeps(const std::vector<std::tuple<int64_t, int64_t, int64_t>>& given, const cpu::Heads& heads,
               std::vector<cpu::Place>& places) {
  if (given.empty()) return;
  require(given.size() == places.size(), "keeps", static_cast<int64_t>(given.size()), "one of each layer, or none");
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& [keys, size, reads] = given[i];
    const int64_t own[] = {heads.queries, keys, size};
    heads_of(own);
    require(reads >= -1 - static_cast<int64_t>(given.size()) && reads < static_cast<int64_t>(i), "keys of layer", reads,
            "-1, a layer before, or -2 less the number of a slab");
    places[i].keys = keys, places[i].size = size, places[i].reads = reads;
  }
}

void add_ahead(const Traits& traits, std::vector<cpu::Place>& places) {
  const auto found = traits.find("ahead");
  if (found == traits.end()) return;
  require(found->second.size() == places.size(), "ahead", static_cast<int64_t>(found->second.size()), "one of each layer");
  for (size_t i = 0; i < places.size(); ++i) {
    const int64_t ahead = count_of(found->second, i, "ahead", 0);
    require(ahead <= 1, "ahead", ahead, "0 or 1");
    places[i].ahead = ahead == 1;
  }
}

// Where the rows of a forward stand. seen: int64 [rows, words] or None.
cpu::Rows rows_of(handle positions, int64_t prefix, int64_t start, handle seen) {
  const auto places = take<int64_t>(positions, "positions", {at_least(1)});
  cpu::Rows rows;
  rows.positions = places.at();
  rows.count = places.size(0);
  border::require_below(rows.positions, rows.count, kMostPositions, "positions");
  require(start >= 0 && start < kMostSize, "start", start, "0 or more");
  require(prefix >= 0 && prefix <= start, "prefix", prefix, "0 to " + std::to_string(start));
  rows.prefix = prefix;
  rows.start = start;
  if (!seen.is_none()) {
    const auto words = take<uint64_t>(seen, "words", {rows.count, at_least(1)});
    rows.seen = words.at();
    rows.words = words.size(1);
  }
  return rows;
}

// Keys and values of so many layers or more, and slots.
border::Tensor take_slab(handle object, int64_t layers, const cpu::Heads& heads, int64_t slots) {
  return border::take_real(object, "slab", {at_least(layers), 2, heads.keys, at_least(slots), heads.size});
}

bool is_half(const border::Tensor& slab) { return slab.dtype == border::DtypeOf<border::bfloat16>::dtype; }

// Logits of the last rows, [at most rows, vocabulary], or None.
border::Array<float> take_logits(handle object, int64_t rows, int64_t vocabulary) {
  const auto logits = take_or_none<float>(object, "logits", {kAny, vocabulary});
  if (!object.is_none()) require(logits.size(0) <= rows, "logits", logits.size(0), "at most a row for each token");
  return logits;
}

void require_matrix(cpu::Kind kind, int64_t outputs, int64_t inputs) {
  require(outputs >= 1 && outputs < kMostSize, "outputs", outputs, "1 to 2^31 - 1");
  require(inputs >= 1 && inputs < kMostSize, "inputs", inputs, "1 to 2^31 - 1");
  const int64_t block = cpu::stored_as(kind).file_inputs;
  require(inputs % block == 0, "inputs", inputs, "a multiple of " + std::to_string(block));
}

void pack(cpu::Weights& weights, const std::string& name, const std::string& from, int64_t first, handle rows,
          handle order) {
  const cpu::Kind kind = kind_of(from);
  const cpu::Matrix m = weights.stored(name);
  const int64_t each = cpu::stored_as(kind).row_bytes(m.inputs);
  border::Tensor data;
  const bool blocks = kind != cpu::Kind::f32 && kind != cpu::Kind::bf16;
  const border::Dtype wanted = blocks                     ? border::DtypeOf<uint8_t>::dtype
                               : kind == cpu::Kind::f32 ? border::DtypeOf<float>::dtype
                                                        : border::DtypeOf<border::bfloat16>::dtype;
  if (!border::read(rows, data) || !(data.dtype == wanted) || !data.is_contiguous() || each == 0 || data.bytes() % each)
    border::refuse("rows", border::described(rows), "whole rows of " + std::to_string(m.inputs) + " inputs as " + from +
                                                        ", contiguous, on the CPU");
  const int64_t count = data.bytes() / each;
  const bool fits = m.kind == kind || (cpu::stored_as(m.kind).quantize && !blocks);
  if (!fits) border::refuse("kind", from, "that of the matrix, or f32 or bf16 for i8 and int_i8");
  require(first >= 0 && first % cpu::kOutputs == 0, "first", first, "a multiple of 16");
  require(count <= m.outputs - first, "rows", count, "at most " + std::to_string(m.outputs - first));
  require(count % cpu::kOutputs == 0 || first + count == m.outputs, "rows", count, "a multiple of 16, or up to the last");
  const auto places = take_or_none<int32_t>(order, "order", {m.outputs});
  if (!order.is_none()) {
    require(count == m.outputs, "rows", count, "all of them where an order is given");
    border::require_below(places.at(), m.outputs, m.outputs, "order");
  }
  py::gil_scoped_release release;
  weights.pack(name, kind, first, count, static_cast<const uint8_t*>(data.data), places.at());
}

// A decoder with the weights that it reads.
struct Model {
  std::shared_ptr<cpu::Weights> weights;
  cpu::Decoder decoder;
  std::mutex turn;
};

// The memory of one sequence, whose calls wait for one another.
struct Kept {
  explicit Kept(const cpu::Recurrence& of) : memory(of) {}
  cpu::Memory memory;
  std::mutex turn;

  template <typename Body>
  auto locked(const Body& body) {
    const std::lock_guard<std::mutex> mine(turn);
    return body();
  }
  int64_t reach(int64_t length) { return locked([&] { return memory.reach(length); }); }
};

struct Draft {
  std::shared_ptr<cpu::Weights> weights;
  cpu::Eagle head;
  std::mutex turn;
};

// sizes: channels and taps of convolutions, heads of keys and of values, the sizes of both, and groups of heads that are
// normed together; empty where no layer has a state.
cpu::Recurrence recurrence_of(const std::vector<int64_t>& sizes) {
  cpu::Recurrence of;
  if (sizes.empty()) return of;
  require_sizes(sizes, 7);
  of.channels = sizes[0], of.taps = sizes[1], of.key_heads = sizes[2], of.heads = sizes[3];
  of.key_size = sizes[4], of.value_size = sizes[5], of.norms = sizes[6];
  require(of.channels >= 1, "channels", of.channels, "1 or more");
  require(of.taps >= 1 && of.taps <= kMostCount, "taps", of.taps, "1 to " + std::to_string(kMostCount));
  if (!of.heads) return of;
  require(of.key_heads >= 1 && of.heads % of.key_heads == 0, "value heads", of.heads, "a multiple of the key heads");
  require(of.key_size >= 1 && of.key_size % 4 == 0, "key size", of.key_size, "a multiple of 4");
  require(of.value_size >= 1 && of.value_size % cpu::kRows == 0, "value size", of.value_size, "a multiple of 16");
  require(of.norms == 0 || of.heads % of.norms == 0, "norms", of.norms, "0 or a divisor of the value heads");
  const int64_t channels = 2 * of.key_heads * of.key_size + of.heads * of.value_size;
  require(of.channels == channels, "channels", of.channels, std::to_string(channels));
  return of;
}

Kept* memory_of(const Model& model) {
  const cpu::Recurrence& of = model.decoder.shape().recurrence;
  require(of.layers > 0, "recurrent layers", of.layers, "1 or more");
  return new Kept(of);
}

void require_memory(const Model& model, const Kept* memory, int64_t committed) {
  const cpu::Recurrence& of = model.decoder.shape().recurrence;
  if (of.layers && !memory) border::refuse("memory", "None", "one of this decoder");
  if (!memory) return;
  require(of.layers && memory->memory.of() == of, "memory", memory->memory.of().layers, "one of this decoder");
  require(committed >= 0 && committed < kMostSize, "committed", committed, "0 or more");
}

// path: int64 [count or more], ascending: which slots behind `length` become those right behind it.
void keep(Kept& kept, int64_t length, handle path, int64_t count) {
  const auto places = take<int64_t>(path, "path", {at_least(count)});
  require(length >= 0 && length < kMostSize, "length", length, "0 or more");
  border::require_below(places.at(), count, kMostSize, "path");
  kept.locked([&] { kept.memory.keep(length, places.at(), count); });
}

// Where one lane's rows stand, and its keys and values: a slab for each kind of heads.
struct LaneOf {
  cpu::Rows rows;
  std::vector<border::Tensor> slabs;
};

// slab: a tensor, or a tuple of them where layers have heads of several kinds. Without words, rows of a decoder that reads
// slabs of another model see the prefix alone.
LaneOf take_lane(const Model& model, handle positions, int64_t prefix, int64_t start, handle seen, handle slab,
                 int64_t layers) {
  LaneOf lane{rows_of(positions, prefix, start, seen), {}};
  const auto& kinds = model.decoder.kinds();
  if (model.decoder.passed()) {
    if (!seen.is_none()) border::refuse("words", border::described(seen), "None, as rows see the prefix alone");
    lane.rows.see_prefix();
  }
  if (model.decoder.looks_ahead() && !seen.is_none())
    border::refuse("words", border::described(seen), "None, as layers say what rows see");
  const int64_t slots = model.decoder.passed() ? prefix : start + lane.rows.count;
  const bool many = py::isinstance<py::tuple>(slab);
  const auto count = static_cast<int64_t>(many ? py::len(slab) : 1);
  require(count == static_cast<int64_t>(kinds.size()), "slabs", count, std::to_string(kinds.size()));
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    const py::object one = many ? py::reinterpret_borrow<py::tuple>(slab)[kind] : py::reinterpret_borrow<py::object>(slab);
    lane.slabs.push_back(take_slab(one, model.decoder.kept(layers, kind), kinds[kind].heads, slots));
  }
  return lane;
}

// Adds the rows and slabs of lanes, one lane's behind another's. Returns how many rows there are.
int64_t add_lanes(cpu::Decoder::Call& call, const std::vector<LaneOf>& lanes) {
  int64_t rows = 0;
  call.half = is_half(lanes[0].slabs[0]);
  for (const LaneOf& lane : lanes) {
    call.lanes.push_back(lane.rows);
    call.lanes.back().first = rows;
    for (const border::Tensor& slab : lane.slabs) {
      require(is_half(slab) == call.half, "slab", slab.size(3), "slabs of one dtype");
      call.slabs.push_back({slab.data, slab.size(3)});
    }
    rows += lane.rows.count;
  }
  return rows;
}

// What a forward gives: for all rows, one lane's behind another's.
struct Wanted {
  const std::vector<int64_t>& features;
  handle states, logits, chosen, chosen_logits, added, routing;
};

// Takes what is wanted of a forward's experts: of each row what it adds, and its routing in each layer that has experts.
cpu::ExpertReads take_reads(const Model& model, const Wanted& wanted, int64_t rows, int64_t layers) {
  const int64_t routed = model.decoder.routed(layers), each = routed ? model.decoder.shape().form.routing.chosen : 0;
  cpu::ExpertReads reads;
  reads.added = take_or_none<int32_t>(wanted.added, "added", {rows}).at();
  reads.routing = take_or_none<int32_t>(wanted.routing, "routing", {routed, rows, each}).at();
  return reads;
}

// Returns how many distinct experts were read, over all layers.
int64_t forward(Model& model, const std::vector<LaneOf>& lanes, handle tokens, const Wanted& wanted, int64_t layers,
                int64_t threads, const std::vector<Kept*>& memories, const std::vector<int64_t>& committed) {
  const auto& [features, states, logits, chosen, chosen_logits, added, routing] = wanted;
  const cpu::Shape& shape = model.decoder.shape();
  cpu::Decoder::Call call{};
  const int64_t rows = add_lanes(call, lanes);
  const auto ids = take<int64_t>(tokens, "tokens", {rows});
  border::require_below(ids.at(), rows, shape.vocabulary, "tokens");
  border::require_below(features.data(), static_cast<int64_t>(features.size()), shape.layers + 1, "features");
  const auto width = static_cast<int64_t>(features.size()) * shape.hidden;
  const auto read = features.empty() ? border::Array<float>{} : take<float>(states, "states", {rows, width});
  const auto rated = take_logits(logits, rows, shape.vocabulary);
  const auto best = take_or_none<int64_t>(chosen, "best tokens", {rows, kAny});
  const int64_t count = chosen.is_none() ? 0 : best.size(1);
  require(count <= kMostCount, "best tokens", count, "at most " + std::to_string(kMostCount) + " of a row");
  const auto largest = count ? take<float>(chosen_logits, "best logits", {rows, count}) : border::Array<float>{};
  call.tokens = ids.at();
  call.features = features, call.states = read.at();
  call.logits = rated.at(), call.first_logits = logits.is_none() ? rows : rows - rated.size(0);
  call.count = count, call.chosen = best.at(), call.chosen_logits = largest.at();
  call.layers = layers, call.committed = committed;
  for (Kept* kept : memories) call.memories.push_back(&kept->memory);
  cpu::ExpertReads reads = take_reads(model, wanted, rows, layers);
  call.reads = &reads;
  const int team = threads_of(threads);
  py::gil_scoped_release release;
  const std::lock_guard<std::mutex> turn(model.turn);
  std::vector<std::unique_lock<std::mutex>> held;
  for (Kept* kept : memories) held.emplace_back(kept->turn);
  model.decoder.forward(call, team);
  return reads.distinct;
}

int64_t run(Model& model, handle positions, int64_t prefix, int64_t start, handle seen, handle tokens, handle slab,
            const std::vector<int64_t>& features, handle states, handle logits, handle chosen, handle chosen_logits,
            int64_t layers, int64_t threads, Kept* memory, int64_t committed, handle added, handle routing) {
  const cpu::Shape& shape = model.decoder.shape();
  require(layers >= 0 && layers <= shape.layers, "layers", layers, "0 to " + std::to_string(shape.layers));
  require_memory(model, memory, committed);
  const LaneOf lane = take_lane(model, positions, prefix, start, seen, slab, layers);
  const Wanted wanted{features, states, logits, chosen, chosen_logits, added, routing};
  if (!memory) return forward(model, {lane}, tokens, wanted, layers, threads, {}, {});
  return forward(model, {lane}, tokens, wanted, layers, threads, {memory}, {committed});
}

// Return how many lanes there are; sizes: of what there is one of each lane.
size_t require_lanes(const py::tuple& positions, const std::vector<size_t>& sizes) {
  const size_t count = positions.size();
  require(count >= 1, "lanes", 0, "1 or more");
  const std::string each = std::to_string(count) + ", one of each lane";
  for (const size_t size : sizes) require(size == count, "lanes", static_cast<int64_t>(size), each);
  return count;
}

// Of each lane positions, prefix, start, words, slab, memory and committed slots, as in run; tokens and results are of all
// lanes' rows.
int64_t run_lanes(Model& model, const py::tuple& positions, const std::vector<int64_t>& prefixes,
                  const std::vector<int64_t>& starts, const py::tuple& words, handle tokens, const py::tuple& slabs,
                  const std::vector<int64_t>& features, handle states, handle logits, handle chosen, handle chosen_logits,
                  int64_t threads, const std::vector<Kept*>& memories, const std::vector<int64_t>& committed) {
  const cpu::Shape& shape = model.decoder.shape();
  const size_t count = require_lanes(positions, {prefixes.size(), starts.size(), words.size(), slabs.size()});
  if (shape.recurrence.layers || !memories.empty()) require_lanes(positions, {memories.size(), committed.size()});
  std::vector<LaneOf> lanes;
  for (size_t i = 0; i < count; ++i) {
    lanes.push_back(take_lane(model, positions[i], prefixes[i], starts[i], words[i], slabs[i], shape.layers));
    if (memories.empty()) continue;
    require_memory(model, memories[i], committed[i]);
    const auto own = memories.begin() + static_cast<std::ptrdiff_t>(i);
    require(std::find(memories.begin(), own, *own) == own, "memory", static_cast<int64_t>(i), "one of each lane's own");
  }
  const Wanted wanted{features, states, logits, chosen, chosen_logits, py::none(), py::none()};
  return forward(model, lanes, tokens, wanted, shape.layers, threads, memories, committed);
}

// Runs all layers over rows of states, float32 [rows][hidden], instead of tokens; out: behind the final norm, the same;
// logits: of the last rows, or None. Of each lane positions, prefix, start, words and slab, as in run.
void run_from(Model& model, const py::tuple& positions, const std::vector<int64_t>& prefixes,
              const std::vector<int64_t>& starts, const py::tuple& words, handle inputs, const py::tuple& slabs, handle out,
              handle logits, int64_t threads) {
  const cpu::Shape& shape = model.decoder.shape();
  require(shape.recurrence.layers == 0, "layers with a memory", shape.recurrence.layers, "none behind other inputs");
  require(model.decoder.own_channels() == 0, "inputs of single layers", model.decoder.own_channels(), "none");
  const size_t count = require_lanes(positions, {prefixes.size(), starts.size(), words.size(), slabs.size()});
  std::vector<LaneOf> lanes;
  for (size_t i = 0; i < count; ++i)
    lanes.push_back(take_lane(model, positions[i], prefixes[i], starts[i], words[i], slabs[i], shape.layers));
  cpu::Decoder::Call call{};
  const int64_t rows = add_lanes(call, lanes);
  const auto rated = take_logits(logits, rows, shape.vocabulary);
  call.inputs = take<float>(inputs, "inputs", {rows, shape.hidden}).at();
  call.features = {shape.layers}, call.states = take<float>(out, "states", {rows, shape.hidden}).at();
  call.logits = rated.at(), call.first_logits = logits.is_none() ? rows : rows - rated.size(0);
  call.layers = shape.layers;
  const int team = threads_of(threads);
  py::gil_scoped_release release;
  const std::lock_guard<std::mutex> turn(model.turn);
  model.decoder.forward(call, team);
}

// Fills a slab from slot `start` on with keys and values of features, float32 [rows][inputs of the fusion].
void remember(Model& model, handle positions, int64_t start, handle features, handle slab, int64_t threads) {
  const cpu::Shape& shape = model.decoder.shape();
  const int64_t width = model.decoder.fused_inputs();
  require(width > 0, "fusion", width, "a decoder with model.fc");
  cpu::Decoder::Call call{};
  const int64_t rows = add_lanes(call, {take_lane(model, positions, start, start, py::none(), slab, shape.layers)});
  const auto read = take<float>(features, "features", {rows, width});
  const int team = threads_of(threads);
  py::gil_scoped_release release;
  const std::lock_guard<std::mutex> turn(model.turn);
  model.decoder.remember(call, read.at(), team);
}

// One lane of a head's forward, and what its hidden states are.
struct HeadLane {
  LaneOf lane;
  border::Array<float> features, states;
  border::Array<int64_t> sources;
};

// features, or rows `sources` of `states`: the hidden states that the rows are run from.
HeadLane take_head_lane(const Draft& draft, LaneOf lane, handle features, handle states, handle sources) {
  const cpu::EagleShape& shape = draft.head.shape();
  const int64_t rows = lane.rows.count;
  const auto given = take_or_none<float>(features, "features", {rows, draft.head.fused_inputs()});
  const auto before = take_or_none<float>(states, "states", {at_least(1), shape.hidden});
  const auto places = take_or_none<int64_t>(sources, "sources", {rows});
  if (before && places) border::require_below(places.at(), rows, before.size(0), "sources");
  if (!given && !(before && places)) border::refuse("features", "None", "None beside states and sources alone");
  return {std::move(lane), given, before, places};
}

void forward_head(Draft& draft, const Model& target, const std::vector<HeadLane>& lanes, handle tokens, handle out,
                  handle logits, int64_t threads) {
  const cpu::EagleShape& shape = draft.head.shape();
  const cpu::Shape& read = target.decoder.shape();
  require(read.hidden == shape.hidden, "target", read.hidden, "a hidden size of " + std::to_string(shape.hidden));
  cpu::Eagle::Call call{};
  cpu::Eagle::Inputs inputs{&target.decoder, nullptr, {}};
  int64_t rows = 0;
  for (const HeadLane& given : lanes) {
    const border::Tensor& slab = given.lane.slabs[0];
    require(is_half(slab) == is_half(lanes[0].lane.slabs[0]), "slab", slab.size(3), "slabs of one dtype");
    call.lanes.push_back(given.lane.rows);
    call.lanes.back().first = rows;
    call.slabs.push_back({slab.data, slab.size(3)});
    inputs.sources.push_back({given.features.at(), given.states.at(), given.sources.at()});
    rows += given.lane.rows.count;
  }
  const auto ids = take<int64_t>(tokens, "tokens", {rows});
  border::require_below(ids.at(), rows, read.vocabulary, "tokens");
  const auto recurrent = take<float>(out, "out", {rows, shape.hidden});
  const auto rated = take_logits(logits, rows, shape.vocabulary);
  inputs.tokens = ids.at();
  call.half = is_half(lanes[0].lane.slabs[0]);
  call.states = recurrent.at(), call.logits = rated.at();
  call.first_logits = logits.is_none() ? rows : rows - rated.size(0);
  const int team = threads_of(threads);
  py::gil_scoped_release release;
  const std::lock_guard<std::mutex> turn(draft.turn);
  draft.head.forward(inputs, call, team);
}

LaneOf take_slot(const Draft& draft, handle positions, int64_t prefix, int64_t start, handle seen, handle slab) {
  LaneOf lane{rows_of(positions, prefix, start, seen), {}};
  lane.slabs.push_back(take_slab(slab, 1, draft.head.shape().heads, lane.rows.start + lane.rows.count));
  return lane;
}

void run_head(Draft& draft, const Model& target, handle positions, int64_t prefix, int64_t start, handle seen,
              handle tokens, handle features, handle states, handle sources, handle slab, handle out, handle logits,
              int64_t threads) {
  LaneOf lane = take_slot(draft, positions, prefix, start, seen, slab);
  forward_head(draft, target, {take_head_lane(draft, std::move(lane), features, states, sources)}, tokens, out, logits,
               threads);
}

// Of each lane positions, prefix, start, words, features, states, sources and slab, as in run_head; tokens and results are
// of all lanes' rows.
void run_head_lanes(Draft& draft, const Model& target, const py::tuple& positions, const std::vector<int64_t>& prefixes,
                    const std::vector<int64_t>& starts, const py::tuple& words, handle tokens, const py::tuple& features,
                    const py::tuple& states, const py::tuple& sources, const py::tuple& slabs, handle out, handle logits,
                    int64_t threads) {
  const size_t count = require_lanes(
      positions, {prefixes.size(), starts.size(), words.size(), features.size(), states.size(), sources.size(), slabs.size()});
  std::vector<HeadLane> lanes;
  for (size_t i = 0; i < count; ++i)
    lanes.push_back(take_head_lane(draft, take_slot(draft, positions[i], prefixes[i], starts[i], words[i], slabs[i]),
                                   features[i], states[i], sources[i]));
  forward_head(draft, target, lanes, tokens, out, logits, threads);
}

// Raises FileChanged as CheckpointError.
void raise_checkpoint_errors() {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const cpu::FileChanged& error) {
      py::set_error(py::module_::import("specengine.errors").attr("CheckpointError"), error.what());
    }
  });
}

}  // namespace

PYBIND11_MODULE(_cpu, module) {
  border::start();
  raise_checkpoint_errors();
  module.attr("INTERFACE") = 23;  // specengine/models/extension.py asks for it: an extension may be left from other sources
  // those of such numerics, the fastest first
  module.def("instruction_sets", [](const std::string& numerics) {
    std::vector<std::string> names;
    for (const cpu::Kernels* kernels : cpu::available_kernels(numerics_of(numerics))) names.push_back(kernels->name);
    return names;
  });
  // names of csrc/cpu/formats and, behind `int_`, csrc/cpu/integers
  module.def("formats", [] {
    std::vector<std::string> names;
    for (int i = 0; i < cpu::kKinds; ++i) names.push_back(cpu::stored_as(static_cast<cpu::Kind>(i)).name);
    return names;
  });
  module.def("return_freed_memory", cpu::return_freed_memory);
  // of a tensor of whatever dtype
  module.def("checksum", [](handle tensor, int64_t threads) {
    border::Tensor given;
    if (!border::read(tensor, given) || !given.is_contiguous())
      border::refuse("tensor", border::described(tensor), "a contiguous one on the CPU");
    const int most = threads_of(threads);
    py::gil_scoped_release release;
    return cpu::checksum(static_cast<const unsigned char*>(given.data), given.bytes(), most);
  });
  py::class_<cpu::Weights, std::shared_ptr<cpu::Weights>>(module, "Weights")
      .def(py::init([](int64_t threads) { return std::make_shared<cpu::Weights>(threads_of(threads)); }))
      .def_property_readonly("bytes", &cpu::Weights::bytes)
      .def("add_matrix",
           [](cpu::Weights& weights, const std::string& name, const std::string& kind, int64_t outputs, int64_t inputs,
              const std::string& beside) {
             require_matrix(kind_of(kind), outputs, inputs);
             weights.add_matrix(name, kind_of(kind), outputs, inputs, beside);
           },
           py::arg("name"), py::arg("kind"), py::arg("outputs"), py::arg("inputs"), py::arg("beside") = "")
      // its rows stay in an open file from byte `offset` on; path: for people
      .def("add_rows",
           [](cpu::Weights& weights, const std::string& name, const std::string& kind, int64_t outputs, int64_t inputs,
              int64_t descriptor, int64_t offset, const std::string& path) {
             require_matrix(kind_of(kind), outputs, inputs);
             require(cpu::stored_as(kind_of(kind)).file_bytes > 0, "bytes of a block", 0, "a kind that files have");
             require(descriptor >= 0 && descriptor < kMostSize, "descriptor", descriptor, "an open file");
             require(offset >= 0, "offset", offset, "0 or more");
             weights.add_rows(name, kind_of(kind), outputs, inputs, static_cast<int>(descriptor), offset, path);
           })
      // rows: whole rows of a file from output `first` on, or all of them and, in `order`, which of them each output is
      .def("pack", pack)
      .def("add_vector", [](cpu::Weights& weights, const std::string& name, handle values) {
        const auto vector = take<float>(values, "values", {at_least(1)});
        weights.add_vector(name, vector.at(), vector.size(0));
      });
  // counts of slots, as in the cache beside it
  py::class_<Kept>(module, "Memory")
      .def_property_readonly("folded", [](Kept& kept) { return kept.locked([&] { return kept.memory.folded(); }); })
      .def_property_readonly("marked", [](Kept& kept) { return kept.locked([&] { return kept.memory.marked(); }); })
      .def_property_readonly("bytes", [](Kept& kept) { return kept.locked([&] { return kept.memory.bytes(); }); })
      .def("reach", &Kept::reach)
      .def("crop", [](Kept& kept, int64_t length) { kept.locked([&] { kept.memory.crop(length); }); })
      .def("mark", [](Kept& kept) { kept.locked([&] { kept.memory.mark(); }); })
      .def("keep", keep);
  py::class_<Model>(module, "Decoder")
      // sizes: layers, hidden, vocabulary, query heads, key-value heads, head size; ropes: frequencies and a factor each;
      // routing: as in routing_of; recurrence: as in recurrence_of; keeps: as in add_keeps
      .def(py::init([](const std::string& kernels, const std::string& numerics, const std::vector<int64_t>& sizes,
                       const std::string& activation, const std::vector<float>& numbers, std::shared_ptr<cpu::Weights> weights,
                       const std::vector<std::pair<std::vector<float>, float>>& ropes,
                       const std::vector<std::pair<int64_t, int64_t>>& places, const Choice& routing,
                       const std::vector<int64_t>& recurrence,
                       const std::vector<std::tuple<int64_t, int64_t, int64_t>>& keeps, const Traits& traits) {
        require_known(traits);
        cpu::Shape shape = shape_of(sizes, activation, numbers);
        shape.form.routing = routing_of(routing);
        shape.recurrence = recurrence_of(recurrence);
        shape.recurrence.gated_last = traits.count("gated last") != 0;
        shape.latent = latent_of(traits, shape.heads);
        for (const bool beside : {!recurrence.empty(), traits.count("query factors") != 0})
          require(!shape.latent.rank || !beside, "latent", shape.latent.rank, "none beside recurrence or query factors");
        shape.centred = traits.count("layer norms") != 0;
        shape.parallel = traits.count("parallel") != 0;
        if (const auto found = traits.find("added epsilon"); found != traits.end()) {
          require(found->second.size() == 1, "added epsilon", static_cast<int64_t>(found->second.size()), "a number");
          shape.form.added_eps = static_cast<float>(found->second[0]);
          require_finite(shape.form.added_eps, shape.form.added_eps >= 0.0f, "added epsilon", "0 or more");
        }
        std::vector<cpu::Rope> tables;
        for (const auto& [frequencies, factor] : ropes) {
          if (keeps.empty()) require_frequencies(frequencies, 1, shape.heads);
          require(!frequencies.empty(), "frequencies", 0, "1 or more");
          if (shape.latent.rank)
            require(2 * static_cast<int64_t>(frequencies.size()) <= shape.latent.turned, "frequencies",
                    static_cast<int64_t>(frequencies.size()), "at most half of what is turned");
          tables.push_back(rope(frequencies, factor, numerics, queries_of(traits)));
        }
        std::vector<cpu::Place> of = places_of(places, shape.layers, static_cast<int64_t>(ropes.size()));
        add_keeps(keeps, shape.heads, of);
        add_ahead(traits, of);
        for (const cpu::Place& place : of)
          require(!shape.latent.rank || !place.keys || (place.keys == 1 && place.size == shape.heads.size &&
                                                             place.reads == cpu::Place::kOwn),
                  "keeps", place.size, "those of the sizes, with latent attention");
        const cpu::Weights& known = given(weights);
        known.require_numerics(numerics);
        return new Model{std::move(weights),
                         cpu::Decoder(kernels_of(kernels, numerics), shape, known, std::move(tables), of),
                         {}};
      }))
      .def("forward", run)
      .def("forward_from", run_from)
      .def("forward_lanes", run_lanes)
      .def("remember", remember)
      .def("memory", memory_of)
      .def("read",
           [](Model& model, handle states, handle logits, int64_t threads) {
             const cpu::Shape& shape = model.decoder.shape();
             const auto rows = take<float>(states, "states", {kAny, shape.hidden});
             const auto rated = take<float>(logits, "logits", {rows.size(0), shape.vocabulary});
             const int team = threads_of(threads);
             if (rows.size(0) == 0) return;
             py::gil_scoped_release release;
             const std::lock_guard<std::mutex> turn(model.turn);
             model.decoder.read(rows.at(), rows.size(0), rated.at(), team);
           })
      // tokens: int64 [rows], out: float32 [rows, hidden]
      .def("embedding", [](Model& model, handle tokens, handle out) {
        const cpu::Shape& shape = model.decoder.shape();
        const auto ids = take<int64_t>(tokens, "tokens", {kAny});
        const auto found = take<float>(out, "embeddings", {ids.size(0), shape.hidden});
        border::require_below(ids.at(), ids.size(0), shape.vocabulary, "tokens");
        for (int64_t row = 0; row < ids.size(0); ++row) model.decoder.embedding(ids[row], found.at() + row * shape.hidden);
        model.decoder.require_same();
      })
      // of inputs of single layers: float32 [rows, own_channels], side by side
      .def_property_readonly("own_channels", [](Model& model) { return model.decoder.own_channels(); })
      .def("own_embedding", [](Model& model, handle tokens, handle out) {
        const int64_t width = model.decoder.own_channels();
        require(width > 0, "inputs of single layers", width, "some");
        const auto ids = take<int64_t>(tokens, "tokens", {kAny});
        const auto found = take<float>(out, "embeddings", {ids.size(0), width});
        border::require_below(ids.at(), ids.size(0), model.decoder.shape().vocabulary, "tokens");
        for (int64_t row = 0; row < ids.size(0); ++row) model.decoder.own_embedding(ids[row], found.at() + row * width);
        model.decoder.require_same();
      });
  py::class_<Draft>(module, "Eagle")
      // sizes: hidden, draft vocabulary, query heads, key-value heads, head size, window or 0; flags:
      // norm_before_residual, norm_logits, norm_recurrent
      .def(py::init([](const std::string& kernels, const std::string& numerics, const std::vector<int64_t>& sizes,
                       const std::vector<bool>& flags, float eps, std::shared_ptr<cpu::Weights> weights,
                       std::vector<float> frequencies, float factor) {
        require_sizes(sizes, 6);
        require(flags.size() == 3, "flags", static_cast<int64_t>(flags.size()), "3");
        const cpu::EagleShape shape{sizes[0], sizes[1], heads_of(&sizes[2]), eps, flags[0], flags[1], flags[2],
                                    sizes[5]};
        require_frequencies(frequencies, shape.heads.size / 2, shape.heads);
        const cpu::Weights& known = given(weights);
        known.require_numerics(numerics);
        return new Draft{std::move(weights),
                         cpu::Eagle(kernels_of(kernels, numerics), shape, known,
                                      rope(std::move(frequencies), factor, numerics)),
                         {}};
      }))
      .def("forward", run_head)
      .def("forward_lanes", run_head_lanes);
}
