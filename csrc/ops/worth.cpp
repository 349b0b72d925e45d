// Ops of a search that weighs what nodes are worth against what they cost.
#include <pybind11/stl.h>

#include <memory>

#include "ops/ops.hpp"
#include "spec/copies.hpp"
#include "spec/mixing.hpp"
#include "spec/top_children.hpp"
#include "spec/worth.hpp"

namespace ops {
namespace {

constexpr int64_t kMostRounds = 1024;
constexpr float kMemory = 0.97f;  // of recent tokens and seconds, per cycle

// Prices of a search; the inputs hold what `search` points to.
struct Prices {
  border::Input<float> verify, draft;
  border::Input<int64_t> widths;
  spec::SearchPrices search;
};

Prices take_prices(handle object) {
  const Parts parts(object, "prices", 3);
  auto verify = take_input<float>(parts[0], "verify", {at_least(2)}), draft = take_input<float>(parts[1], "draft", {at_least(2)});
  auto widths = take_input<int64_t>(parts[2], "widths", {at_least(1)});
  require_below(widths.at(), widths.size(0), draft.size(0), "widths");
  const spec::SearchPrices search{verify.at(),         draft.at(),  verify.size(0) - 1,
                                  draft.size(0) - 1, widths.at(), widths.size(0)};
  return {std::move(verify), std::move(draft), std::move(widths), search};
}

// Seconds and prices of a search, and what it notes of the present cycle.
struct Throughput {
  spec::Throughput numbers;
  spec::SearchPrices prices;
  float* drafting;
  int32_t* verified;  // nodes of the present tree
  const float* overhead;
  const float* experts;  // of a row their seconds and their share, and ratios by relation; null of a target without any
};

Throughput take_throughput(handle object) {
  const Parts parts(object, "throughput", 8), prices(parts[2], "prices", 3);
  const auto verify = take<float>(parts[0], "verify", {at_least(2)}), draft = take<float>(parts[1], "draft", {at_least(2)});
  const auto widths = take<int64_t>(prices[2], "widths", {at_least(1)});
  const spec::Throughput numbers{verify.at(),
                                 draft.at(),
                                 take<float>(prices[0], "verify prices", {verify.size(0)}).at(),
                                 take<float>(prices[1], "draft prices", {draft.size(0)}).at(),
                                 take<float>(parts[3], "recent", {2}).at(),
                                 verify.size(0),
                                 draft.size(0)};
  const auto experts = take<float>(parts[7], "experts", {kAny});
  const int64_t entries = experts.size(0), wanted = 2 + spec::kRelations;
  require(entries == 0 || entries == wanted, "experts", entries, std::to_string(wanted) + " numbers or none");
  return {numbers,
          {numbers.verify_price, numbers.draft_price, verify.size(0) - 1, draft.size(0) - 1, widths.at(), widths.size(0)},
          &take_one<float>(parts[4], "drafting"),
          &take_one<int32_t>(parts[5], "verified"),
          &take_one<float>(parts[6], "overhead"),
          entries ? experts.at() : nullptr};
}

void enter(const Throughput& books, int64_t committed) {
  const auto verified = std::clamp<int64_t>(*books.verified, 0, books.numbers.verified - 1);
  const float took = books.numbers.verify[verified] + *books.drafting + *books.overhead;
  spec::update_throughput(books.numbers, committed, took, kMemory);
}

void update_throughput(handle throughput, handle committed) {
  enter(take_throughput(throughput), take_one<int32_t>(committed, "committed"));
}

// What a search reads and writes: the arrays of a SearchState of specengine/ops/worth.py, whose parts hold them.
struct SearchState {
  py::object counts_object, notes_object, throughput_object;
  const int64_t* group;
  int64_t cells, nodes;  // rows of the tables; nodes that are noted, one more than the largest tree has
  spec::OutcomeCounts counts;
  spec::SearchNotes notes;
  Throughput throughput;

  explicit SearchState(const Parts& parts)
      : counts_object(py::reinterpret_borrow<py::object>(parts[0])),
        notes_object(py::reinterpret_borrow<py::object>(parts[1])),
        throughput_object(py::reinterpret_borrow<py::object>(parts[2])),
        throughput(take_throughput(parts[2])) {
    const Parts counted(parts[0], "counts", 7), noted(parts[1], "notes", 5);
    const auto hits = take<float>(counted[0], "hits", {kAny, spec::kKnots});
    cells = hits.size(0);
    group = &take_one<int64_t>(counted[6], "group");
    counts = {hits.at(),
              take<float>(counted[1], "tries", {cells, spec::kKnots}).at(),
              take<float>(counted[2], "table", {cells, spec::kKnots}).at(),
              take<float>(counted[3], "gains", {spec::kLevels, spec::kPlaces}).at(),
              take<float>(counted[4], "passes", {spec::kLevels}).at(),
              take<float>(counted[5], "profile", {spec::kLevels, spec::kPlaces}).at(),
              0};
    const auto stated = take<float>(noted[0], "stated", {kAny});
    nodes = stated.size(0);
    notes = {stated.at(), take<int64_t>(noted[1], "cells", {nodes}).at(), take<int64_t>(noted[2], "places", {nodes}).at(),
             take<bool>(noted[3], "waiting", {nodes}).at(), take<bool>(noted[4], "drafted", {nodes}).at()};
  }

  std::vector<int64_t> next_pass(const spec::TreeArrays& tree, int64_t size, int64_t rounds) const {
    return spec::next_pass(tree.path_log_probs, tree.log_probs, notes.waiting, size,
                           {counts.profile, spec::kLevels, spec::kPlaces}, throughput.prices, rounds);
  }
};

SearchState bind_search(handle object) { return SearchState(Parts(object, "state", 3)); }

// The state for a tree of this capacity; of one that is bound only contents are checked.
SearchState take_state(handle object, int64_t capacity) {
  SearchState state = py::isinstance<SearchState>(object) ? py::cast<const SearchState&>(object) : bind_search(object);
  const int64_t groups = state.cells / (spec::kSources * spec::kDepths * spec::kRanks);
  state.counts.group = *state.group;
  require(*state.group >= 0 && *state.group < groups, "group", *state.group, "0 to " + std::to_string(groups - 1));
  require(state.nodes > capacity, "stated", state.nodes, std::to_string(capacity + 1) + " or more");
  const spec::SearchPrices& prices = state.throughput.prices;
  require_below(prices.widths, prices.tried, prices.width + 1, "widths");
  return state;
}

py::object chances(handle stated, handle cells, handle table) {
  const auto given = take_input<float>(stated, "stated", {kAny});
  const int64_t entries = given.size(0);
  const auto rows = take_input<int64_t>(cells, "cells", {entries});
  const auto known = take_input<float>(table, "table", {kAny, at_least(2)});
  require_below(rows.at(), entries, known.size(0), "cells");
  const int64_t knots = known.size(1);
  const auto rated = make<float>({entries});
  for (int64_t i = 0; i < entries; ++i) rated[i] = spec::log_chance(given[i], known.at() + rows[i] * knots, knots);
  return rated.object;
}

py::tuple found_of(const std::vector<int64_t>& found, int64_t width) {
  const auto ids = make<int64_t>({width});
  std::copy(found.begin(), found.end(), ids.at());
  return nodes_of(ids, static_cast<int64_t>(found.size()));
}

void require_rounds(int64_t rounds) {
  require(rounds >= 1 && rounds <= kMostRounds, "rounds", rounds, "1 to " + std::to_string(kMostRounds));
}

py::tuple next_pass(handle paths, handle edges, handle waiting, handle size, handle profile, handle prices, int64_t rounds) {
  const auto scores = take_input<float>(paths, "paths", {at_least(1)});
  const int64_t room = scores.size(0), nodes = take_count(size, "size", room);
  const auto steps = take_input<float>(edges, "edges", {room});
  const auto open = take_input<bool>(waiting, "waiting", {room});
  const auto known = take_input<float>(profile, "profile", {at_least(1), at_least(1)});
  const Prices asked = take_prices(prices);
  require_rounds(rounds);
  return found_of(spec::next_pass(scores.at(), steps.at(), open.at(), nodes, {known.at(), known.size(0), known.size(1)},
                                  asked.search, rounds),
                  asked.search.width);
}

// The best columns of the first `live` rows of draft distributions. All [live, places].
struct Drafted {
  int64_t places;
  std::vector<float> stated;
  std::vector<int64_t> columns, tokens;
  std::vector<uint8_t> sources;  // empty: all 0
};

// Rows with copies mixed in: of `live` rows, the places that gained, and the tokens of the further columns.
template <typename T>
struct Mixed {
  std::unique_ptr<T[]> rows;
  spec::MixturePlan plan;
  int64_t columns;
};

template <typename T>
Mixed<T> mix_in(const T* values, const Rows& logits, int64_t live, bool normalized, spec::MixturePlan plan) {
  const auto more = static_cast<int64_t>(plan.fresh.size()), columns = logits.columns() + more;
  Mixed<T> out{std::unique_ptr<T[]>(new T[static_cast<size_t>(live * columns)]), std::move(plan), columns};
  spec::mix_rows(values, live, logits.columns(), logits.stride(), more, normalized, kFaint, out.plan.left, out.plan.places,
                 out.plan.gains, out.rows.get(), nullptr);
  return out;
}

// drafted: logits, token_ids, normalized, marks, as in Step, and copies that are mixed in first, or None.
Drafted read_drafted(handle drafted, const Tree& tree, const Frontier& frontier) {
  const Parts parts(drafted, "drafted", 5);
  const int64_t rows = frontier.ids.size(0), live = frontier.live;
  const auto logits = take_rows_input(parts[0], "logits", 1);
  require(logits.rows() == rows, "logits", logits.rows(), std::to_string(rows) + " rows");
  const int64_t columns = logits.columns();
  const auto ids = take_input_or_none<int64_t>(parts[1], "token_ids", {columns});
  const bool normalized = py::cast<bool>(parts[2]);
  const auto marks = take_input_or_none<uint8_t>(parts[3], "marks", {rows, columns});
  spec::MixturePlan plan;
  bool copied = false;
  if (!parts[4].is_none())
    copied = py::cast<const spec::Copies&>(parts[4]).plan(tree.arrays.tokens, tree.arrays.parents, frontier.ids.at(), live,
                                                          columns, plan);
  const int64_t places = std::min(spec::kPlaces, columns + static_cast<int64_t>(copied ? plan.fresh.size() : 0));
  const auto entries = static_cast<size_t>(live * places);
  Drafted out{places, std::vector<float>(entries), std::vector<int64_t>(entries), {}, {}};
  const auto best_of = [&](const auto* values, int64_t width, int64_t stride) {
    spec::top_children(values, live, width, stride, places, normalized, out.stated.data(), out.columns.data());
  };
  {
    py::gil_scoped_release release;
    by_dtype(logits, [&](const auto* values) {
      if (!copied) return best_of(values, columns, logits.stride());
      const auto mixed = mix_in(values, logits, live, normalized, plan);
      best_of(mixed.rows.get(), mixed.columns, mixed.columns);
    });
  }
  for (size_t i = 0; i < entries; ++i) {
    const int64_t row = static_cast<int64_t>(i) / places, column = out.columns[i];
    out.tokens.push_back(column >= columns ? plan.fresh[static_cast<size_t>(column - columns)] : ids ? ids[column] : column);
    if (copied) {
      const int64_t place = row * (columns + static_cast<int64_t>(plan.fresh.size())) + column;
      out.sources.push_back(std::find(plan.places.begin(), plan.places.end(), place) != plan.places.end());
    } else if (marks) {
      out.sources.push_back(marks[row * columns + column]);
    }
  }
  require_below(out.sources.data(), static_cast<int64_t>(out.sources.size()), spec::kSources, "marks");
  return out;
}

// Notes nodes as drafted from, and their likeliest children, which it appends, as waiting.
void append_likely(const Tree& tree, const Frontier& frontier, const Drafted& drafted, const SearchState& state,
                   double least, int64_t most, int32_t& overflow) {
  const spec::SearchNotes& notes = state.notes;
  const int64_t first = *tree.size;
  const auto likely = spec::likely_children(tree.arrays, frontier.ids.at(), frontier.live, drafted.places,
                                            drafted.stated.data(), drafted.sources.empty() ? nullptr : drafted.sources.data(),
                                            state.counts, least, most);
  spec::Children given;
  for (const spec::LikelyChild& child : likely) {
    given.parents.push_back(frontier.ids[child.entry / drafted.places]);
    given.tokens.push_back(drafted.tokens[static_cast<size_t>(child.entry)]);
    given.log_probs.push_back(child.edge);
  }
  for (int64_t row = 0; row < frontier.live; ++row) {
    notes.waiting[frontier.ids[row]] = false;
    notes.drafted[frontier.ids[row]] = true;
  }
  const int64_t added = append(tree, static_cast<int64_t>(likely.size()), given.parents.data(), given.tokens.data(),
                               given.log_probs.data(), overflow);
  for (int64_t i = 0; i < added; ++i) {
    const spec::LikelyChild& child = likely[static_cast<size_t>(i)];
    notes.stated[first + i] = drafted.stated[static_cast<size_t>(child.entry)];
    notes.cells[first + i] = child.cell;
    notes.places[first + i] = child.entry % drafted.places;
    notes.waiting[first + i] = true;
  }
}

// counters: size, passes, overflow; limits: least, budget, rounds, max_passes.
py::tuple grow_likely(handle tree, handle counters, handle frontier, handle drafted, handle searched,
                      const py::tuple& limits) {
  const Parts numbers(counters, "counters", 3);
  require(limits.size() == 4, "limits", static_cast<int64_t>(limits.size()), "4 parts");
  const auto least = py::cast<double>(limits[0]);
  const auto budget = py::cast<int64_t>(limits[1]), rounds = py::cast<int64_t>(limits[2]), max_passes = py::cast<int64_t>(limits[3]);
  require(budget >= 0, "budget", budget, "0 or more");
  require_rounds(rounds);
  const Tree grown = take_tree(tree, numbers[0]);
  const int64_t passes = take_one<int32_t>(numbers[1], "passes");
  int32_t& overflow = take_one<int32_t>(numbers[2], "overflow");
  const SearchState state = take_state(searched, grown.capacity);
  const Throughput& books = state.throughput;
  const Frontier nodes = take_nodes(frontier, "frontier", kAny);
  require_below(nodes.ids.at(), nodes.live, *grown.size, "frontier");
  require(nodes.live < books.numbers.drafted, "live", nodes.live, "as many as a pass may draft from");
  const Drafted given = read_drafted(drafted, grown, nodes);
  *books.drafting += books.numbers.draft[nodes.live];
  append_likely(grown, nodes, given, state, least, budget, overflow);
  std::vector<int64_t> next;
  if (passes < max_passes) next = state.next_pass(grown.arrays, *grown.size, rounds);
  return found_of(next, books.prices.width);
}

void count_outcomes(handle tree, handle size, handle path, handle chosen, handle searched) {
  const Tree grown = take_tree(tree, size);
  const SearchState state = take_state(searched, grown.capacity);
  const Frontier nodes = take_nodes(path, "path", kAny);
  const auto choices = take_input<int64_t>(chosen, "chosen", {nodes.ids.size(0)});
  const int64_t there = *grown.size;
  require_below(nodes.ids.at(), nodes.live, there, "path");
  for (int64_t node = 1; node < there; ++node) require_below(grown.arrays.parents + node, 1, node, "parents");
  require_below(state.notes.cells, there, state.cells, "cells");
  require_below(state.notes.places, there, spec::kPlaces, "places");
  spec::count_outcomes(grown.arrays, there, nodes.ids.at(), choices.at(), nodes.live, state.counts, state.notes);
  enter(state.throughput, nodes.live);
}

py::tuple select_worth(handle paths, handle size, handle price, int64_t most) {
  const auto scores = take_input<float>(paths, "paths", {kAny});
  const auto prices = take_input<float>(price, "price", {at_least(2)});
  require_width(most, 1, "most");
  const int64_t room = scores.size(0), nodes = take_count(size, "size", room);
  const int64_t n = spec::worth_most(scores.at(), nodes, prices.at(), std::min({most, prices.size(0) - 1, room}));
  const auto ids = make<int64_t>({most});
  const int64_t found = spec::select_best(scores.at(), nodes, std::min(n, most), ids.at());
  if (found < 0) refuse(kHasNaN);
  return nodes_of(ids, found);
}

// Continuations below some nodes that need no draft pass. source: copies and a table of successors, or what is called
// with the nodes, how many are wanted and the least log-probability, and returns the parts of an ops.tree.Free or None.
spec::FreeNodes free_below(handle source, const Tree& tree, const std::vector<int64_t>& nodes, int64_t most, double least) {
  const auto count = static_cast<int64_t>(nodes.size());
  const spec::TreeArrays& arrays = tree.arrays;
  if (PyTuple_Check(source.ptr())) {
    const Parts parts(source, "free", 2);
    const auto& copies = py::cast<const spec::Copies&>(parts[0]);
    const auto* table = py::cast<const spec::SuccessorTable*>(parts[1]);
    return copies.free({arrays.tokens, arrays.parents, arrays.path_log_probs, *tree.size, nodes.data(), count}, most, least,
                       table);
  }
  const auto ids = make<int64_t>({count});
  std::copy(nodes.begin(), nodes.end(), ids.at());
  const py::object found = source(py::make_tuple(ids.object, make_count(count)), most, least);
  if (found.is_none()) return {};
  const Parts parts(found, "free", 5);
  return {py::cast<spec::Tokens>(parts[0]), py::cast<spec::Tokens>(parts[1]), py::cast<std::vector<double>>(parts[2]),
          py::cast<spec::Tokens>(parts[3]), py::cast<spec::Tokens>(parts[4])};
}

// What each free node is worth by the counts: its cell, and the log-chance of its edge.
struct Rated {
  int64_t depth, cell;
  float stated, edge;
};

std::vector<Rated> rate(const spec::FreeNodes& free, const Tree& tree, const spec::OutcomeCounts& counts) {
  const int64_t size = *tree.size;
  const size_t entries = free.tokens.size();
  for (const size_t length : {free.parents.size(), free.log_probs.size(), free.marks.size(), free.ranks.size()})
    require(length == entries, "free", static_cast<int64_t>(length), "as many of each part");
  require_below(free.marks.data(), static_cast<int64_t>(entries), spec::kSources, "marks");
  std::vector<Rated> rated;
  for (size_t i = 0; i < entries; ++i) {
    const int64_t parent = free.parents[i];
    require_below(&parent, 1, size + static_cast<int64_t>(i), "parents");
    require(free.ranks[i] >= 0, "ranks", free.ranks[i], "0 or more");
    const int64_t depth = 1 + (parent < size ? tree.arrays.depths[parent] : rated[static_cast<size_t>(parent - size)].depth);
    const int64_t cell = spec::cell_of(counts.group, free.marks[i], depth, std::min(free.ranks[i], spec::kPlaces - 1));
    const auto stated = static_cast<float>(free.log_probs[i]);
    rated.push_back({depth, cell, stated, spec::log_chance(stated, counts.table + cell * spec::kKnots, spec::kKnots)});
  }
  return rated;
}

// Whether free continuations of the root leave so little to the draft that no pass pays.
bool is_covered(const spec::FreeNodes& free, const std::vector<Rated>& rated, const spec::OutcomeCounts& counts, float price) {
  std::vector<double> paths{1.0}, missed{1.0};
  std::vector<int64_t> depths{0};
  for (size_t i = 0; i < rated.size(); ++i) {
    const auto parent = static_cast<size_t>(free.parents[i]);
    const double path = paths[parent] * std::exp(rated[i].edge);
    missed[parent] -= path;
    paths.push_back(path);
    missed.push_back(path);
    depths.push_back(rated[i].depth);
  }
  double share = 0, gain = 0;
  for (int64_t place = 0; place < spec::kPlaces; ++place) share += counts.profile[place];
  const auto deepest = std::min(*std::max_element(depths.begin(), depths.end()), static_cast<int64_t>(depths.size()) - 1);
  for (int64_t level = 0; level <= deepest; ++level) {  // one node more is one level more at most
    double chances = 0;
    for (size_t i = 0; i < depths.size(); ++i)
      if (depths[i] == level) chances += missed[i];
    if ((gain += share * chances - price) > 0) return false;
  }
  return true;
}

// asked: how many free continuations of the root, and their least log-probability; free may be None. skipped: cycles
// without a pass, of which `patience` may follow each other.
py::object start_search(handle tree, handle size, handle searched, int64_t rounds, handle free, const py::tuple& asked,
                        handle skipped, int64_t patience) {
  const Tree grown = take_tree(tree, size);
  require(*grown.size == 1, "size", *grown.size, "1");
  require(asked.size() == 2, "asked", static_cast<int64_t>(asked.size()), "2 parts");
  const SearchState state = take_state(searched, grown.capacity);
  const spec::SearchNotes& noted = state.notes;
  require_rounds(rounds);
  int32_t& cycles = take_one<int32_t>(skipped, "skipped");
  *state.throughput.drafting = 0;
  std::fill(noted.drafted, noted.drafted + grown.capacity, false);
  std::fill(noted.waiting, noted.waiting + grown.capacity, false);
  noted.waiting[0] = true;
  bool pays = !state.next_pass(grown.arrays, 1, rounds).empty();
  if (pays && !free.is_none()) {
    const auto found = free_below(free, grown, {0}, py::cast<int64_t>(asked[0]), py::cast<double>(asked[1]));
    const auto rated = rate(found, grown, state.counts);
    pays = rated.empty() || !is_covered(found, rated, state.counts, state.throughput.prices.draft[1]);
  }
  pays |= cycles >= patience;
  cycles = pays ? 0 : cycles + 1;
  return make_count(pays);
}

// The waiting nodes of a tree, or the `most` likeliest of them, ascending.
std::vector<int64_t> waiting_nodes(const Tree& tree, const spec::SearchNotes& notes, int64_t most) {
  std::vector<int64_t> nodes;
  for (int64_t node = 0; node < *tree.size; ++node)
    if (notes.waiting[node]) nodes.push_back(node);
  if (static_cast<int64_t>(nodes.size()) <= most) return nodes;
  std::vector<float> scores;
  for (const int64_t node : nodes) scores.push_back(tree.arrays.path_log_probs[node]);
  std::vector<int64_t> best(static_cast<size_t>(most));
  const int64_t kept = spec::select_best(scores.data(), static_cast<int64_t>(scores.size()), most, best.data());
  if (kept < 0) refuse(kHasNaN);
  best.resize(static_cast<size_t>(kept));
  for (int64_t& place : best) place = nodes[static_cast<size_t>(place)];
  return best;
}

// asked: of how many waiting nodes, how many continuations, and their least log-probability.
py::tuple keep_likely(handle tree, handle size, handle searched, handle free, const py::tuple& asked, int64_t most) {
  const Tree grown = take_tree(tree, size);
  require(*grown.size >= 1, "size", *grown.size, "1 or more");
  require(asked.size() == 3, "asked", static_cast<int64_t>(asked.size()), "3 parts");
  const SearchState state = take_state(searched, grown.capacity);
  const spec::SearchNotes& noted = state.notes;
  const Throughput& books = state.throughput;
  require_width(most, 1, "most");
  if (!free.is_none()) {
    const auto leaves = py::cast<int64_t>(asked[0]);
    require(leaves >= 1, "asked", leaves, "1 or more");
    const int64_t room = std::min(py::cast<int64_t>(asked[1]), grown.capacity - *grown.size);
    const auto found = free_below(free, grown, waiting_nodes(grown, noted, leaves), room, py::cast<double>(asked[2]));
    const auto rated = rate(found, grown, state.counts);
    const auto entries = static_cast<int64_t>(rated.size());
    require(entries <= room, "free", entries, "at most " + std::to_string(std::max<int64_t>(room, 0)));
    std::vector<double> paths;  // those of new ones are summed in float64
    const int64_t first = *grown.size;
    for (int64_t i = 0; i < entries; ++i) {
      const auto at = static_cast<size_t>(i);
      const int64_t node = first + i, parent = found.parents[at];
      const Rated& each = rated[at];
      paths.push_back((parent < first ? grown.arrays.path_log_probs[parent] : paths[static_cast<size_t>(parent - first)]) +
                      static_cast<double>(each.edge));
      spec::append_nodes(grown.arrays, node, 1, &parent, &found.tokens[at], &each.edge);
      grown.arrays.path_log_probs[node] = static_cast<float>(paths.back());
      noted.stated[node] = each.stated;
      noted.cells[node] = each.cell;
    }
    *grown.size = static_cast<int32_t>(first + entries);
  }
  const int64_t there = *grown.size;
  if (books.experts) {
    const spec::Throughput& known = books.numbers;
    const double rate = static_cast<double>(known.verify_price[1]) / static_cast<double>(known.verify[1]);
    const double price = static_cast<double>(books.experts[0]) * rate, share = static_cast<double>(books.experts[1]);
    for (int64_t node = 1; node < there; ++node) require_below(grown.arrays.parents + node, 1, node, "parents");
    const auto found = spec::related_worth(grown.arrays, there, known.verify_price, {price, share, books.experts + 2},
                                           std::min(most, known.verified - 1));
    *books.verified = static_cast<int32_t>(found.size());
    return found_of(found, most);
  }
  const auto ids = make<int64_t>({most});
  const int64_t n = spec::worth_most(grown.arrays.path_log_probs, there, books.numbers.verify_price,
                                     std::min({most, books.numbers.verified - 1, grown.capacity}));
  const int64_t kept = spec::select_best(grown.arrays.path_log_probs, there, std::min(n, most), ids.at());
  if (kept < 0) refuse(kHasNaN);
  *books.verified = static_cast<int32_t>(kept);
  return nodes_of(ids, kept);
}

const Ops kWorth([](py::module_& module) {
  py::class_<SearchState>(module, "SearchState")
      .def_readonly("counts", &SearchState::counts_object)
      .def_readonly("notes", &SearchState::notes_object)
      .def_readonly("throughput", &SearchState::throughput_object);
  module.def("bind_search", bind_search);
  module.def("update_throughput", update_throughput);
  module.def("chances", chances);
  module.def("next_pass", next_pass);
  module.def("grow_likely", grow_likely);
  module.def("count_outcomes", count_outcomes);
  module.def("select_worth", select_worth);
  module.def("start_search", start_search);
  module.def("keep_likely", keep_likely);
});

}  // namespace
}  // namespace ops
