// Ops of a search that weighs what nodes are worth against what they cost.
#include "ops/ops.hpp"
#include "spec/top_children.hpp"
#include "spec/worth.hpp"

namespace ops {
namespace {

constexpr int64_t kMostRounds = 1024;
constexpr float kMemory = 0.97f;  // of what was earned, per cycle

// Outcomes of drafted tokens, and how many cells the tables have.
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
  const int64_t nodes = at_least(capacity + 1);
  return {take<float>(parts[0], "stated", {nodes}).at(), take<int64_t>(parts[1], "cells", {nodes}).at(),
          take<int64_t>(parts[2], "places", {nodes}).at(), take<bool>(parts[3], "waiting", {nodes}).at(),
          take<bool>(parts[4], "drafted", {nodes}).at()};
}

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

// The seconds and prices of a ledger, and what it notes of the present cycle.
struct LedgerParts {
  spec::Ledger ledger;
  float* spent;
  int64_t verified;
  float beside;
};

LedgerParts take_ledger(handle object) {
  const Parts parts(object, "ledger", 7), prices(parts[2], "prices", 3);
  const auto verify = take<float>(parts[0], "verify", {at_least(2)}), draft = take<float>(parts[1], "draft", {at_least(1)});
  take_input<int64_t>(prices[2], "widths", {at_least(1)});
  const spec::Ledger ledger{verify.at(),
                            draft.at(),
                            take<float>(prices[0], "verify prices", {verify.size(0)}).at(),
                            take<float>(prices[1], "draft prices", {draft.size(0)}).at(),
                            take<float>(parts[3], "earned", {2}).at(),
                            verify.size(0),
                            draft.size(0)};
  return {ledger, &take_one<float>(parts[4], "spent"), take_count(parts[5], "verified", verify.size(0) - 1),
          take_one<float>(parts[6], "beside")};
}

void settle_parts(const LedgerParts& parts, int64_t committed) {
  const float took = parts.ledger.verify[parts.verified] + *parts.spent + parts.beside;
  spec::settle(parts.ledger, committed, took, kMemory);
}

void settle(handle ledger, handle committed) { settle_parts(take_ledger(ledger), take_one<int32_t>(committed, "committed")); }

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

// drafted: logits, token_ids, normalized, marks, as in Step.
Drafted read_drafted(handle drafted, int64_t live, int64_t rows) {
  const Parts parts(drafted, "drafted", 4);
  const auto logits = take_rows_input(parts[0], "logits", 1);
  require(logits.rows() == rows, "logits", logits.rows(), std::to_string(rows) + " rows");
  const int64_t columns = logits.columns(), places = std::min(spec::kPlaces, columns);
  const auto ids = take_input_or_none<int64_t>(parts[1], "token_ids", {columns});
  const bool normalized = py::cast<bool>(parts[2]);
  const auto marks = take_input_or_none<uint8_t>(parts[3], "marks", {rows, columns});
  const auto entries = static_cast<size_t>(live * places);
  Drafted out{places, std::vector<float>(entries), std::vector<int64_t>(entries), {}, {}};
  {
    py::gil_scoped_release release;
    by_dtype(logits, [&](const auto* values) {
      spec::top_children(values, live, columns, logits.stride(), places, normalized, out.stated.data(), out.columns.data());
    });
  }
  for (size_t i = 0; i < entries; ++i) {
    const auto row = static_cast<int64_t>(i) / places;
    out.tokens.push_back(ids ? ids[out.columns[i]] : out.columns[i]);
    if (marks) out.sources.push_back(marks[row * columns + out.columns[i]]);
  }
  require_below(out.sources.data(), static_cast<int64_t>(out.sources.size()), spec::kSources, "marks");
  return out;
}

// Notes nodes as drafted from, and their likeliest children, which it appends, as waiting.
void append_likely(const Tree& tree, const Frontier& frontier, const Drafted& drafted, const spec::OutcomeCounts& counts,
                   const spec::SearchNotes& notes, double least, int64_t most, int32_t& overflow) {
  const int64_t first = *tree.size;
  const auto likely = spec::likely_children(tree.arrays, frontier.ids.at(), frontier.live, drafted.places,
                                            drafted.stated.data(), drafted.sources.empty() ? nullptr : drafted.sources.data(),
                                            counts, least, most);
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
py::tuple grow_likely(handle tree, handle counters, handle frontier, handle drafted, handle counts, handle notes,
                      handle ledger, const py::tuple& limits) {
  const Parts numbers(counters, "counters", 3);
  require(limits.size() == 4, "limits", static_cast<int64_t>(limits.size()), "4 parts");
  const auto least = py::cast<double>(limits[0]);
  const auto budget = py::cast<int64_t>(limits[1]), rounds = py::cast<int64_t>(limits[2]), max_passes = py::cast<int64_t>(limits[3]);
  require(budget >= 0, "budget", budget, "0 or more");
  require_rounds(rounds);
  const Tree grown = take_tree(tree, numbers[0]);
  const int64_t passes = take_one<int32_t>(numbers[1], "passes");
  int32_t& overflow = take_one<int32_t>(numbers[2], "overflow");
  const Outcomes outcomes = take_outcomes(counts);
  const spec::SearchNotes noted = take_notes(notes, grown.capacity);
  const LedgerParts books = take_ledger(ledger);
  const Prices prices = take_prices(Parts(ledger, "ledger", 7)[2]);
  const Frontier nodes = take_nodes(frontier, "frontier", kAny);
  require_below(nodes.ids.at(), nodes.live, *grown.size, "frontier");
  require(nodes.live < books.ledger.drafted, "live", nodes.live, "as many as a pass may draft from");
  const Drafted given = read_drafted(drafted, nodes.live, nodes.ids.size(0));
  *books.spent += books.ledger.draft[nodes.live];
  append_likely(grown, nodes, given, outcomes.counts, noted, least, budget, overflow);
  std::vector<int64_t> next;
  if (passes < max_passes)
    next = spec::next_pass(grown.arrays.path_log_probs, grown.arrays.log_probs, noted.waiting, *grown.size,
                           {outcomes.counts.profile, spec::kLevels, spec::kPlaces}, prices.search, rounds);
  return found_of(next, prices.search.width);
}

void count_outcomes(handle tree, handle size, handle path, handle chosen, handle counts, handle notes, handle ledger) {
  const Tree grown = take_tree(tree, size);
  const Outcomes outcomes = take_outcomes(counts);
  const spec::SearchNotes noted = take_notes(notes, grown.capacity);
  const LedgerParts books = take_ledger(ledger);
  const Frontier nodes = take_nodes(path, "path", kAny);
  const auto choices = take_input<int64_t>(chosen, "chosen", {nodes.ids.size(0)});
  const int64_t there = *grown.size;
  require_below(nodes.ids.at(), nodes.live, there, "path");
  for (int64_t node = 1; node < there; ++node) require_below(grown.arrays.parents + node, 1, node, "parents");
  require_below(noted.cells, there, outcomes.cells, "cells");
  require_below(noted.places, there, spec::kPlaces, "places");
  spec::count_outcomes(grown.arrays, there, nodes.ids.at(), choices.at(), nodes.live, outcomes.counts, noted);
  settle_parts(books, nodes.live);
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

const Ops kWorth([](py::module_& module) {
  module.def("settle", settle);
  module.def("chances", chances);
  module.def("next_pass", next_pass);
  module.def("grow_likely", grow_likely);
  module.def("count_outcomes", count_outcomes);
  module.def("select_worth", select_worth);
});

}  // namespace
}  // namespace ops
