// The rule of spec/device_worth.hpp, which a device runs, in lock step on the host and in heap buffers of the exact size,
// against spec/worth.hpp, bit by bit. Exits with 1 and a line per failed check.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "spec/worth.hpp"
#include "tests/check.hpp"
#include "tests/lanes.hpp"

namespace {

constexpr int64_t kCells = 2 * spec::kSources * spec::kDepths * spec::kRanks;

float real(float most) { return most * static_cast<float>(below(1 << 20)) / (1 << 20); }

std::vector<float> reals(int64_t count, float most) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = real(most);
  return values;
}

// A tree and the books of a search over it. coarse: chances and so scores with ties.
struct Books {
  int64_t capacity, words;
  std::vector<int64_t> tokens, parents, depths, cells, places, group{1};
  std::vector<float> edges, paths, stated, hits, tries, table, gains, passes, profile;
  std::vector<uint64_t> ancestors;
  std::vector<char> waiting, drafted;
  std::vector<int32_t> counters{1, 0, 0}, verified{0};
  std::vector<float> drafting{0}, overhead{1e-4f}, recent{8, 8e-3f}, verify, draft, verify_price, draft_price;
  std::vector<int64_t> widths;

  Books(int64_t room, int64_t nodes, int64_t width, bool coarse) : capacity(room), words((room + 63) / 64) {
    const auto size = static_cast<size_t>(room);
    for (auto* part : {&tokens, &parents, &depths}) part->assign(size, 0);
    for (auto* part : {&cells, &places}) part->assign(size + 1, 0);
    for (auto* part : {&edges, &paths}) part->assign(size, 0.0f);
    stated.assign(size + 1, 0.0f);
    for (auto* part : {&waiting, &drafted}) part->assign(size + 1, 0);
    ancestors.assign(size * static_cast<size_t>(words), 0);
    ancestors[0] = 1, parents[0] = -1, waiting[0] = 1;
    tries = reals(kCells * spec::kKnots, 155);
    for (float& one : tries) one += 1;
    table = reals(kCells * spec::kKnots, 0.9f);
    for (float& one : table) one = coarse ? std::round(one * 4 + 1) / 6 : one + 1e-3f;
    for (size_t i = 0; i < tries.size(); ++i) hits.push_back(tries[i] * table[i]);
    passes = reals(spec::kLevels, 62);
    for (float& one : passes) one += 1;
    profile = reals(spec::kLevels * spec::kPlaces, coarse ? 3 : 0.7f);
    for (float& one : profile) one = coarse ? std::floor(one) / 4 : one;
    for (size_t i = 0; i < profile.size(); ++i) gains.push_back(profile[i] * passes[i / spec::kPlaces]);
    verify = reals(nodes + 1, 1e-4f), draft = reals(width + 1, 1e-4f);
    for (size_t i = 0; i < verify.size(); ++i) verify[i] += 1e-3f * (1 + 0.004f * static_cast<float>(i));
    verify_price = verify, draft_price = draft;
    for (const int64_t one : {1, 2, 3, 4, 6, 8})
      if (one < width) widths.push_back(one);
    widths.push_back(width);
    spec::update_throughput(throughput(), 0, 0, 0.97f);
  }

  spec::TreeArrays tree() {
    return {tokens.data(), parents.data(), depths.data(), edges.data(), paths.data(), ancestors.data(), words};
  }
  spec::SearchNotes notes() {
    return {stated.data(), cells.data(), places.data(), reinterpret_cast<bool*>(waiting.data()),
            reinterpret_cast<bool*>(drafted.data())};
  }
  spec::OutcomeCounts counts() {
    return {hits.data(), tries.data(), table.data(), gains.data(), passes.data(), profile.data(), group[0]};
  }
  spec::Throughput throughput() {
    return {verify.data(), draft.data(), verify_price.data(), draft_price.data(), recent.data(),
            static_cast<int64_t>(verify.size()), static_cast<int64_t>(draft.size())};
  }
  spec::SearchPrices prices() {
    return {verify_price.data(), draft_price.data(), static_cast<int64_t>(verify.size()) - 1,
            static_cast<int64_t>(draft.size()) - 1, widths.data(), static_cast<int64_t>(widths.size())};
  }
  spec::Profile chances() { return {profile.data(), spec::kLevels, spec::kPlaces}; }
};

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void check_same(const Books& a, const Books& b) {
  check(a.tokens == b.tokens && a.parents == b.parents && a.depths == b.depths, "tree", a.capacity);
  check(same_bits(a.edges, b.edges) && same_bits(a.paths, b.paths), "edges", a.capacity);
  check(a.ancestors == b.ancestors, "ancestors", a.capacity);
  check(a.counters == b.counters && a.verified == b.verified, "counters", a.capacity);
  check(same_bits(a.stated, b.stated) && a.cells == b.cells && a.places == b.places, "notes", a.capacity);
  check(a.waiting == b.waiting && a.drafted == b.drafted, "flags", a.capacity);
  check(same_bits(a.hits, b.hits) && same_bits(a.tries, b.tries) && same_bits(a.table, b.table), "table", a.capacity);
  check(same_bits(a.gains, b.gains) && same_bits(a.passes, b.passes) && same_bits(a.profile, b.profile), "profile",
        a.capacity);
  check(same_bits(a.drafting, b.drafting) && same_bits(a.recent, b.recent), "throughput", a.capacity);
  check(same_bits(a.verify_price, b.verify_price) && same_bits(a.draft_price, b.draft_price), "prices", a.capacity);
}

struct Level {
  std::vector<int64_t> frontier, columns, token_ids;
  std::vector<int32_t> live;
  std::vector<float> stated;
  std::vector<uint8_t> marks;
  int64_t rows, places, stride;
};

Level random_level(const std::vector<int64_t>& nodes, int64_t rows, int64_t places, bool coarse) {
  Level out{std::vector<int64_t>(static_cast<size_t>(rows), 1 << 30), {}, {}, {static_cast<int32_t>(nodes.size())}, {}, {},
            rows, places, 50};
  std::copy(nodes.begin(), nodes.end(), out.frontier.begin());
  for (int64_t i = 0; i < out.stride; ++i) out.token_ids.push_back(below(1000));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t place = 0; place < places; ++place) {
      out.columns.push_back(below(out.stride));
      const float score = coarse ? -static_cast<float>(below(4)) : -real(6);
      out.stated.push_back(below(20) ? score : -INFINITY);
    }
  for (int64_t i = 0; i < rows * out.stride; ++i) out.marks.push_back(static_cast<uint8_t>(below(8)));
  return out;
}

// As grow_likely of ops/worth.cpp does it.
std::vector<int64_t> grown(Books& books, const Level& given, bool mapped, bool marked, double least, int64_t most,
                           int64_t rounds, bool further) {
  const int64_t live = given.live[0];
  std::vector<uint8_t> sources;
  for (int64_t i = 0; i < given.rows * given.places; ++i)
    sources.push_back(given.marks[static_cast<size_t>(i / given.places * given.stride + given.columns[static_cast<size_t>(i)])]);
  books.drafting[0] += books.draft[static_cast<size_t>(live)];
  const auto likely = spec::likely_children(books.tree(), given.frontier.data(), live, given.places, given.stated.data(),
                                            marked ? sources.data() : nullptr, books.counts(), least, most);
  for (int64_t row = 0; row < live; ++row) {
    books.waiting[static_cast<size_t>(given.frontier[static_cast<size_t>(row)])] = 0;
    books.drafted[static_cast<size_t>(given.frontier[static_cast<size_t>(row)])] = 1;
  }
  const int64_t first = books.counters[0];
  const bool fits = first + static_cast<int64_t>(likely.size()) <= books.capacity;
  if (!fits) books.counters[2] = 1;
  for (size_t i = 0; fits && i < likely.size(); ++i) {
    const auto entry = static_cast<size_t>(likely[i].entry);
    const int64_t parent = given.frontier[entry / static_cast<size_t>(given.places)], column = given.columns[entry];
    const int64_t token = mapped ? given.token_ids[static_cast<size_t>(column)] : column;
    const int64_t node = first + static_cast<int64_t>(i);
    spec::append_nodes(books.tree(), node, 1, &parent, &token, &likely[i].edge);
    const auto at = static_cast<size_t>(node);
    books.stated[at] = given.stated[entry], books.cells[at] = likely[i].cell, books.waiting[at] = 1;
    books.places[at] = static_cast<int64_t>(entry) % given.places;
    ++books.counters[0];
  }
  if (!further) return {};
  return spec::next_pass(books.paths.data(), books.edges.data(), books.notes().waiting, books.counters[0],
                         books.chances(), books.prices(), rounds);
}

spec::LevelArgs args_of(Books& books, const Level& given, bool mapped, bool marked, double least, int64_t most,
                        int64_t rounds, bool further, std::vector<int64_t>& ids, int32_t& live) {
  return {books.tree(), books.capacity, &books.counters[0], &books.counters[1], &books.counters[2],
          given.frontier.data(), given.live.data(), given.rows, given.stated.data(), given.columns.data(), given.places,
          mapped ? given.token_ids.data() : nullptr, marked ? given.marks.data() : nullptr, given.stride,
          books.table.data(), books.profile.data(), books.group.data(), books.notes(), books.drafting.data(),
          books.draft.data(), books.prices(), least, most, rounds, further ? 1 << 20 : 0, ids.data(), &live, nullptr, 0};
}

int levels = 0;

void test_search(int64_t nodes, int64_t width, int64_t rounds, int64_t room, bool coarse) {
  Books expected(room, nodes, width, coarse), lanes = expected;
  std::vector<int64_t> frontier{0};
  for (int pass = 0; pass < 7 && !frontier.empty(); ++pass) {
    ++levels;
    const bool mapped = below(2), marked = below(2), further = pass < 6;
    const double least = below(2) ? -9.0 : -2.5;
    const int64_t most = below(3) ? nodes : below(9), places = 1 + below(spec::kPlaces);
    const Level level = random_level(frontier, width, places, coarse);
    std::vector<int64_t> ids(static_cast<size_t>(width), -7);
    int32_t live = -7;
    run_on_host_lanes(args_of(lanes, level, mapped, marked, least, most, rounds, further, ids, live));
    frontier = grown(expected, level, mapped, marked, least, most, rounds, further);
    check(live == static_cast<int32_t>(frontier.size()), "live", nodes);
    for (size_t i = 0; i < ids.size(); ++i) check(ids[i] == (i < frontier.size() ? frontier[i] : 0), "next", nodes);
    check_same(lanes, expected);
  }
  // whom to verify
  const int64_t most = 1 + below(2 * nodes), size = expected.counters[0];
  std::vector<int64_t> ids(static_cast<size_t>(most), -7), wanted(static_cast<size_t>(most), 0);
  int32_t live = -7;
  run_on_host_lanes(spec::KeepArgs{lanes.paths.data(), &lanes.counters[0], room, lanes.verify_price.data(), nodes, most,
                                   ids.data(), &live, lanes.verified.data()});
  const int64_t worth =
      spec::worth_most(expected.paths.data(), size, expected.verify_price.data(), std::min({most, nodes, room}));
  expected.verified[0] =
      static_cast<int32_t>(spec::select_best(expected.paths.data(), size, std::min(worth, most), wanted.data()));
  check(live == expected.verified[0] && ids == wanted, "kept", nodes);
  // the outcome: down any children
  std::vector<int64_t> path{0}, chosen;
  for (int64_t node = 1; node < size; ++node)
    if (expected.parents[static_cast<size_t>(node)] == path.back() && below(3)) path.push_back(node);
  for (size_t i = 1; i < path.size(); ++i) chosen.push_back(expected.tokens[static_cast<size_t>(path[i])]);
  chosen.push_back(below(5) ? 2000 : -1);
  const auto length = static_cast<int32_t>(path.size());
  path.resize(path.size() + 2, 1 << 30), chosen.resize(chosen.size() + 2, 1 << 30);
  spec::count_outcomes(expected.tree(), size, path.data(), chosen.data(), length, expected.counts(), expected.notes());
  const float took = expected.verify[static_cast<size_t>(expected.verified[0])] + expected.drafting[0] + expected.overhead[0];
  spec::update_throughput(expected.throughput(), length, took, 0.97f);
  const spec::OutcomeCounts counts = lanes.counts();
  run_on_host_lanes(spec::OutcomeArgs{
      lanes.tokens.data(), lanes.parents.data(), lanes.edges.data(), &lanes.counters[0], room, path.data(), chosen.data(),
      &length, static_cast<int64_t>(path.size()), counts.hits, counts.tries, counts.table, counts.gains, counts.passes,
      counts.profile, lanes.stated.data(), lanes.cells.data(), lanes.places.data(), lanes.notes().drafted,
      lanes.throughput(), lanes.drafting.data(), lanes.overhead.data(), lanes.verified.data(), 0.97});
  check_same(lanes, expected);
}

}  // namespace

int main() {
  for (int round = 0; round < 8; ++round)
    for (const bool coarse : {false, true}) {
      test_search(64, 8, 2, 833, coarse);
      test_search(64, 8, 2, 70, coarse);  // without room
      test_search(3, 2, 3, 40, coarse);
      test_search(10, 5, 1, 90, coarse);
      test_search(33, 1, 4, 200, coarse);
    }
  check(levels > 250, "searches that go on", levels);
  return verdict();
}
