// Find continuations of tokens that occurred before: mixed into a draft's distributions, or as nodes without a draft pass.
// specengine/drafters/lookup.py and recycling.py hold the same in Python, operation by operation; the bits are the same.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <memory>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "spec/memory.hpp"
#include "spec/shares.hpp"

namespace spec {

// Rounded before it is added to anything: a fused product would have other bits than Python's.
inline double product(double a, double b) {
  volatile double rounded = a * b;
  return rounded;
}

// Counts of the tokens that followed a run of tokens, in the order of their first occurrence.
class Followers {
 public:
  struct Count {
    int64_t token, times;
  };

  const std::vector<Count>& counts() const { return counts_; }
  int64_t total() const { return total_; }

  int64_t times(int64_t token) const {
    const size_t place = place_of(token);
    return place < counts_.size() ? counts_[place].times : 0;
  }

  void add(int64_t token) {
    const size_t place = place_of(token);
    if (place == counts_.size()) {
      counts_.push_back({token, 0});
      if (places_)
        (*places_)[token] = place;
      else if (counts_.size() > kScanned)
        index();
    }
    ++counts_[place].times;
    ++total_;
    commonest_.clear();
  }

  // The `most` commonest tokens with their share of all; of equal counts the earlier token first.
  const Shares& commonest(size_t most) const {
    if (commonest_.empty()) {
      std::vector<size_t> order(counts_.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      const auto middle = order.begin() + static_cast<std::ptrdiff_t>(std::min(most, order.size()));
      std::partial_sort(order.begin(), middle, order.end(), [&](size_t a, size_t b) {
        return counts_[a].times != counts_[b].times ? counts_[a].times > counts_[b].times : a < b;
      });
      for (auto at = order.begin(); at != middle; ++at)
        commonest_.push_back({counts_[*at].token, static_cast<double>(counts_[*at].times) / static_cast<double>(total_)});
    }
    return commonest_;
  }

 private:
  static constexpr size_t kScanned = 16;  // up to here a scan is faster than a table

  size_t place_of(int64_t token) const {
    if (places_) {
      const auto at = places_->find(token);
      return at == places_->end() ? counts_.size() : at->second;
    }
    size_t place = 0;
    while (place < counts_.size() && counts_[place].token != token) ++place;
    return place;
  }

  void index() {
    places_ = std::make_unique<std::unordered_map<int64_t, size_t>>();
    for (size_t place = 0; place < counts_.size(); ++place) (*places_)[counts_[place].token] = place;
  }

  std::vector<Count> counts_;
  std::unique_ptr<std::unordered_map<int64_t, size_t>> places_;
  int64_t total_ = 0;
  mutable Shares commonest_;  // empty: not known
};

// Counts of the tokens that followed each run of `shortest` to `longest` tokens of one sequence.
//
// Runs form a tree from the newest token back. A run that occurred once is the place of its follower alone, and stands
// for all longer runs before that place.
class Suffixes {
 public:
  Suffixes(int64_t shortest, int64_t longest) : shortest_(shortest), longest_(longest) { restart({}); }

  struct Match {
    int64_t length = 0;
    const Followers* followers = nullptr;  // null: the token at `place` followed, once
    int64_t place = 0;
  };

  // Hold this sequence; what is known stays where `tokens` continues it.
  void become(const Tokens& tokens) {
    if (tokens.size() < tokens_.size() || !std::equal(tokens_.begin(), tokens_.end(), tokens.begin())) restart({});
    for (size_t i = tokens_.size(); i < tokens.size(); ++i) extend(tokens[i]);
  }

  // Forget everything. The next token stands behind `before`, whose own followers do not count.
  void restart(Tokens before) {
    tokens_ = std::move(before);
    next_.clear();
    runs_.clear();
    runs_.emplace_back();  // of no tokens, where every search begins
  }

  void extend(int64_t token) {
    tokens_.push_back(token);
    note(static_cast<int64_t>(tokens_.size()) - 1);
  }

  // The longest suffix of `context` that occurred before; of length 0 where none did.
  Match longest_match(const Context& context) const {
    Match match;
    search(context, [&](const Match& longer) { match = longer; });
    return match.length >= shortest_ ? match : Match{};
  }

  // All suffixes of `context` that occurred before, the longest first.
  std::vector<Match> matches(const Context& context) const {
    std::vector<Match> found;
    search(context, [&](const Match& match) {
      const int64_t before = found.empty() ? 0 : found.back().length;
      for (int64_t length = std::max(before + 1, shortest_); length <= match.length; ++length)
        found.push_back({length, match.followers, match.place});
    });
    std::reverse(found.begin(), found.end());
    return found;
  }

  // Behind the node of a tree whose root follows this sequence, or behind the sequence. ValueError for wrong parents.
  Context context(const int64_t* tokens, const int64_t* parents, int64_t node, int64_t most) const {
    Context context;
    for (; node >= 0 && static_cast<int64_t>(context.size()) < most; node = parents[node]) {
      if (node > 0 && (parents[node] < 0 || parents[node] >= node))
        throw std::invalid_argument("parents: got " + std::to_string(parents[node]) + ", accepted earlier nodes");
      context.push_back(tokens[node]);
      if (node == 0) break;
    }
    return with_text(std::move(context), most);
  }
  Context context(int64_t most) const { return with_text({}, most); }
  Context context() const { return context(longest_); }

  int64_t follower(const Match& match) const { return tokens_[static_cast<size_t>(match.place)]; }

 private:
  struct Key {
    size_t run;
    int64_t token;
    bool operator==(const Key& other) const { return run == other.run && token == other.token; }
  };
  struct Hash {
    size_t operator()(const Key& key) const {  // splitmix64
      uint64_t x = static_cast<uint64_t>(key.token) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(key.run);
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
      return static_cast<size_t>(x ^ (x >> 31));
    }
  };
  struct Next {
    size_t run;  // 0: it occurred once
    int64_t place;
  };

  Context with_text(Context context, int64_t most) const {
    for (size_t i = tokens_.size(); i > 0 && static_cast<int64_t>(context.size()) < most; --i) context.push_back(tokens_[i - 1]);
    return context;
  }

  // Count the token at `place` behind the runs before it.
  void note(int64_t place) {
    size_t run = 0;
    for (int64_t first = place - 1; first >= std::max<int64_t>(place - longest_, 0); --first) {
      const auto [at, is_new] = next_.try_emplace(Key{run, tokens_[static_cast<size_t>(first)]}, Next{0, place});
      if (is_new) return;
      Next& next = at->second;  // stays where it is when others are added
      if (next.run == 0) next.run = occurred_once(next.place, place - first);
      run = next.run;
      runs_[run].add(tokens_[static_cast<size_t>(place)]);
    }
  }

  // The run of `length` tokens before `place`.
  size_t occurred_once(int64_t place, int64_t length) {
    const size_t run = runs_.size();
    runs_.emplace_back();
    runs_.back().add(tokens_[static_cast<size_t>(place)]);
    if (length < std::min(longest_, place)) next_[{run, tokens_[static_cast<size_t>(place - length - 1)]}] = {0, place};
    return run;
  }

  // Shows matches of growing length, of which each stands for all lengths from the one before on.
  template <typename Show>
  void search(const Context& context, const Show& show) const {
    size_t run = 0;
    const auto most = std::min(static_cast<int64_t>(context.size()), longest_);
    for (int64_t length = 1; length <= most; ++length) {
      const auto at = next_.find({run, context[static_cast<size_t>(length - 1)]});
      if (at == next_.end()) return;
      run = at->second.run;
      if (run == 0) {
        const int64_t place = at->second.place;
        while (length < most && length < place && context[static_cast<size_t>(length)] == tokens_[static_cast<size_t>(place - length - 1)])
          ++length;
        return show({length, nullptr, place});
      }
      show({length, &runs_[run], 0});
    }
  }

  const int64_t shortest_, longest_;
  Tokens tokens_;
  std::vector<Followers> runs_;
  std::unordered_map<Key, Next, Hash> next_;
};

// The target's likeliest successors of each token with their probabilities, as they were seen last.
class SuccessorTable {
 public:
  // Takes in the rows of all nodes, then those of a path, where their probabilities are above 0.
  void learn(const int64_t* tokens, int64_t nodes, const Tokens& path, const int64_t* successors,
             const float* probabilities, int64_t count) {
    const auto take = [&](int64_t node) {
      Shares row;
      for (int64_t i = node * count; i < (node + 1) * count; ++i)
        if (probabilities[i] > 0.0f) row.push_back({successors[i], static_cast<double>(probabilities[i])});
      if (!row.empty()) rows_[tokens[node]] = std::move(row);
    };
    for (int64_t node = 0; node < nodes; ++node) take(node);
    for (const int64_t node : path) take(node);
  }

  const Shares& row(int64_t token) const {
    static const Shares none;
    const auto at = rows_.find(token);
    return at == rows_.end() ? none : at->second;
  }

  void clear() { rows_.clear(); }

 private:
  std::unordered_map<int64_t, Shares> rows_;
};

// A change of a distribution: the share of it that stays, and the probability that each token gains.
struct Mixture {
  double left = 1.0;
  Shares copied;
};

// A step's rows with copies mixed in. places: row * (columns + new columns) + column; fresh: tokens of the new columns.
struct MixturePlan {
  std::vector<double> left, gains;
  Tokens places, fresh;
};

// Nodes without a draft pass; the names are those of specengine.ops.select.Free.
struct FreeNodes {
  Tokens parents, tokens;
  std::vector<double> log_probs;
  Tokens marks, ranks;
};

// Nodes of a tree to propose from. scores: path log-probabilities.
struct Growing {
  const int64_t *tokens, *parents;
  const float* scores;
  int64_t size;
  const int64_t* nodes;
  int64_t count;
};

// The copies of two texts: of prompt and answer, and of the text that the caller expects the answer to be like; and of
// earlier texts, where a match there is longer than one in prompt and answer.
class Copies {
 public:
  // hits: by length of a match, how often such matches are right; weight: of how many matches that counts for as many;
  // ceiling: of the probability that a match takes; followers: of a match, the commonest that are copied.
  Copies(std::vector<double> hits, double weight, double ceiling, size_t followers)
      : prior_(std::move(hits)), weight_(weight), ceiling_(ceiling), followers_(followers),
        written_{Suffixes(1, longest()), {}, {}}, expected_{Suffixes(1, longest()), {}, {}} {
    forget_hits();
  }

  // prompt: without its last token, which is the first of `expected` unless that is empty; memory: of earlier texts, or
  // null.
  void begin(const Tokens& prompt, const Tokens& expected, std::shared_ptr<TextMemory> memory = nullptr) {
    memory_ = std::move(memory);
    if (memory_) recalled_ = RecallRates(memory_->rates(), weight_);
    written_.text.become(prompt);
    Tokens before;
    if (!expected.empty()) {
      const size_t kept = std::min(prompt.size(), prior_.size());
      before.assign(prompt.end() - static_cast<std::ptrdiff_t>(kept), prompt.end());
      before.push_back(expected[0]);
    }
    expected_.text.restart(std::move(before));
    for (size_t i = 1; i < expected.size(); ++i) expected_.text.extend(expected[i]);
    forget_hits();
  }

  void clear() {
    written_.text.restart({});
    begin({}, {});
  }

  // The text continues with these tokens.
  void observe(const Tokens& tokens) {
    for (const int64_t token : tokens) {
      const Context context = written_.text.context(reach());
      if (memory_) {
        const Recall recall = recalled(context);
        memory_->judge(recall, token);
        recalled_.judge(recall, token, DBL_MAX);
      }
      written_.judge(context, token);
      expected_.judge(context, token);
      written_.text.extend(token);
    }
  }

  // The target ids of the columns of the steps to come; without them a token is its own column.
  void columns(const int64_t* ids, int64_t count) {
    by_id_ = ids != nullptr;
    columns_.clear();
    for (int64_t column = 0; column < count; ++column) columns_[ids[column]] = column;
  }

  // False where nothing is copied in any row.
  bool plan(const int64_t* tokens, const int64_t* parents, const int64_t* nodes, int64_t count, int64_t width,
            MixturePlan& out) const {
    std::vector<Mixture> rows(static_cast<size_t>(count));
    std::unordered_map<int64_t, int64_t> added;
    bool any = false;
    for (int64_t row = 0; row < count; ++row) {
      Mixture& mixture = rows[static_cast<size_t>(row)] = after(written_.text.context(tokens, parents, nodes[row], reach()));
      any = any || !mixture.copied.empty();
      for (const Share& share : mixture.copied)
        if (column_of(share.token, width) < 0 &&
            added.try_emplace(share.token, width + static_cast<int64_t>(out.fresh.size())).second)
          out.fresh.push_back(share.token);
    }
    const int64_t wide = width + static_cast<int64_t>(out.fresh.size());
    for (int64_t row = 0; row < count; ++row) {
      const Mixture& mixture = rows[static_cast<size_t>(row)];
      out.left.push_back(mixture.left);
      for (const Share& share : mixture.copied) {
        const int64_t column = column_of(share.token, width);
        out.places.push_back(row * wide + (column < 0 ? added[share.token] : column));
        out.gains.push_back(share.probability);
      }
    }
    return any;
  }

  // The `most` likeliest continuations below the nodes whose path log-probability is `least` or more.
  FreeNodes free(const Growing& tree, int64_t most, double least, const SuccessorTable* recycled) const {
    std::vector<Parent> parents;
    std::priority_queue<Waiting, std::vector<Waiting>, std::greater<Waiting>> waiting;
    for (int64_t i = 0; i < tree.count; ++i) {
      const double score = tree.scores[tree.nodes[i]];
      if (score >= least) waiting.emplace(-score, parents.size(), -1);
      parents.push_back({tree.nodes[i], written_.text.context(tree.tokens, tree.parents, tree.nodes[i], reach()), score, {}});
    }
    FreeNodes out;
    while (!waiting.empty() && static_cast<int64_t>(out.tokens.size()) < most) {
      const auto [cost, place, rank] = waiting.top();
      waiting.pop();
      if (rank < 0) {
        const double gate = std::exp(least - parents[place].score);
        parents[place].proposals = propose(parents[place].context, gate == 0.0 ? DBL_MIN : gate, recycled);
        if (static_cast<int64_t>(place) < tree.count) without_children(tree, parents[place]);
      } else {
        const Proposal& proposal = parents[place].proposals[static_cast<size_t>(rank)];
        out.parents.push_back(parents[place].node);
        out.tokens.push_back(proposal.token);
        out.log_probs.push_back(-cost - parents[place].score);
        out.marks.push_back(proposal.mark);
        out.ranks.push_back(rank);
        waiting.emplace(cost, parents.size(), -1);
        Context context{proposal.token};
        const Context& before = parents[place].context;
        const auto older = std::min(static_cast<int64_t>(before.size()), reach() - 1);
        context.insert(context.end(), before.begin(), before.begin() + static_cast<std::ptrdiff_t>(older));
        parents.push_back({tree.size + static_cast<int64_t>(out.tokens.size()) - 1, std::move(context), -cost, {}});
      }
      const Parent& parent = parents[place];
      const auto next = static_cast<size_t>(rank + 1);
      if (next < parent.proposals.size())
        waiting.emplace(-parent.score - std::log(parent.proposals[next].probability), place, rank + 1);
    }
    return out;
  }

 private:
  static constexpr int64_t kCopied = 1, kRecycled = 2, kFree = 4;  // as in specengine/ops/select.py

  struct Source {
    Suffixes text;
    std::vector<double> hits, tries;  // by length of a match

    // Learn from `token` having come after `context`.
    void judge(const Context& context, int64_t token) {
      const Suffixes::Match match = text.longest_match(context);
      if (match.length == 0) return;
      const auto at = static_cast<size_t>(match.length - 1);
      tries[at] += 1.0;
      const Followers* followers = match.followers;
      hits[at] += followers ? static_cast<double>(followers->times(token)) / static_cast<double>(followers->total())
                            : static_cast<double>(text.follower(match) == token);
    }
  };

  struct Proposal {
    double probability;
    int64_t token, mark;
    bool operator>(const Proposal& other) const {
      return std::tie(probability, token, mark) > std::tie(other.probability, other.token, other.mark);
    }
  };
  struct Parent {
    int64_t node;
    Context context;
    double score;
    std::vector<Proposal> proposals;  // once they were asked for
  };
  // Cost (the path log-probability, negated), place of the parent, and rank, of a parent's best continuation left; rank
  // -1: its continuations are not known yet, as that takes time and many are not needed.
  using Waiting = std::tuple<double, size_t, int64_t>;

  int64_t longest() const { return static_cast<int64_t>(prior_.size()); }

  // Tokens of a context that are looked at.
  int64_t reach() const { return memory_ ? std::max(longest(), TextMemory::kDepth) : longest(); }

  // Return the matches in earlier texts that are longer than the longest in prompt and answer.
  Recall recalled(const Context& context) const {
    return memory_->recall(context, written_.text.longest_match(context).length);
  }

  void forget_hits() {
    for (Source* source : {&written_, &expected_}) {
      source->hits.clear();
      for (const double share : prior_) source->hits.push_back(weight_ * share);
      source->tries.assign(prior_.size(), weight_);
    }
  }

  Mixture after(const Context& context) const {
    Mixture mixture;
    mix(mixture, written_, context);
    if (memory_) remember(mixture, recalled(context));
    mix(mixture, expected_, context);
    return mixture;
  }

  // The continuations of earlier texts, the longest matches on top.
  void remember(Mixture& mixture, Recall recall) const {
    for (size_t rank = recall.size(); rank-- > 0;) {
      Shares& followers = recall[rank].followers;
      double total = 0.0;
      for (const Share& share : followers) total += share.probability;
      for (Share& share : followers) share.probability /= total;
      std::stable_sort(followers.begin(), followers.end(),
                       [](const Share& a, const Share& b) { return a.probability > b.probability; });
      followers.resize(std::min(followers.size(), followers_));
      add(mixture, followers, std::min(recalled_.of(rank, recall[rank].length), ceiling_));
    }
  }

  // The continuations of `context` in a text, on top of what is copied so far.
  void mix(Mixture& mixture, const Source& source, const Context& context) const {
    const Suffixes::Match match = source.text.longest_match(context);
    if (match.length == 0) return;
    const auto at = static_cast<size_t>(match.length - 1);
    const double weight = std::min(source.hits[at] / source.tries[at], ceiling_);
    add(mixture, match.followers ? match.followers->commonest(followers_) : Shares{{source.text.follower(match), 1.0}}, weight);
  }

  // Put continuations on top of what is copied so far; weight: the share of the whole that they take.
  static void add(Mixture& mixture, Shares copied, double weight) {
    for (Share& share : copied) share.probability = weight * share.probability;
    for (const Share& before : mixture.copied) {
      const double kept = product(1.0 - weight, before.probability);
      if (Share* both = find(copied, before.token))
        both->probability += kept;
      else
        copied.push_back({before.token, kept});
    }
    mixture.left *= 1.0 - weight;
    mixture.copied = std::move(copied);
  }

  int64_t column_of(int64_t token, int64_t width) const {
    if (!by_id_) return token >= 0 && token < width ? token : -1;
    const auto at = columns_.find(token);
    return at == columns_.end() ? -1 : at->second;
  }

  // Return copied and recycled continuations of `context` of this probability or more, the likeliest first.
  std::vector<Proposal> propose(const Context& context, double least, const SuccessorTable* table) const {
    static const Shares none;
    const Mixture mixture = after(context);
    const Shares& recycled = table ? table->row(context[0]) : none;
    std::vector<Proposal> found;
    for (const Share& share : recycled) {
      const double total = mixture.left * share.probability;
      if (total >= least && !find(mixture.copied, share.token)) found.push_back({total, share.token, kFree | kRecycled});
    }
    for (const Share& share : mixture.copied) {
      const Share* both = find(recycled, share.token);
      const double total = share.probability + (both ? product(mixture.left, both->probability) : 0.0);
      if (total >= least) found.push_back({total, share.token, kFree | kCopied | (both ? kRecycled : 0)});
    }
    std::sort(found.begin(), found.end(), std::greater<Proposal>());
    return found;
  }

  // Proposals that are children of their parent in the tree already are left out.
  static void without_children(const Growing& tree, Parent& parent) {
    const auto is_there = [&](const Proposal& proposal) {
      for (int64_t node = 0; node < tree.size; ++node)
        if (tree.parents[node] == parent.node && tree.tokens[node] == proposal.token) return true;
      return false;
    };
    auto& given = parent.proposals;
    given.erase(std::remove_if(given.begin(), given.end(), is_there), given.end());
  }

  const std::vector<double> prior_;
  const double weight_, ceiling_;
  const size_t followers_;
  Source written_, expected_;
  std::shared_ptr<TextMemory> memory_;
  RecallRates recalled_{1.0};  // in this text
  bool by_id_ = false;
  std::unordered_map<int64_t, int64_t> columns_;
};

}  // namespace spec
