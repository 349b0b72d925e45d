// Runs csrc/spec against brute force on random inputs in heap buffers of the exact size, so that the sanitizers see
// every read and write that leaves them. Exits with 1 and a line per failed check.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "spec/best_first.hpp"
#include "spec/candidates.hpp"
#include "spec/classifier.hpp"
#include "spec/compaction.hpp"
#include "spec/decisions.hpp"
#include "spec/entropy.hpp"
#include "spec/gumbel.hpp"
#include "spec/strict_attention.hpp"
#include "spec/top_children.hpp"
#include "spec/tree.hpp"
#include "tests/check.hpp"

namespace {

// Normal values; coarse ones tie often. One in 16 is NaN, -inf or +inf where `special`.
std::vector<float> random_scores(int64_t size, bool coarse, bool special) {
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) {
    value = normal(generator);
    if (coarse) value = std::round(value);
    if (special && below(16) == 0) {
      const float kinds[] = {NAN, -INFINITY, INFINITY};
      value = kinds[below(3)];
    }
  }
  return values;
}

std::vector<spec::Scored> sorted(const std::vector<float>& values) {
  std::vector<spec::Scored> all;
  for (size_t i = 0; i < values.size(); ++i) all.push_back({spec::defined(values[i]), static_cast<int64_t>(i)});
  std::sort(all.begin(), all.end(), spec::better);
  return all;
}

void test_philox() {  // Random123's known answers
  const uint32_t cases[3][10] = {
      {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
      {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
      {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
       0x24126ea1},
  };
  for (const auto& known : cases) {
    uint32_t words[4][1] = {{known[0]}, {known[1]}, {known[2]}, {known[3]}};
    spec::philox(words, {known[4], known[5]});
    for (int i = 0; i < 4; ++i) check(words[i][0] == known[6 + i], "philox", i);
  }
}

int64_t brute_gumbel(const std::vector<float>& scores, uint64_t seed, uint64_t position) {
  double best = -INFINITY;
  int64_t index = -1;
  for (size_t i = 0; i < scores.size(); ++i) {
    uint32_t words[4][1] = {{static_cast<uint32_t>(i / 4)},
                            {static_cast<uint32_t>(position)},
                            {static_cast<uint32_t>(position >> 32)},
                            {0}};
    spec::philox(words, {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    const double sum = static_cast<double>(spec::defined(scores[i])) + spec::gumbel(words[i % 4][0]);
    if (sum > best) best = sum, index = static_cast<int64_t>(i);
  }
  return index;
}

void test_gumbel() {
  check(spec::gumbel(~0u) <= spec::kLargestNoise && spec::gumbel(~0u) > spec::kLargestNoise - 0.01, "noise bound", 0);
  for (const int64_t size : {1, 3, 4, 63, 64, 255, 256, 257, 1000, 3001})
    for (int kind = 0; kind < 8; ++kind) {
      auto scores = random_scores(size, kind & 1, kind & 2);
      if (kind & 4)
        for (float& score : scores) score *= 100.0f;
      const uint64_t seed = generator(), position = generator();
      check(spec::keyed_gumbel_argmax(scores.data(), size, seed, position) == brute_gumbel(scores, seed, position),
            "keyed_gumbel_argmax", size);
    }
  const std::vector<float> nothing(70, -INFINITY);
  check(spec::keyed_gumbel_argmax(nothing.data(), 70, 1, 1) == -1, "keyed_gumbel_argmax of nothing", 70);
}

// With `padding` rows behind the nodes, of which nothing is read.
void test_subtree(const std::vector<int64_t>& parents, std::vector<int64_t> kept,
                  const std::vector<uint64_t>& ancestors, int64_t words, int64_t padding) {
  const auto nodes = static_cast<int64_t>(parents.size()), count = static_cast<int64_t>(kept.size());
  const int64_t room = count + padding, kept_words = spec::words_for(room);
  std::vector<int64_t> renumbered(static_cast<size_t>(room), 7);
  std::vector<uint64_t> rows(static_cast<size_t>(room * kept_words), ~uint64_t{0});
  const auto run = [&] {
    return spec::subtree(parents.data(), nodes, kept.data(), count, room, renumbered.data(), rows.data());
  };
  check(run(), "subtree accepts", nodes);
  for (int64_t i = 0; i < room; ++i) {
    const bool there = i < count;
    if (i == 0 || !there)
      check(renumbered[i] == -1, "subtree padding", nodes);
    else
      check(kept[renumbered[i]] == parents[kept[i]], "subtree parents", nodes);
    for (int64_t j = 0; j < kept_words * spec::kWordBits; ++j) {
      const bool bit = rows[i * kept_words + j / 64] >> (j % 64) & 1;
      const bool expected =
          there && j < count && (ancestors[kept[i] * words + kept[j] / 64] >> (kept[j] % 64) & 1);
      check(bit == expected, "subtree ancestors", nodes);
    }
  }
  const auto refuses = [&](int64_t place, int64_t node) {
    const int64_t before = kept[place];
    kept[place] = node;
    check(!run(), "subtree refuses", nodes);
    kept[place] = before;
  };
  refuses(0, 1);
  refuses(count - 1, nodes);
  refuses(count - 1, -1);
  check(!spec::subtree(parents.data(), nodes, kept.data(), 0, room, renumbered.data(), rows.data()), "no subtree", 0);
  if (count > 2) refuses(1, kept[2]);
}

// Appended in runs whose parents are there before them, against what the parents say.
void test_append_nodes(const std::vector<int64_t>& parents, const std::vector<uint64_t>& ancestors, int64_t words) {
  const auto nodes = static_cast<int64_t>(parents.size());
  std::vector<int64_t> tokens(parents.size(), 7), above(parents.size(), -1), depths(parents.size());
  std::vector<float> edges(parents.size()), paths(parents.size());
  std::vector<uint64_t> rows(static_cast<size_t>(nodes * words));
  rows[0] = 1;
  std::vector<int64_t> ids(parents.size());
  std::iota(ids.begin(), ids.end(), 100);
  const std::vector<float> log_probs(parents.size(), -0.5f);
  const spec::TreeArrays tree{tokens.data(), above.data(), depths.data(), edges.data(),
                              paths.data(),  rows.data(),  words};
  const auto append = [&](int64_t size, int64_t count, const int64_t* given) {
    return spec::append_nodes(tree, size, count, given, ids.data() + size, log_probs.data() + size);
  };
  for (int64_t size = 1, stop; size < nodes; size = stop) {
    for (stop = size + 1; stop < nodes && parents[stop] < size;) ++stop;
    check(append(size, stop - size, parents.data() + size), "append_nodes accepts", nodes);
    if (stop < nodes) {
      check(!append(size, stop + 1 - size, parents.data() + size), "append_nodes refuses its own", nodes);
      check(above[stop] == -1 && tokens[stop] == 7, "append_nodes writes nothing then", nodes);
    }
  }
  check(above == parents && rows == ancestors, "append_nodes", nodes);
  for (int64_t i = 1; i < nodes; ++i) {
    check(tokens[i] == ids[i] && edges[i] == -0.5f, "append_nodes values", nodes);
    check(depths[i] == depths[parents[i]] + 1 && paths[i] == -0.5f * static_cast<float>(depths[i]), "depths", nodes);
  }
  if (nodes == 1) return;
  for (const int64_t wrong : {int64_t{-1}, nodes - 1})
    check(!append(nodes - 1, 1, &wrong) && above == parents, "append_nodes refuses", nodes);
}

void test_tree() {
  for (const int64_t nodes : {1, 2, 63, 64, 65, 128, 129, 256}) {
    std::vector<int64_t> parents(static_cast<size_t>(nodes), -1);
    for (int64_t i = 1; i < nodes; ++i) parents[i] = below(i);
    const int64_t words = spec::words_for(nodes);
    std::vector<uint64_t> ancestors(static_cast<size_t>(nodes * words), ~uint64_t{0});
    check(spec::ancestor_words(parents.data(), nodes, words, ancestors.data()), "ancestor_words accepts", nodes);
    test_append_nodes(parents, ancestors, words);
    std::vector<uint8_t> mask(static_cast<size_t>(nodes * nodes), 7);
    spec::tree_mask(ancestors.data(), nodes, words, nodes, mask.data());
    for (int64_t node = 0; node < nodes; ++node) {
      std::vector<uint8_t> row(static_cast<size_t>(nodes), 0);
      for (int64_t up = node; up >= 0; up = parents[up]) row[up] = 1;
      check(std::equal(row.begin(), row.end(), mask.begin() + node * nodes), "ancestors", nodes);
    }

    std::vector<int64_t> tokens(static_cast<size_t>(nodes)), chosen(static_cast<size_t>(nodes));
    std::iota(tokens.begin(), tokens.end(), 100);
    std::vector<int64_t> expected;
    for (int64_t node = below(nodes); node >= 0; node = parents[node]) expected.insert(expected.begin(), node);
    for (size_t j = 1; j < expected.size(); ++j) chosen[expected[j - 1]] = tokens[expected[j]];
    std::vector<int64_t> path(static_cast<size_t>(nodes));
    path.resize(static_cast<size_t>(spec::walk(tokens.data(), parents.data(), chosen.data(), nodes, path.data())));
    check(path == expected, "walk", nodes);

    std::vector<int64_t> kept;
    for (int64_t node = 0; node < nodes; ++node)
      if (node == 0 || (below(3) != 0 && std::count(kept.begin(), kept.end(), parents[node]))) kept.push_back(node);
    for (const int64_t padding : {0, 1, 70}) test_subtree(parents, kept, ancestors, words, padding);

    parents.back() = nodes;
    check(!spec::ancestor_words(parents.data(), nodes, words, ancestors.data()), "ancestor_words refuses", nodes);
  }
}

void test_select_best() {
  for (const int64_t size : {0, 1, 7, 64, 700})
    for (const int64_t count : {0, 1, 5, 60, 1000}) {
      auto values = random_scores(size, true, true);
      for (float& value : values)
        if (std::isnan(value)) value = -INFINITY;
      std::vector<int64_t> expected;
      for (const auto& scored : sorted(values))
        if (static_cast<int64_t>(expected.size()) < count && scored.value > spec::kLowest)
          expected.push_back(scored.index);
      std::sort(expected.begin(), expected.end());
      std::vector<int64_t> out(static_cast<size_t>(std::min(count, size)), -1);
      const int64_t kept = spec::select_best(values.data(), size, count, out.data());
      check(kept == static_cast<int64_t>(expected.size()), "select_best count", size);
      check(std::equal(expected.begin(), expected.end(), out.begin()), "select_best", size);
    }
  const float nan = NAN;
  int64_t out;
  check(spec::select_best(&nan, 1, 1, &out) == -1, "select_best of NaN", 1);
}

// The values as T stores them, and what T keeps of them back in `values`.
template <typename T>
std::vector<T> stored(std::vector<float>& values) {
  std::vector<T> raw(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if constexpr (sizeof(T) == 4) {
      raw[i] = values[i];
    } else {
      uint32_t bits;
      std::memcpy(&bits, &values[i], sizeof bits);
      raw[i] = static_cast<uint16_t>(bits >> 16);
      values[i] = spec::load(raw.data(), static_cast<int64_t>(i));
    }
  }
  return raw;
}

template <typename T>
void test_top_children(const char* what) {
  for (const int64_t columns : {1, 2, 15, 255, 256, 257, 1000, 5003})
    for (const int64_t k : {int64_t{1}, int64_t{10}, columns})
      for (int kind = 0; kind < 4; ++kind) {
        if (k > columns) continue;
        const int64_t rows = 3, stride = columns + 2;
        auto values = random_scores((rows - 1) * stride + columns, kind & 1, kind & 2);
        const std::vector<T> raw = stored<T>(values);
        std::vector<float> log_probs(static_cast<size_t>(rows * k), NAN);
        std::vector<int64_t> best(static_cast<size_t>(rows * k), -1);
        spec::top_children(raw.data(), rows, columns, stride, k, false, log_probs.data(), best.data());
        for (int64_t r = 0; r < rows; ++r) {
          const std::vector<float> row(values.begin() + r * stride, values.begin() + r * stride + columns);
          const auto expected = sorted(row);
          double sum = 0.0;
          for (const auto& scored : expected) sum += std::exp(static_cast<double>(scored.value) - expected[0].value);
          for (int64_t j = 0; j < k; ++j) {
            const double exact = static_cast<double>(expected[j].value) - expected[0].value - std::log(sum);
            const double got = log_probs[r * k + j];
            check(best[r * k + j] == expected[j].index, what, columns);
            if (expected[j].value == spec::kLowest)
              check(got == -INFINITY, what, columns);
            else if (std::isfinite(static_cast<float>(exact)))
              check(std::fabs(got - exact) <= 1e-6 + 3e-7 * std::fabs(exact), what, columns);
          }
        }
      }
}

// Candidates of normalised rows, by sorting all of them; scores are sums of two floats there, so equality is exact.
std::vector<spec::Candidate> brute_candidates(const std::vector<float>& values, int64_t rows, int64_t columns,
                                              int64_t stride, const std::vector<float>& scores, int64_t count,
                                              float log_gate, float bound) {
  std::vector<spec::Candidate> all;
  float anchor = -INFINITY;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      const float value = spec::defined(values[r * stride + c]), score = spec::defined(scores[r]) + value;
      anchor = std::max(anchor, score);
      if (score > bound && score > -INFINITY) all.push_back({score, value, value, r, c});
    }
  const auto fails = [&](const spec::Candidate& candidate) {
    return log_gate > -INFINITY && candidate.score < anchor + log_gate;
  };
  all.erase(std::remove_if(all.begin(), all.end(), fails), all.end());
  std::stable_sort(all.begin(), all.end(), [](const spec::Candidate& a, const spec::Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.row == b.row && a.value > b.value);
  });
  if (static_cast<int64_t>(all.size()) > count) all.resize(static_cast<size_t>(count));
  return all;
}

template <typename T>
void test_best_candidates(const char* what) {
  for (const int64_t columns : {1, 2, 255, 256, 257, 1000, 5003})
    for (const int64_t rows : {0, 1, 4})
      for (const int64_t count : {1, 7, 59, 300, 30000})
        for (int kind = 0; kind < 16; ++kind) {
          const int64_t stride = columns + 2;
          auto values = random_scores(rows ? (rows - 1) * stride + columns : 0, kind & 1, kind & 2);
          const std::vector<T> raw = stored<T>(values);
          const auto scores = random_scores(rows, kind & 1, kind & 2);
          const float log_gate = kind & 4 ? -2.0f : -INFINITY, bound = kind & 8 ? 1.0f : -INFINITY;
          const auto got = spec::best_candidates(raw.data(), rows, columns, stride, scores.data(), count, log_gate,
                                                 bound, true);
          const auto expected = brute_candidates(values, rows, columns, stride, scores, count, log_gate, bound);
          check(got.size() == expected.size(), what, columns);
          for (size_t i = 0; i < std::min(got.size(), expected.size()); ++i)
            check(got[i].score == expected[i].score && got[i].log_prob == expected[i].log_prob &&
                      got[i].row == expected[i].row && got[i].column == expected[i].column,
                  what, columns);
        }
}

template <typename T>
void test_top_entropy(const char* what) {
  for (const int64_t columns : {1, 2, 255, 256, 257, 1000, 5003})
    for (const int64_t top : {int64_t{1}, int64_t{10}, columns - 1, columns, columns + 5})
      for (int kind = 0; kind < 16; ++kind) {
        if (top < 1) continue;
        const bool normalized = kind & 8;
        const int64_t rows = 3, stride = columns + 2;
        auto values = random_scores((rows - 1) * stride + columns, kind & 1, false);
        for (float& value : values) {
          if (kind & 4) value *= 30.0f;
          if (normalized) value = -std::fabs(value);
          if (kind & 2 && below(4) == 0) value = below(2) ? NAN : -INFINITY;
        }
        const std::vector<T> raw = stored<T>(values);
        std::vector<float> out(static_cast<size_t>(rows), NAN);
        spec::top_entropy(raw.data(), rows, columns, stride, top, normalized, out.data());
        for (int64_t r = 0; r < rows; ++r) {
          const auto row = sorted({values.begin() + r * stride, values.begin() + r * stride + columns});
          double log_sum = 0.0, entropy = 0.0;
          if (!normalized && row[0].value > -INFINITY) {
            double sum = 0.0;
            for (const auto& scored : row) sum += std::exp(static_cast<double>(scored.value) - row[0].value);
            log_sum = row[0].value + std::log(sum);
          }
          for (int64_t j = 0; j < std::min(top, columns); ++j) {
            const double log_prob = row[j].value - log_sum;
            if (row[j].value > -INFINITY) entropy -= std::exp(log_prob) * log_prob;
          }
          check(std::fabs(out[r] - entropy) <= 1e-5 + 1e-6 * std::fabs(entropy), what, columns);
        }
      }
}

void test_classifier() {
  for (const int64_t hidden : {1, 7, 48}) {
    const auto weights = random_scores(hidden * 3, false, false), bias = random_scores(hidden, false, false),
               last = random_scores(hidden, false, false), paths = random_scores(10, false, false);
    const float entropies[] = {0.5f, 2.0f};
    const spec::Network net{weights.data(), bias.data(), last.data(), 0.25f, 3, hidden};
    std::vector<float> out(10, NAN), alone(1, NAN);
    spec::classify_paths(net, paths.data(), entropies, 2.0f, 2, 5, out.data());
    for (int64_t i = 0; i < 10; ++i) {
      const float features[] = {std::exp(paths[i]), entropies[i / 5], 2.0f};
      double sum = 0.25;
      for (int64_t unit = 0; unit < hidden; ++unit) {
        double value = bias[unit];
        for (int64_t j = 0; j < 3; ++j) value += static_cast<double>(weights[unit * 3 + j]) * features[j];
        sum += value > 0.0 ? last[unit] * value : 0.0;
      }
      spec::probabilities(net, features, 1, alone.data());
      const float short_row[] = {std::fabs(paths[i])};  // one column: a probability of 1, an entropy of 0
      const spec::Network by_row{weights.data(), bias.data(), last.data(), 0.25f, 3, hidden};
      const float sure[] = {1.0f, 0.0f, 4.0f};
      float wanted;
      spec::probabilities(by_row, sure, 1, &wanted);
      check(std::fabs(spec::classify_row(by_row, short_row, 1, 1, false, 4.0f) - wanted) < 1e-5, "row", hidden);
      check(alone[0] == out[i] && std::fabs(out[i] - 1.0 / (1.0 + std::exp(-sum))) < 1e-5, "classifier", hidden);
    }
  }
}

void test_decisions() {
  const spec::BeamWindow window{2, 2, 6, 5, 2, -9.0f, -7.0f};  // the level behind the first, and a vacant place
  const float scores[] = {0.0f, -1.0f, -2.0f, -3.0f, -8.0f, -5.0f};
  const int64_t depths[] = {0, 1, 1, 2, 2, 2};
  std::vector<float> seen(9, NAN);
  spec::beam_observation(window, scores, depths, 6, 0.5f, 0.25f, seen.data());
  check(seen == std::vector<float>{-3, -7, -5, -9, -9, 0.5f, 0.5f, 0.25f, 0.25f}, "observation", 0);
  for (const bool tanh : {false, true})
    for (const int64_t hidden : {1, 16, 37}) {
      const auto first = random_scores(hidden * 9, false, false), bias = random_scores(hidden, false, false),
                 last = random_scores(hidden * 3, false, false), rest = random_scores(3, false, false);
      std::vector<double> out(3);
      for (int64_t action = 0; action < 3; ++action) {
        out[action] = rest[action];
        for (int64_t unit = 0; unit < hidden; ++unit) {
          double value = bias[unit];
          for (int64_t i = 0; i < 9; ++i) value += static_cast<double>(first[unit * 9 + i]) * seen[i];
          out[action] += last[action * hidden + unit] * (tanh ? std::tanh(value) : std::max(value, 0.0));
        }
      }
      const int64_t action = spec::best_action({9, hidden, 3}, {first.data(), bias.data(), last.data(), rest.data()},
                                               tanh, seen.data());
      check(out[action] >= *std::max_element(out.begin(), out.end()) - 1e-3, "action", hidden);
    }
}

// Rows along paths, against the same rows by a mask; the cache ends with the last slot that is seen.
void test_strict_attention() {
  const int64_t heads = 2, groups = 3, rows = 4, columns = 2, live = 3, size = 20;
  for (const int64_t prefix : {0, 5, 70}) {
    const int64_t slots = prefix + 3;
    const int32_t nodes[] = {0, -7, 0, 1, 0, 2, -7, -7}, counts[] = {1, 2, 2, -7};
    std::vector<uint8_t> mask(static_cast<size_t>(rows * slots), 0);
    for (int64_t row = 0; row < live; ++row) {
      std::fill_n(mask.begin() + row * slots, prefix, 1);
      for (int64_t j = 0; j < counts[row]; ++j) mask[row * slots + prefix + nodes[row * columns + j]] = 1;
    }
    const auto query = random_scores(heads * groups * rows * size, false, false),
               keys = random_scores(heads * slots * size, false, false),
               values = random_scores(heads * slots * size, false, false);
    const spec::AttentionShape shape{heads, groups, rows, slots, size, slots * size, size, slots * size, size, 0.3f};
    std::vector<float> out(query.size(), NAN), wanted(query.size(), NAN);
    const auto attend = [&](const spec::VisibleSlots& visible, std::vector<float>& to) {
      spec::strict_attention(shape, query.data(), keys.data(), values.data(), visible, to.data());
    };
    attend(spec::visible_by_mask(rows, slots, mask.data()), wanted);
    attend(spec::visible_by_paths(rows, columns, nodes, counts, prefix, live), out);
    check(out == wanted && out[3 * size] == 0.0f, "strict attention", prefix);
    attend(spec::visible_by_paths(rows, columns, nodes, counts, prefix, 0), out);
    check(std::all_of(out.begin(), out.end(), [](float value) { return value == 0.0f; }), "no live row", prefix);
  }
}

// Every candidate ever pushed with its number, instead of arrays.
struct Known {
  float score, log_prob;
  int64_t number, parent, token, depth;
};

bool before(const Known& a, const Known& b) {
  return a.score > b.score || (a.score == b.score && a.number < b.number);
}

void keep_best(std::vector<Known>& known, int64_t count) {
  std::sort(known.begin(), known.end(), before);
  if (static_cast<int64_t>(known.size()) > count) known.resize(static_cast<size_t>(count));
}

void test_draw(spec::BestFirst& queue, std::vector<Known>& accepted, std::vector<Known>& queued, bool expands) {
  spec::BestFirstState& state = queue.state;
  const int64_t count = expands ? spec::pop_count(state) : spec::fill_count(state);
  const int64_t room = state.budget - static_cast<int64_t>(accepted.size());
  int64_t wanted = expands ? 0 : std::min(room, static_cast<int64_t>(queued.size()));
  for (int64_t inner = 0; expands && wanted < static_cast<int64_t>(queued.size()) && inner < state.batch; ++wanted)
    inner += queued[static_cast<size_t>(wanted)].depth < state.max_depth;
  check(count == wanted, "best_first count", state.budget);
  const auto size = static_cast<size_t>(count);
  std::vector<int64_t> parents(size, -7), tokens(size, -7), expand(size, -7);
  std::vector<float> log_probs(size, NAN);
  const spec::Drawn drawn =
      spec::draw(state, count, expands, parents.data(), tokens.data(), log_probs.data(), expand.data());

  const std::vector<Known> taken(queued.begin(), queued.begin() + count);
  queued.erase(queued.begin(), queued.begin() + count);
  accepted.insert(accepted.end(), taken.begin(), taken.end());
  keep_best(accepted, state.budget);
  const bool full = static_cast<int64_t>(accepted.size()) == state.budget;
  int64_t nodes = 0, expanded = 0;
  double mass = 0.0;
  for (const Known& known : taken) {
    const auto same = [&](const Known& other) { return other.number == known.number; };
    if (!std::any_of(accepted.begin(), accepted.end(), same)) continue;
    check(parents[nodes] == known.parent && tokens[nodes] == known.token && log_probs[nodes] == known.log_prob,
          "best_first nodes", state.budget);
    if (expands && (full ? known.score > accepted.back().score : known.score > -INFINITY) &&
        known.depth < state.max_depth) {
      check(expand[expanded] == nodes, "best_first expand", state.budget);
      ++expanded;
      mass += std::exp(static_cast<double>(known.score));
    }
    ++nodes;
  }
  check(drawn.nodes == nodes && drawn.expanded == expanded, "best_first counts", state.budget);
  check(std::fabs(drawn.mass - mass) <= 1e-12 * (1.0 + mass), "best_first mass", state.budget);
}

void test_best_first() {
  for (const int64_t budget : {1, 2, 3, 10, 60, 256})
    for (const int64_t batch : {1, 3, 10, 300})
      for (int kind = 0; kind < 4; ++kind) {
        spec::BestFirst queue(budget, batch, 4);
        std::vector<Known> accepted{{0.0f, 0.0f, 0, -1, -1, 0}}, queued;
        int64_t number = 0;
        for (int step = 0; step < 25; ++step) {
          const int64_t count = below(kind & 2 ? 3 * budget + 2 : 5);
          auto scores = random_scores(count, kind & 1, false);
          for (float& score : scores) score = below(10) ? -std::fabs(score) : -INFINITY;
          if (below(2)) std::sort(scores.begin(), scores.end(), std::greater<float>());
          const auto log_probs = random_scores(count, false, false);
          std::vector<int64_t> parents(scores.size()), depths(scores.size()), tokens(scores.size());
          for (int64_t i = 0; i < count; ++i) {
            parents[i] = below(1000), depths[i] = below(5), tokens[i] = below(1000);
            ++number;
            if (scores[i] > -INFINITY)
              queued.push_back({scores[i], log_probs[i], number, parents[i], tokens[i], depths[i] + 1});
          }
          keep_best(queued, budget);
          check(spec::push(queue.state, parents.data(), depths.data(), tokens.data(), log_probs.data(), scores.data(),
                           count),
                "best_first push", budget);
          std::vector<Known> all = accepted;
          all.insert(all.end(), queued.begin(), queued.end());
          std::sort(all.begin(), all.end(), before);
          const bool full = static_cast<int64_t>(all.size()) >= budget;
          check(spec::best_first_bound(queue.state) == (full ? all[budget - 1].score : -INFINITY), "best_first bound",
                budget);
          if (below(3)) test_draw(queue, accepted, queued, below(8) != 0);
        }
      }
  spec::BestFirst queue(3, 1, 3);
  const int64_t zeros[] = {0, 0};
  const float good[] = {-1.0f, -2.0f}, bad[] = {-1.0f, NAN};
  check(!spec::push(queue.state, zeros, zeros, zeros, good, bad, 2), "best_first refuses NaN", 3);
  check(queue.state.queue_count == 0, "best_first adds nothing then", 3);
}

// The queues in their owner's arrays.
struct Arrays {
  std::vector<float> accepted, scores, log_probs;
  std::vector<int64_t> parents, depths, tokens;
  float bound = NAN;

  explicit Arrays(int64_t budget) {
    for (auto* floats : {&accepted, &scores, &log_probs}) floats->assign(static_cast<size_t>(budget), NAN);
    for (auto* whole : {&parents, &depths, &tokens}) whole->assign(static_cast<size_t>(budget), int64_t{1} << 62);
  }
  spec::QueueArrays at() {
    return {accepted.data(), scores.data(), log_probs.data(), parents.data(),
            depths.data(),   tokens.data(), &bound,           static_cast<int64_t>(accepted.size())};
  }
  bool operator==(const Arrays& other) const {
    return scores == other.scores && accepted == other.accepted && log_probs == other.log_probs &&
           parents == other.parents && depths == other.depths && tokens == other.tokens && bound == other.bound;
  }
};

// What comes out of a step, in buffers of the exact size.
struct Outputs {
  std::vector<int64_t> parents, tokens, expand;
  std::vector<float> log_probs;
  int32_t nodes = -7, expanded = -7;

  Outputs(int64_t budget, int64_t batch)
      : parents(static_cast<size_t>(budget), -7),
        tokens(parents),
        expand(static_cast<size_t>(std::min(budget, batch)), -7),
        log_probs(static_cast<size_t>(budget), NAN) {}
  spec::DrawnArrays at() {
    return {parents.data(), tokens.data(), log_probs.data(), &nodes, expand.data(), &expanded};
  }
};

// What one step should give, and leave, by push and draw, which test_best_first holds against every candidate known.
void check_step(const spec::BestFirst& before, const spec::FoundArrays& found, const spec::Search& search,
                Arrays& arrays) {
  const int64_t budget = before.state.budget;
  spec::BestFirst queue(budget, search.batch, search.max_depth);
  std::copy_n(before.state.accepted, before.state.accepted_count, queue.state.accepted);
  std::copy_n(before.state.queue, before.state.queue_count, queue.state.queue);
  queue.state.accepted_count = before.state.accepted_count, queue.state.queue_count = before.state.queue_count;
  std::vector<int64_t> parents, depths, tokens;
  for (int64_t i = 0; i < found.count; ++i) {
    parents.push_back(found.nodes[found.rows[i]]), depths.push_back(found.depths[parents.back()]);
    tokens.push_back(found.token_ids ? found.token_ids[found.columns[i]] : found.columns[i]);
  }
  spec::push(queue.state, parents.data(), depths.data(), tokens.data(), found.log_probs, found.scores, found.count);
  Outputs wanted(budget, budget), got(budget, search.batch);
  spec::Drawn drawn = spec::draw(queue.state, spec::pop_count(queue.state), true, wanted.parents.data(),
                                 wanted.tokens.data(), wanted.log_probs.data(), wanted.expand.data());
  if (drawn.mass < search.threshold) drawn.expanded = 0;
  const int64_t accepted = queue.state.accepted_count, queued = queue.state.queue_count;
  const float bound = spec::best_first_bound(queue.state);
  check(spec::step_queues(arrays.at(), found, true, false, search, got.at()), "step_queues accepts", budget);
  check(arrays.bound == bound, "step_queues bound", budget);
  for (int64_t i = 0; i < budget; ++i) {
    check(arrays.accepted[i] == (i < accepted ? queue.state.accepted[i] : -INFINITY), "step_queues accepted", budget);
    const spec::QueueEntry entry = i < queued ? queue.state.queue[i] : spec::QueueEntry{-INFINITY, 0.0f, 0, 0, 0};
    check(arrays.scores[i] == entry.score && arrays.log_probs[i] == entry.log_prob && arrays.tokens[i] == entry.token &&
              arrays.parents[i] == entry.parent && arrays.depths[i] == entry.depth,
          "step_queues queue", budget);
  }
  if (search.fill && drawn.expanded == 0)
    for (int64_t i = 0; i < spec::fill_count(queue.state); ++i, ++drawn.nodes) {
      const spec::QueueEntry& entry = queue.state.queue[i];
      wanted.parents[drawn.nodes] = entry.parent, wanted.tokens[drawn.nodes] = entry.token;
      wanted.log_probs[drawn.nodes] = entry.log_prob;
    }
  check(got.nodes == drawn.nodes && got.expanded == drawn.expanded, "step_queues counts", budget);
  for (int64_t i = 0; i < budget; ++i) {
    const bool there = i < drawn.nodes;
    check(got.parents[i] == (there ? wanted.parents[i] : 0) && got.tokens[i] == (there ? wanted.tokens[i] : 0) &&
              got.log_probs[i] == (there ? wanted.log_probs[i] : 0.0f),
          "step_queues nodes", budget);
  }
  for (size_t i = 0; i < got.expand.size(); ++i)
    check(got.expand[i] == (static_cast<int64_t>(i) < drawn.expanded ? wanted.expand[i] : 0), "step_queues expand",
          budget);
}

void test_step_queues() {
  for (const int64_t budget : {1, 2, 3, 10, 60, 256})
    for (const int64_t batch : {1, 3, 10, 300})
      for (int kind = 0; kind < 8; ++kind) {
        Arrays arrays(budget);
        const double thresholds[] = {0.0, 0.05, 9.0};
        for (int step = 0; step < 12; ++step) {
          const int64_t rows = 1 + below(5), count = below(kind & 2 ? 3 * budget + 2 : 5), columns = 30;
          auto scores = random_scores(count, kind & 1, false);
          for (float& score : scores) score = below(10) ? -std::fabs(score) : -INFINITY;
          if (below(2)) std::sort(scores.begin(), scores.end(), std::greater<float>());
          const auto log_probs = random_scores(count, false, false);
          std::vector<int64_t> places(scores.size()), tokens(scores.size()), nodes(static_cast<size_t>(rows)),
              depths(40), ids(static_cast<size_t>(columns));
          for (int64_t& place : places) place = below(rows);
          for (int64_t& token : tokens) token = below(columns);
          for (int64_t& node : nodes) node = below(40);
          for (int64_t& depth : depths) depth = below(5);
          for (int64_t& id : ids) id = below(1000);
          const int64_t* token_ids = kind & 4 ? ids.data() : nullptr;
          const spec::FoundArrays found{places.data(), tokens.data(), log_probs.data(), scores.data(),
                                        count,         nodes.data(),  depths.data(),    token_ids};
          const spec::Search search{batch, 4, thresholds[below(3)], below(2) == 1};
          Outputs out(budget, batch);
          if (step == 0) {  // after another search, as where there was none
            Arrays fresh(budget);
            fresh.scores.assign(fresh.scores.size(), -1.0f), fresh.accepted = fresh.scores;
            Outputs again(budget, batch);
            check(spec::step_queues(arrays.at(), found, true, true, search, out.at()) &&
                      spec::step_queues(fresh.at(), found, true, true, search, again.at()),
                  "step_queues begins", budget);
            check(arrays == fresh && out.parents == again.parents && out.nodes == again.nodes, "begins anew", budget);
            continue;
          }
          const Arrays before = arrays;
          check(spec::step_queues(arrays.at(), found, false, below(2) == 1, search, out.at()), "no frontier", budget);
          const auto zero = [](const std::vector<int64_t>& all) {
            return std::all_of(all.begin(), all.end(), [](int64_t value) { return value == 0; });
          };
          check(out.nodes == 0 && out.expanded == 0 && arrays == before && zero(out.parents) && zero(out.tokens) &&
                    zero(out.expand),
                "step_queues of no frontier", budget);
          if (count > 0) {
            std::vector<float> bad = scores;
            bad[below(count)] = NAN;
            spec::FoundArrays wrong = found;
            wrong.scores = bad.data();
            check(!spec::step_queues(arrays.at(), wrong, true, false, search, out.at()) && arrays == before,
                  "step_queues refuses NaN", budget);
          }
          spec::BestFirst queue(budget, batch, 4);
          spec::load(arrays.at(), queue.state);
          check_step(queue, found, search, arrays);
        }
      }
}

void test_compact_rows() {
  const int64_t planes = 3, slots = 20, row_bytes = 6, prefix = 4;
  std::vector<char> slab(static_cast<size_t>(planes * slots * row_bytes));
  for (char& byte : slab) byte = static_cast<char>(below(256));
  const std::vector<char> before = slab;
  const std::vector<int64_t> path{0, 1, 3, 4, 15};
  const auto compact = [&](const std::vector<int64_t>& given) {
    return spec::compact_rows(slab.data(), planes, slots, row_bytes, prefix, given.data(),
                              static_cast<int64_t>(given.size()));
  };
  for (const std::vector<int64_t>& wrong : {std::vector<int64_t>{1}, {0, 2, 2}, {0, 3, 1}, {0, 16}})
    check(!compact(wrong) && slab == before, "compact_rows refuses", wrong.back());
  check(compact({}) && slab == before && compact(path), "compact_rows accepts", prefix);
  for (int64_t plane = 0; plane < planes; ++plane)
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t j = slot - prefix;
      const bool moved = j >= 0 && j < static_cast<int64_t>(path.size());
      const int64_t source = (plane * slots + (moved ? prefix + path[j] : slot)) * row_bytes;
      check(std::equal(before.begin() + source, before.begin() + source + row_bytes,
                       slab.begin() + (plane * slots + slot) * row_bytes),
            "compact_rows", slot);
    }
}

}  // namespace

int main() {
  test_philox();
  test_gumbel();
  test_tree();
  test_select_best();
  test_top_children<float>("top_children float32");
  test_top_children<uint16_t>("top_children bfloat16");
  test_best_candidates<float>("best_candidates float32");
  test_best_candidates<uint16_t>("best_candidates bfloat16");
  test_top_entropy<float>("top_entropy float32");
  test_top_entropy<uint16_t>("top_entropy bfloat16");
  test_classifier();
  test_decisions();
  test_strict_attention();
  test_best_first();
  test_step_queues();
  test_compact_rows();
  return verdict();
}
