// The rule of a search that weighs worth against costs (spec/worth.hpp) by one block: a level, whom to verify, and what
// an outcome teaches. What the lanes do between two barriers is one function of the lane; lanes(work) says in which
// order they come, for the block of a device and for the tests on a host alike. Sums are made in the order of
// spec/worth.hpp, so results have its bits as far as the device's exp and log have the host's. Places are found by
// counting the better ones, so that lanes do not wait for each other.
#pragma once

#include <cmath>
#include <cstdint>

#include "spec/outcomes.hpp"
#include "spec/tree_arrays.hpp"

namespace spec {

constexpr int kRuleLanes = 512;  // of the block
constexpr int kPlainShared = 48 * 1024, kMostShared = 96 * 1024;  // bytes of the block: unasked for, and on each card since sm_80

// A level of a search: children are appended below the frontier, and the next pass is chosen. The chosen nodes may take
// the place of the frontier. As in specengine/ops/cuda.py, member by member.
struct LevelArgs {
  TreeArrays tree;
  int64_t capacity;
  int32_t* size;
  const int32_t* passes;
  int32_t* overflow;
  const int64_t* frontier;  // [rows]
  const int32_t* frontier_live;
  int64_t rows;
  const float* stated;      // [rows, places], best first
  const int64_t* columns;   // the same
  int64_t places;
  const int64_t* token_ids;  // by column; null: the columns are the tokens
  const uint8_t* marks;      // [rows, columns], `stride` apart; null: all 0
  int64_t stride;
  const float *table, *profile;  // [cells, kKnots], [kLevels, kPlaces]
  const int64_t* group;
  SearchNotes notes;  // [capacity + 1]
  float* drafting;
  const float* draft_seconds;
  SearchPrices prices;
  double least;
  int64_t most, rounds, max_passes;
  int64_t* ids;   // [width]
  int32_t* live;  // where the search begins: whether there is a pass
  int32_t* skipped;  // not null: there are no children, the search begins at the root; cycles without a pass
  int64_t patience;  // of these, before a pass that need not pay
};

// Select the nodes of a tree to verify.
struct KeepArgs {
  const float* paths;
  const int32_t* size;
  int64_t capacity;
  const float* price;  // [nodes + 1]
  int64_t nodes, most;
  int64_t* ids;               // [most]
  int32_t *live, *verified;
};

// Some nodes of a tree as a tree of their own.
struct ExtractArgs {
  TreeArrays tree;
  const int64_t* nodes;  // [rows], ascending, closed under parent
  const int32_t* live;
  int64_t rows;
  TreeArrays out;  // [rows]
};

// The outcome of a tree.
struct OutcomeArgs {
  const int64_t *tokens, *parents;
  const float* log_probs;
  const int32_t* size;
  int64_t capacity;
  const int64_t *path, *chosen;  // [width]
  const int32_t* path_live;
  int64_t width;
  float *hits, *tries, *table, *gains, *passes, *profile;
  const float* stated;
  const int64_t *cells, *places;
  const bool* drafted;
  Throughput throughput;
  const float *drafting, *overhead;
  const int32_t* verified;
  double memory;
};

static_assert(sizeof(LevelArgs) == 44 * 8, "as in specengine/ops/cuda.py");
static_assert(sizeof(KeepArgs) == 9 * 8, "as in specengine/ops/cuda.py");
static_assert(sizeof(ExtractArgs) == 17 * 8, "as in specengine/ops/cuda.py");
static_assert(sizeof(OutcomeArgs) == 30 * 8, "as in specengine/ops/cuda.py");

// Hands out the block's memory, [bytes], in pieces.
class Pieces {
 public:
  SPEC_HD explicit Pieces(char* memory) : memory_(memory), used_(0) {}

  template <typename T>
  SPEC_HD T* take(int64_t count) {
    T* piece = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 7) / 8 * 8;
    return piece;
  }
  SPEC_HD int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_;
};

// Where a number of the block's flags stand: which of `count` things are chosen.
struct Chosen {
  bool* flags;
  uint32_t* words;

  SPEC_HD static Chosen in(Pieces& pieces, int64_t count) {
    Chosen out{};
    out.flags = pieces.take<bool>(count);
    out.words = pieces.take<uint32_t>((count + 31) / 32);
    return out;
  }
  // Lanes gather the flags in words; a barrier later `before` and `all` count.
  SPEC_HD void gather(int lane, int64_t count) const {
    for (int64_t word = lane; word * 32 < count; word += kRuleLanes) {
      uint32_t bits = 0;
      for (int64_t bit = 0; bit < 32 && word * 32 + bit < count; ++bit)
        bits |= static_cast<uint32_t>(flags[word * 32 + bit]) << bit;
      words[word] = bits;
    }
  }
  SPEC_HD static int ones(uint32_t bits) {
    bits -= (bits >> 1) & 0x55555555u;
    bits = (bits & 0x33333333u) + ((bits >> 2) & 0x33333333u);
    return static_cast<int>(((bits + (bits >> 4)) & 0x0F0F0F0Fu) * 0x01010101u >> 24);
  }
  SPEC_HD int before(int64_t place) const {
    int count = 0;
    for (int64_t word = 0; word < place / 32; ++word) count += ones(words[word]);
    return count + (place % 32 ? ones(words[place / 32] & ((1u << place % 32) - 1)) : 0);
  }
  SPEC_HD int all(int64_t count) const { return before(count); }
};

SPEC_HD inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Divide in 32 bits: a device has no instruction for wider integers.
SPEC_HD inline int narrow(int64_t value) { return static_cast<int>(value); }

// ---- a level: children

// Memory of a block that appends children, and then plays passes through.
struct LevelShared {
  // of the tree as it was: [1] each
  int32_t *size, *live, *going;
  // by entry: [rows * places]
  float *paths, *edges;
  int32_t* cells;
  Chosen kept;
  // by node: [capacity]; waiting: NaN of a node that does not wait
  float *scores, *waiting;
  // of the tree: the chances of its likeliest nodes, descending, and the nodes to draft from, best first; -1 behind them
  double *chances, *open;  // [nodes], [width * rounds]
  int32_t *levels, *ids;   // [width * rounds]
  // by width that is tried, two buffers each where rounds read one and write the other
  double *found, *next;  // [2, nodes], [2, width * rounds]
  int32_t* next_levels;  // [2, width * rounds]
  double* children;      // [width * kPlaces]
  double *spent, *promise;  // [tried], [tried + 1]: the last is the worth of the tree as it is
};

SPEC_HD inline int64_t open_room(const LevelArgs& args) { return args.prices.width * args.rounds; }

SPEC_HD inline int64_t lay_out(const LevelArgs& args, char* memory, LevelShared& shared) {
  Pieces pieces(memory);
  const int64_t entries = args.rows * args.places, tried = args.prices.tried, room = open_room(args);
  int32_t* numbers = pieces.take<int32_t>(4);
  shared.size = numbers, shared.live = numbers + 1, shared.going = numbers + 2;
  shared.paths = pieces.take<float>(entries);
  shared.edges = pieces.take<float>(entries);
  shared.cells = pieces.take<int32_t>(entries);
  shared.kept = Chosen::in(pieces, entries);
  shared.scores = pieces.take<float>(args.capacity);
  shared.waiting = pieces.take<float>(args.capacity);
  shared.chances = pieces.take<double>(args.prices.nodes);
  shared.open = pieces.take<double>(room);
  shared.levels = pieces.take<int32_t>(room);
  shared.ids = pieces.take<int32_t>(room);
  shared.found = pieces.take<double>(tried * 2 * args.prices.nodes);
  shared.next = pieces.take<double>(tried * 2 * room);
  shared.next_levels = pieces.take<int32_t>(tried * 2 * room);
  shared.children = pieces.take<double>(tried * args.prices.width * kPlaces);
  shared.spent = pieces.take<double>(tried);
  shared.promise = pieces.take<double>(tried + 1);
  return pieces.used();
}

SPEC_HD inline int64_t bytes_of(const LevelArgs& args) {
  LevelShared shared{};
  return lay_out(args, nullptr, shared);
}

SPEC_HD inline void begin_search(const LevelArgs& args, int lane) {
  for (int64_t node = lane; node < args.capacity; node += kRuleLanes) {
    args.notes.drafted[node] = false;
    args.notes.waiting[node] = node == 0;
  }
  if (lane == 0) *args.drafting = 0.0f;
}

SPEC_HD inline void read_counts(const LevelArgs& args, int lane, const LevelShared& shared) {
  if (lane) return;
  *shared.size = *args.size;
  *shared.live = args.skipped ? 0 : static_cast<int32_t>(lesser(*args.frontier_live, args.rows));
  *shared.going = args.skipped || *args.passes < args.max_passes;
}

// Chances of the children of the frontier, of which those of likely paths are offered.
SPEC_HD inline void rate_children(const LevelArgs& args, int lane, const LevelShared& shared) {
  const int live = *shared.live, places = narrow(args.places), entries = narrow(args.rows) * places;
  for (int entry = lane; entry < entries; entry += kRuleLanes) {
    const int row = entry / places, place = entry % places;
    shared.paths[entry] = kLowest;
    if (row >= live) continue;
    const int64_t node = args.frontier[row];
    const int64_t source = args.marks ? args.marks[row * args.stride + args.columns[entry]] : 0;
    const int64_t cell = cell_of(*args.group, source, args.tree.depths[node] + 1, place);
    const float edge = log_chance(args.stated[entry], args.table + cell * kKnots, kKnots);
    const float path = args.tree.path_log_probs[node] + edge;
    shared.edges[entry] = edge;
    shared.cells[entry] = static_cast<int32_t>(cell);
    if (static_cast<double>(path) >= args.least) shared.paths[entry] = path;
  }
  for (int row = lane; row < live; row += kRuleLanes) {
    args.notes.waiting[args.frontier[row]] = false;
    args.notes.drafted[args.frontier[row]] = true;
  }
  if (lane == 0) *args.drafting += args.draft_seconds[live];
}

// Of `count` scores, by how many this one is beaten: higher ones, and equal ones before it.
SPEC_HD inline int place_among(const float* scores, int count, int own) {
  const float score = scores[own];
  int place = 0;
  for (int other = 0; other < own; ++other) place += scores[other] >= score;
  for (int other = own + 1; other < count; ++other) place += scores[other] > score;
  return place;
}

SPEC_HD inline void keep_likeliest(const LevelArgs& args, int lane, const LevelShared& shared) {
  const int entries = narrow(args.rows * args.places);
  for (int entry = lane; entry < entries; entry += kRuleLanes)
    shared.kept.flags[entry] = shared.paths[entry] > kLowest && place_among(shared.paths, entries, entry) < args.most;
}

SPEC_HD inline void append_kept(const LevelArgs& args, int lane, const LevelShared& shared) {
  const int places = narrow(args.places), entries = narrow(args.rows) * places;
  const int first = *shared.size, made = shared.kept.all(entries);
  if (first + made > args.capacity) {
    if (lane == 0) *args.overflow = 1;
    return;
  }
  for (int entry = lane; entry < entries; entry += kRuleLanes) {
    if (!shared.kept.flags[entry]) continue;
    const int64_t node = first + shared.kept.before(entry), parent = args.frontier[entry / places];
    const int64_t column = args.columns[entry];
    args.tree.tokens[node] = args.token_ids ? args.token_ids[column] : column;
    args.tree.parents[node] = parent;
    args.tree.depths[node] = args.tree.depths[parent] + 1;
    args.tree.log_probs[node] = shared.edges[entry];
    args.tree.path_log_probs[node] = shared.paths[entry];
    args.notes.stated[node] = args.stated[entry];
    args.notes.cells[node] = shared.cells[entry];
    args.notes.places[node] = entry % places;
    args.notes.waiting[node] = true;
  }
  if (lane == 0) *args.size = first + made;
}

SPEC_HD inline void append_ancestors(const LevelArgs& args, int lane, const LevelShared& shared) {
  const int first = *shared.size, words = narrow(args.tree.words), made = *args.size - first;
  for (int at = lane; at < made * words; at += kRuleLanes) {
    const int node = first + at / words, word = at % words;
    const uint64_t own = node / 64 == word ? static_cast<uint64_t>(1) << node % 64 : 0;
    args.tree.ancestors[first * words + at] = args.tree.ancestors[args.tree.parents[node] * words + word] | own;
  }
}

// ---- a level: passes played through

SPEC_HD inline void read_tree(const LevelArgs& args, int lane, const LevelShared& shared) {
  const int64_t size = *args.size;
  for (int64_t node = lane; node < size; node += kRuleLanes) {
    const float path = args.tree.path_log_probs[node];
    shared.scores[node] = path > kLowest ? path : kLowest;
    shared.waiting[node] = args.notes.waiting[node] ? shared.scores[node] : NAN;
  }
  for (int64_t i = lane; i < args.prices.nodes; i += kRuleLanes) shared.chances[i] = -1;
  for (int64_t i = lane; i < open_room(args); i += kRuleLanes) shared.open[i] = -1;
}

SPEC_HD inline void settle_tree(const LevelArgs& args, int lane, const LevelShared& shared) {
  const int size = *args.size, room = narrow(open_room(args));
  for (int node = lane; node < size; node += kRuleLanes) {
    const double chance = exp(static_cast<double>(shared.scores[node]));
    const int place = place_among(shared.scores, size, node);
    if (place < args.prices.nodes && chance > 0) shared.chances[place] = chance;
    if (!args.notes.waiting[node]) continue;
    const int turn = place_among(shared.waiting, size, node);
    if (turn >= room) continue;
    shared.open[turn] = chance;
    shared.ids[turn] = node;
    shared.levels[turn] = node ? static_cast<int32_t>(level_of(expf(args.tree.log_probs[node]), kLevels)) : 0;
  }
}

// A tree as a width that is tried has it before a round: the settled one, or what the round before wrote.
struct Played {
  const double *chances, *open;
  const int32_t* levels;
};

SPEC_HD inline Played played_at(const LevelArgs& args, const LevelShared& shared, int tried, int64_t round) {
  if (round == 0) return {shared.chances, shared.open, shared.levels};
  const int64_t buffer = tried * 2 + (round - 1) % 2, room = open_room(args);
  return {shared.found + buffer * args.prices.nodes, shared.next + buffer * room, shared.next_levels + buffer * room};
}

// How many nodes of an order, at most `width`, are there to draft from.
SPEC_HD inline int64_t drawn_of(const double* open, int64_t width, int64_t room) {
  int64_t drawn = 0;
  while (drawn < width && drawn < room && open[drawn] >= 0) ++drawn;
  return drawn;
}

// Children of a round's pass, -1 where there is none; what the round writes is emptied.
SPEC_HD inline void play_children(const LevelArgs& args, int64_t round, int lane, const LevelShared& shared) {
  const SearchPrices& prices = args.prices;
  const int64_t into = round % 2;
  const int trials = narrow(prices.tried), nodes = narrow(prices.nodes), room = narrow(open_room(args));
  const int places = narrow(kPlaces), wide = narrow(prices.width) * places;
  for (int at = lane; at < trials * wide; at += kRuleLanes) {
    const int tried = at / wide, row = at % wide / places;
    const Played tree = played_at(args, shared, tried, round);
    double chance = -1;
    if (row < prices.widths[tried] && tree.open[row] >= 0)
      chance = tree.open[row] * args.profile[tree.levels[row] * places + at % places];
    shared.children[at] = chance > 0 ? chance : -1;
  }
  for (int at = lane; at < trials * nodes; at += kRuleLanes)
    shared.found[(at / nodes * 2 + into) * nodes + at % nodes] = -1;
  for (int at = lane; at < trials * room; at += kRuleLanes) shared.next[(at / room * 2 + into) * room + at % room] = -1;
  for (int tried = lane; tried < trials; tried += kRuleLanes) {
    const int64_t drawn = drawn_of(played_at(args, shared, tried, round).open, prices.widths[tried], room);
    shared.spent[tried] = (round ? shared.spent[tried] : 0.0) + prices.draft[drawn];
  }
}

SPEC_HD inline int count_above(const double* values, int count, double least) {
  int above = 0;
  for (int i = 0; i < count; ++i) above += values[i] > least;
  return above;
}

// Of descending values, with -1 behind them, how many are `least` or more.
SPEC_HD inline int count_from(const double* values, int count, double least) {
  int from = 0, end = count;
  while (from < end) {
    const int middle = (from + end) / 2;
    if (values[middle] >= least)
      from = middle + 1;
    else
      end = middle;
  }
  return from;
}

// Merges children into what is known: of equal ones those come later, in their order.
SPEC_HD inline void merge_children(const LevelArgs& args, int64_t round, int lane, const LevelShared& shared) {
  const SearchPrices& prices = args.prices;
  const int64_t left = args.rounds - 1 - round, kept = prices.width * left;
  const int nodes = narrow(prices.nodes), room = narrow(open_room(args));
  const int places = narrow(kPlaces), wide = narrow(prices.width) * places, each = wide + nodes + (left ? room : 0);
  for (int at = lane; at < narrow(prices.tried) * each; at += kRuleLanes) {
    const int tried = at / each, width = narrow(prices.widths[tried]), made = width * places;
    const int64_t buffer = tried * 2 + round % 2;
    const Played tree = played_at(args, shared, tried, round);
    const double* children = shared.children + tried * wide;
    double *found = shared.found + buffer * nodes, *next = shared.next + buffer * room;
    int32_t* levels = shared.next_levels + buffer * room;
    int i = at % each;
    if (i < wide) {
      if (i >= made || !(children[i] > 0)) continue;
      const double own = children[i];
      int among = 0;
      for (int other = 0; other < i; ++other) among += children[other] >= own;
      for (int other = i + 1; other < made; ++other) among += children[other] > own;
      const int place = among + count_from(tree.chances, nodes, own);
      if (place < nodes) found[place] = own;
      if (!left) continue;
      const int turn = among + count_from(tree.open + width, room - width, own);
      if (turn >= kept) continue;
      next[turn] = own;
      const float edge = args.profile[tree.levels[i / places] * places + i % places];
      levels[turn] = static_cast<int32_t>(level_of(edge, kLevels));
    } else if ((i -= wide) < nodes) {
      if (!(tree.chances[i] > 0)) continue;
      const int place = i + count_above(children, made, tree.chances[i]);
      if (place < nodes) found[place] = tree.chances[i];
    } else if ((i -= nodes) >= width && tree.open[i] >= 0) {
      const int turn = i - width + count_above(children, made, tree.open[i]);
      if (turn >= kept) continue;
      next[turn] = tree.open[i];
      levels[turn] = tree.levels[i];
    }
  }
}

SPEC_HD inline double worth_of(const double* chances, const SearchPrices& prices) {
  double sum = 0, best = kLowest;
  for (int64_t n = 0; n < prices.nodes && chances[n] > 0; ++n) {
    sum += chances[n];
    const double worth = sum - prices.verify[n + 1];
    if (worth > best) best = worth;
  }
  return best;
}

SPEC_HD inline void weigh(const LevelArgs& args, int64_t round, int lane, const LevelShared& shared) {
  const int tried = narrow(args.prices.tried);
  if (lane < tried) {
    const double worth = worth_of(played_at(args, shared, lane, round + 1).chances, args.prices) - shared.spent[lane];
    if (round == 0 || worth > shared.promise[lane]) shared.promise[lane] = worth;
  }
  if (round == 0 && lane == tried) shared.promise[tried] = worth_of(shared.chances, args.prices);
}

// How many nodes the next pass draws: the narrowest of the best widths, none where it does not pay.
SPEC_HD inline int64_t drawn_next(const LevelArgs& args, const LevelShared& shared) {
  const SearchPrices& prices = args.prices;
  double best = shared.promise[0];
  for (int64_t i = 1; i < prices.tried; ++i)
    if (shared.promise[i] > best) best = shared.promise[i];
  if (!(best > shared.promise[prices.tried] + kWorth)) return 0;
  int64_t taken = 0;
  while (!(shared.promise[taken] >= best - kWorth)) ++taken;
  return drawn_of(shared.open, prices.widths[taken], open_room(args));
}

SPEC_HD inline void write_next(const LevelArgs& args, int lane, const LevelShared& shared) {
  const int64_t drawn = *shared.going ? drawn_next(args, shared) : 0;
  if (lane == 0 && args.skipped) {
    const int32_t skipped = *args.skipped;
    *args.live = drawn > 0 || skipped >= args.patience;
    *args.skipped = *args.live ? 0 : skipped + 1;
  } else if (lane == 0) {
    *args.live = static_cast<int32_t>(drawn);
  }
  for (int64_t i = lane; i < args.prices.width; i += kRuleLanes) {
    if (i >= drawn) {
      args.ids[i] = 0;
      continue;
    }
    int64_t place = 0;
    for (int64_t other = 0; other < drawn; ++other) place += shared.ids[other] < shared.ids[i];
    args.ids[place] = shared.ids[i];
  }
}

// lanes(work): work(lane) by every lane, and a barrier.
template <typename Lanes>
SPEC_HD inline void level_on_lanes(const LevelArgs& args, char* memory, Lanes& lanes) {
  LevelShared shared{};
  lay_out(args, memory, shared);
  lanes([&](int lane) {
    read_counts(args, lane, shared);
    if (args.skipped) begin_search(args, lane);
  });
  if (!args.skipped) {
    lanes([&](int lane) { rate_children(args, lane, shared); });
    lanes([&](int lane) { keep_likeliest(args, lane, shared); });
    lanes([&](int lane) { shared.kept.gather(lane, args.rows * args.places); });
    lanes([&](int lane) { append_kept(args, lane, shared); });
    lanes([&](int lane) { append_ancestors(args, lane, shared); });
  }
  if (*shared.going) {
    lanes([&](int lane) { read_tree(args, lane, shared); });
    lanes([&](int lane) { settle_tree(args, lane, shared); });
    for (int64_t round = 0; round < args.rounds; ++round) {
      lanes([&](int lane) { play_children(args, round, lane, shared); });
      lanes([&](int lane) { merge_children(args, round, lane, shared); });
      lanes([&](int lane) { weigh(args, round, lane, shared); });
    }
  }
  lanes([&](int lane) { write_next(args, lane, shared); });
}

// ---- whom to verify

struct KeepShared {
  float* scores;  // [capacity]
  double* best;   // the most that can be kept: chances, descending, -1 behind them
  int64_t* count;
  Chosen kept;
};

SPEC_HD inline int64_t considered(const KeepArgs& args) { return lesser(lesser(args.most, args.nodes), args.capacity); }

SPEC_HD inline int64_t lay_out(const KeepArgs& args, char* memory, KeepShared& shared) {
  Pieces pieces(memory);
  shared.scores = pieces.take<float>(args.capacity);
  shared.best = pieces.take<double>(considered(args));
  shared.count = pieces.take<int64_t>(1);
  shared.kept = Chosen::in(pieces, args.capacity);
  return pieces.used();
}

SPEC_HD inline int64_t bytes_of(const KeepArgs& args) {
  KeepShared shared{};
  return lay_out(args, nullptr, shared);
}

// For how many of the likeliest the summed chances exceed their price the most, as worth_most.
SPEC_HD inline int64_t count_worth(const KeepArgs& args, const double* chances) {
  const int64_t end = considered(args);
  double sum = 0, best = kLowest;
  for (int64_t n = 0; n < end && chances[n] >= 0; ++n) {
    const double worth = (sum += chances[n]) - args.price[n + 1];
    if (worth > best) best = worth;
  }
  sum = 0;
  for (int64_t n = 0; n < end && chances[n] >= 0; ++n)
    if ((sum += chances[n]) - args.price[n + 1] >= best - kWorth) return n + 1;
  return 1;
}

// Places are counted twice, as a lane has no room for those of all its nodes.
template <typename Lanes>
SPEC_HD inline void keep_on_lanes(const KeepArgs& args, char* memory, Lanes& lanes) {
  KeepShared shared{};
  lay_out(args, memory, shared);
  const int size = narrow(lesser(*args.size, args.capacity));
  lanes([&](int lane) {
    for (int node = lane; node < size; node += kRuleLanes)
      shared.scores[node] = args.paths[node] > kLowest ? args.paths[node] : kLowest;
    for (int64_t i = lane; i < considered(args); i += kRuleLanes) shared.best[i] = -1;
  });
  lanes([&](int lane) {
    for (int node = lane; node < size; node += kRuleLanes) {
      const int place = place_among(shared.scores, size, node);
      if (place < considered(args) && shared.scores[node] > kLowest)
        shared.best[place] = exp(static_cast<double>(shared.scores[node]));
    }
  });
  lanes([&](int lane) {
    if (lane == 0) *shared.count = count_worth(args, shared.best);
  });
  lanes([&](int lane) {
    for (int node = lane; node < size; node += kRuleLanes)
      shared.kept.flags[node] =
          shared.scores[node] > kLowest && place_among(shared.scores, size, node) < *shared.count;
  });
  lanes([&](int lane) { shared.kept.gather(lane, size); });
  lanes([&](int lane) {
    const int64_t live = shared.kept.all(size);
    for (int64_t node = lane; node < size; node += kRuleLanes)
      if (shared.kept.flags[node]) args.ids[shared.kept.before(node)] = node;
    for (int64_t i = live + lane; i < args.most; i += kRuleLanes) args.ids[i] = 0;
    if (lane == 0) *args.live = *args.verified = static_cast<int32_t>(live);
  });
}

// ---- a tree of what is verified

SPEC_HD inline int64_t bytes_of(const ExtractArgs& args) { return (args.rows * 4 + 7) / 8 * 8; }

// Behind the live nodes stand the root's values, but for parents, -1, and ancestors, none.
template <typename Lanes>
SPEC_HD inline void extract_on_lanes(const ExtractArgs& args, char* memory, Lanes& lanes) {
  int32_t* nodes = Pieces(memory).take<int32_t>(args.rows);
  const int rows = narrow(args.rows), live = narrow(lesser(*args.live, args.rows)), bytes = narrow(args.out.words) * 8;
  lanes([&](int lane) {
    for (int row = lane; row < rows; row += kRuleLanes) nodes[row] = row < live ? narrow(args.nodes[row]) : 0;
  });
  lanes([&](int lane) {
    for (int row = lane; row < rows; row += kRuleLanes) {
      const int node = nodes[row];
      args.out.tokens[row] = args.tree.tokens[node];
      args.out.depths[row] = args.tree.depths[node];
      args.out.log_probs[row] = args.tree.log_probs[node];
      args.out.path_log_probs[row] = args.tree.path_log_probs[node];
      int above = row < live ? row - 1 : -1;
      while (above >= 0 && nodes[above] != args.tree.parents[node]) --above;
      args.out.parents[row] = above;
    }
    auto* out = reinterpret_cast<uint8_t*>(args.out.ancestors);  // lowest bits first, as every device has them
    for (int at = lane; at < rows * bytes; at += kRuleLanes) {
      const int row = at / bytes, first = at % bytes * 8;
      unsigned bits = 0;
      for (int other = first; other < first + 8 && other < live && row < live; ++other) {
        const uint64_t word = args.tree.ancestors[nodes[row] * args.tree.words + nodes[other] / 64];
        bits |= static_cast<unsigned>(word >> nodes[other] % 64 & 1) << (other - first);
      }
      out[at] = static_cast<uint8_t>(bits);
    }
  });
}

// ---- what an outcome teaches

constexpr int64_t kGains = kLevels * kPlaces;

struct OutcomeShared {
  int32_t* wanted;  // by node: the place on the path, -1 off it
  Chosen tried;
  int32_t* knots;  // of those tried, in their order, the lower one; [capacity]
  float* parts;
  bool* hit;
  float* chances;          // by node, of the edge
  uint8_t *gains, *draws;  // by node: the place of the profile that gains, and the level that was drafted from
};

SPEC_HD inline int64_t lay_out(const OutcomeArgs& args, char* memory, OutcomeShared& shared) {
  Pieces pieces(memory);
  shared.wanted = pieces.take<int32_t>(args.capacity);
  shared.tried = Chosen::in(pieces, args.capacity);
  shared.knots = pieces.take<int32_t>(args.capacity);
  shared.parts = pieces.take<float>(args.capacity);
  shared.hit = pieces.take<bool>(args.capacity);
  shared.chances = pieces.take<float>(args.capacity);
  shared.gains = pieces.take<uint8_t>(args.capacity);
  shared.draws = pieces.take<uint8_t>(args.capacity);
  return pieces.used();
}

SPEC_HD inline int64_t bytes_of(const OutcomeArgs& args) {
  OutcomeShared shared{};
  return lay_out(args, nullptr, shared);
}

SPEC_HD inline OutcomeCounts counts_of(const OutcomeArgs& args) {
  return {args.hits, args.tries, args.table, args.gains, args.passes, args.profile, 0};
}

SPEC_HD inline void find_tried(const OutcomeArgs& args, int64_t size, int lane, const OutcomeShared& shared) {
  for (int64_t node = lane; node < size; node += kRuleLanes) {
    const int64_t parent = node ? args.parents[node] : 0;
    shared.tried.flags[node] =
        node > 0 && shared.wanted[parent] >= 0 && args.chosen[shared.wanted[parent]] >= 0;
    shared.chances[node] = expf(args.log_probs[node]);
    const auto level = [&](int64_t of) {
      return static_cast<uint8_t>(of ? level_of(expf(args.log_probs[of]), kLevels) : 0);
    };
    shared.draws[node] = args.drafted[node] ? level(node) : kLevels;
    shared.gains[node] = node > 0 && args.drafted[parent]
                             ? static_cast<uint8_t>(level(parent) * kPlaces + args.places[node])
                             : static_cast<uint8_t>(kGains);
  }
}

SPEC_HD inline void list_tried(const OutcomeArgs& args, int64_t size, int lane, const OutcomeShared& shared) {
  for (int64_t node = lane; node < size; node += kRuleLanes) {
    if (!shared.tried.flags[node]) continue;
    const Knot at = knot_of(args.stated[node], kKnots);
    const int64_t place = shared.tried.before(node), target = args.chosen[shared.wanted[args.parents[node]]];
    shared.knots[place] = static_cast<int32_t>(args.cells[node] * kKnots + at.low);
    shared.parts[place] = at.part;
    shared.hit[place] = target == args.tokens[node];
  }
}

// The first of those that share a knot adds up all of them, in their order.
SPEC_HD inline void count_tried(const OutcomeArgs& args, int64_t size, int lane, const OutcomeShared& shared) {
  const int64_t tried = shared.tried.all(size);
  for (int64_t at = lane; at < 2 * tried; at += kRuleLanes) {
    const int32_t knot = shared.knots[at / 2] + static_cast<int32_t>(at % 2);
    bool first = true;
    for (int64_t i = 0; i < at / 2 && first; ++i) first = shared.knots[i] != knot && shared.knots[i] + 1 != knot;
    if (!first) continue;
    float tries = args.tries[knot], hits = args.hits[knot];
    int touched = 0;
    for (int64_t i = at / 2; i < tried; ++i) {
      const int32_t side = knot - shared.knots[i];
      if (side != 0 && side != 1) continue;
      const float weight = side ? shared.parts[i] : 1 - shared.parts[i];
      tries += weight;
      if (shared.hit[i]) hits += weight;
      ++touched;
    }
    args.tries[knot] = tries;
    args.hits[knot] = hits;
    for (int i = 0; i < touched; ++i) forget_and_divide(counts_of(args), knot);
  }
}

SPEC_HD inline void count_gains(const OutcomeArgs& args, int64_t size, int lane, const OutcomeShared& shared) {
  for (int64_t at = lane; at < kGains + kLevels; at += kRuleLanes) {
    const bool draws = at >= kGains;
    const uint8_t *places = draws ? shared.draws : shared.gains, own = static_cast<uint8_t>(draws ? at - kGains : at);
    float* into = draws ? args.passes + own : args.gains + own;
    float sum = *into;
    for (int64_t node = 0; node < size; ++node)
      if (places[node] == own) sum += draws ? 1.0f : shared.chances[node];
    *into = sum;
  }
}

template <typename Lanes>
SPEC_HD inline void outcome_on_lanes(const OutcomeArgs& args, char* memory, Lanes& lanes) {
  OutcomeShared shared{};
  lay_out(args, memory, shared);
  const int64_t size = lesser(*args.size, args.capacity), length = lesser(*args.path_live, args.width);
  const Throughput& throughput = args.throughput;
  lanes([&](int lane) {
    for (int64_t node = lane; node < size; node += kRuleLanes) shared.wanted[node] = -1;
    if (lane) return;
    const int64_t verified = *args.verified < 0 ? 0 : lesser(*args.verified, throughput.verified - 1);
    const float took = throughput.verify[verified] + *args.drafting + *args.overhead;
    enter_cycle(throughput, *args.path_live, took, static_cast<float>(args.memory));
  });
  lanes([&](int lane) {
    for (int64_t i = lane; i < length; i += kRuleLanes) shared.wanted[args.path[i]] = static_cast<int32_t>(i);
    const float rate = rate_of(throughput);
    for (int64_t n = lane; n < throughput.verified; n += kRuleLanes)
      throughput.verify_price[n] = throughput.verify[n] * rate;
    for (int64_t n = lane; n < throughput.drafted; n += kRuleLanes)
      throughput.draft_price[n] = throughput.draft[n] * rate;
  });
  lanes([&](int lane) { find_tried(args, size, lane, shared); });
  lanes([&](int lane) { shared.tried.gather(lane, size); });
  lanes([&](int lane) { list_tried(args, size, lane, shared); });
  lanes([&](int lane) {
    count_tried(args, size, lane, shared);
    count_gains(args, size, kRuleLanes - 1 - lane, shared);
  });
  lanes([&](int lane) {
    if (lane < kLevels) forget_and_divide_level(counts_of(args), lane);
  });
}

}  // namespace spec
