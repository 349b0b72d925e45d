// Suffixes against searching the sequence; Copies on random texts and trees, whose nodes have to make sense.
#include "spec/copies.hpp"
#include "tests/spec/common.hpp"

namespace spec_test {
namespace {

spec::Tokens random_tokens(int64_t count, int64_t vocabulary) {
  spec::Tokens tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(below(vocabulary));
  return tokens;
}

// Count how often `token` followed the last `length` tokens of the context, newest first, in the text from `first` on.
int64_t searched(const spec::Tokens& text, const spec::Context& context, int64_t length, int64_t token, int64_t first) {
  int64_t count = 0;
  for (int64_t place = std::max(length, first); place < static_cast<int64_t>(text.size()); ++place) {
    bool same = text[place] == token;
    for (int64_t i = 0; same && i < length; ++i) same = text[place - 1 - i] == context[i];
    count += same;
  }
  return count;
}

void compare(int64_t longest, int64_t vocabulary) {
  spec::Suffixes suffixes(1, longest);
  spec::Tokens text = random_tokens(below(4), vocabulary);
  const auto first = static_cast<int64_t>(text.size());
  suffixes.restart(text);
  for (int64_t i = below(60); i > 0; --i) {
    text.push_back(below(vocabulary));
    suffixes.extend(text.back());
  }
  const spec::Context context = random_tokens(below(longest + 3), vocabulary);
  int64_t lengths = 0;
  for (const auto& match : suffixes.matches(context)) {
    lengths = std::max(lengths, match.length);
    for (int64_t token = 0; token < vocabulary; ++token) {
      const int64_t times = match.followers ? match.followers->times(token) : suffixes.follower(match) == token;
      check(times == searched(text, context, match.length, token, first), "followers of a suffix", match.length);
    }
  }
  check(lengths == suffixes.longest_match(context).length, "the longest match", longest);
  if (lengths < std::min<int64_t>(longest, static_cast<int64_t>(context.size())))
    for (int64_t token = 0; token < vocabulary; ++token)
      check(searched(text, context, lengths + 1, token, first) == 0, "a longer match", longest);
}

void draft(int64_t vocabulary) {
  spec::Copies copies({0.2, 0.5, 0.7}, 8.0, 0.98, 2);
  copies.begin(random_tokens(below(40), vocabulary), random_tokens(below(20), vocabulary));
  copies.observe(random_tokens(below(10), vocabulary));
  const int64_t size = 1 + below(8);
  const spec::Tokens tokens = random_tokens(size, vocabulary);
  spec::Tokens parents{-1}, nodes;
  for (int64_t node = 1; node < size; ++node) parents.push_back(below(node));
  for (int64_t node = 0; node < size; ++node) nodes.push_back(node);
  const spec::Tokens ids = random_tokens(3, vocabulary);
  copies.columns(ids.data(), 3);
  spec::MixturePlan plan;
  copies.plan(tokens.data(), parents.data(), nodes.data(), size, 3, plan);
  const auto wide = 3 + static_cast<int64_t>(plan.fresh.size());
  for (const int64_t place : plan.places) check(place >= 0 && place < size * wide, "places of a plan", vocabulary);
  const std::vector<int64_t> successors = random_tokens(4 * size, vocabulary);
  const std::vector<float> shares(static_cast<size_t>(4 * size), 0.25f), scores(static_cast<size_t>(size), -0.5f);
  spec::SuccessorTable table;
  table.learn(tokens.data(), size, {0}, successors.data(), shares.data(), 4);
  const spec::FreeNodes free =
      copies.free({tokens.data(), parents.data(), scores.data(), size, nodes.data(), size}, 30, -6.0, &table);
  check(free.tokens.size() <= 30, "free nodes", vocabulary);
  for (size_t i = 0; i < free.tokens.size(); ++i)
    check(free.parents[i] >= 0 && free.parents[i] < size + static_cast<int64_t>(i) && free.log_probs[i] <= 1e-12,
          "a free node", vocabulary);
}

}  // namespace

void test_copies() {
  for (int round = 0; round < 400; ++round) compare(1 + below(6), 1 + below(5));
  for (int round = 0; round < 200; ++round) draft(1 + below(30));
}

}  // namespace spec_test
