// Texts of earlier requests, and what followed the same tokens in them. The bytes that they take are bounded.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "spec/shares.hpp"

namespace spec {

// Places of one length of match, and what followed: with counts, the newest first. place: of the newest.
struct Recalled {
  int64_t length, place;
  Shares followers;
};
using Recall = std::vector<Recalled>;  // the longest first

// How often matches in earlier texts are right: the longest of a context, and further ones where those before are wrong.
class RecallRates {
 public:
  // tries: that the priors, or the rates of others, count for.
  explicit RecallRates(double tries) {
    for (auto& rank : rates_)
      for (size_t at = 0; at < rank.size(); ++at) rank[at] = {kPriors[at] * tries, tries};
  }
  RecallRates(const RecallRates& others, double tries) : rates_(others.rates_) {
    for (auto& rank : rates_)
      for (Rate& rate : rank) rate = {rate.hits / rate.tries * tries, tries};
  }

  double of(size_t rank, int64_t length) const {
    const Rate& rate = rates_[rank > 0][bucket(length)];
    return rate.hits / rate.tries;
  }

  // most: tries after which those of before count half.
  void judge(const Recall& recall, int64_t token, double most) {
    for (size_t rank = 0; rank < recall.size(); ++rank) {
      Rate& rate = rates_[rank > 0][bucket(recall[rank].length)];
      double total = 0.0, right = 0.0;
      for (const Share& share : recall[rank].followers) {
        total += share.probability;
        right += share.token == token ? share.probability : 0.0;
      }
      rate.hits += right / total;
      rate.tries += 1.0;
      if (rate.tries >= most) rate = {0.5 * rate.hits, 0.5 * rate.tries};
      if (right > 0.0) return;
    }
  }

 private:
  struct Rate {
    double hits, tries;
  };

  static size_t bucket(int64_t length) {
    size_t at = 0;
    while (at + 1 < kFrom.size() && length >= kFrom[at + 1]) ++at;
    return at;
  }

  // Lengths of matches from which on they count together, and how often these are right before any was judged.
  static constexpr std::array<int64_t, 10> kFrom{3, 4, 5, 6, 8, 12, 16, 32, 64, 128};
  static constexpr std::array<double, 10> kPriors{0.24, 0.31, 0.33, 0.4, 0.5, 0.6, 0.7, 0.85, 0.93, 0.96};
  std::array<std::array<Rate, kFrom.size()>, 2> rates_;
};

// Find the longest match of a context in the texts that are kept, and the tokens that followed such matches.
//
// Texts stand one after the other in a ring, each with a separator after it, at places that only grow. Runs of 3, 6, 16 and
// 64 tokens are indexed: per run a chain of the places that followed it, the newest first, as in LZ77. The longest runs
// of the context that occur decide which chains are read. The oldest texts make room for new ones; one that was used
// since it was placed moves to the newest end instead, once.
class TextMemory {
 public:
  static constexpr std::array<int64_t, 4> kRuns{64, 16, 6, 3};  // tokens of the runs that are indexed
  static constexpr int64_t kShortest = kRuns.back(), kDepth = 256;  // of a match, in tokens
  static constexpr size_t kPlaces = 16, kFew = 4;  // of matches: that are enough; fewer have shorter runs looked at
  static constexpr int64_t kSteps = 64;            // of a chain that are looked at
  static constexpr int64_t kSmallest = 1 << 10, kPerText = 64;  // tokens: of a ring; least average of a text

  explicit TextMemory(int64_t bytes) : rates_(kPriorTries) { limit(bytes); }

  // Keep to so many bytes from here on; the oldest texts go where they do not fit.
  void limit(int64_t bytes) {
    most_ = kSmallest;
    while (bytes_of(2 * most_) <= bytes) most_ *= 2;
    if (ring_.empty() || capacity() > most_) rebuild(std::min(most_, ring_.empty() ? kSmallest : capacity()));
  }

  // Keep a text, of a long one its end. Texts that it begins with go, as it holds them. False where it is there already,
  // which makes it a used one, or too short to be found again.
  bool add(const Tokens& given) {
    const auto count = std::min(static_cast<int64_t>(given.size()), most_ / 4);
    if (count <= kShortest) return false;
    const Tokens tokens(given.end() - static_cast<std::ptrdiff_t>(count), given.end());
    uint64_t hash = 0;
    for (int64_t i = 0; i < count; ++i) {
      hash = hash * kFactor + value(tokens[static_cast<size_t>(i)]);
      const auto known = by_hash_.find(hash);
      if (known == by_hash_.end()) continue;
      Text& text = text_at(known->second);
      if (text.length != i + 1 || !is_at(text.first, tokens, text.length)) continue;
      if (i + 1 == count) {
        text.used = true;
        return false;
      }
      kill(text);
    }
    append(tokens, false);
    return true;
  }

  // Return the longest matches that have more than `above` tokens, with their followers. context: the newest token first.
  Recall recall(const Context& context, int64_t above) const {
    uint64_t hash = 0, factor = 1;
    std::array<uint64_t, kRuns.size()> hashes{};
    int64_t hashed = 0;
    const auto size = static_cast<int64_t>(context.size());
    for (size_t level = kRuns.size(); level-- > 0 && kRuns[level] <= size;) {
      for (; hashed < kRuns[level]; ++hashed, factor *= kFactor) hash += value(context[static_cast<size_t>(hashed)]) * factor;
      hashes[level] = hash;
    }
    std::vector<Found> found;
    for (size_t level = 0; level < kRuns.size() && found.size() < kFew; ++level)
      if (kRuns[level] <= size) read_chain(level, hashes[level], context, found);
    std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.length > b.length; });
    Recall recall;
    for (const Found& each : found) {
      if (each.length <= above) break;
      if (recall.empty() || recall.back().length != each.length) recall.push_back({each.length, each.place, {}});
      count(recall.back().followers, ring_[slot(each.place)]);
    }
    return recall;
  }

  // Note that the text at this place was of use.
  void use(int64_t place) { text_at(place).used = true; }

  const RecallRates& rates() const { return rates_; }

  // Learn from `token` having come where these matches were.
  void judge(const Recall& recall, int64_t token) {
    rates_.judge(recall, token, kRemembered);
    if (!recall.empty() && recall[0].length >= kUsed && find(recall[0].followers, token)) use(recall[0].place);
  }

  // All texts, the oldest first.
  std::vector<Tokens> texts() const {
    std::vector<Tokens> all;
    for (const Text& text : texts_)
      if (!text.is_dead) all.push_back(tokens_of(text));
    return all;
  }

  // A text as a file has it: how many tokens, a checksum, the tokens, in 32 bits each, the lowest byte first.
  static void record(const Tokens& tokens, std::string& out) {
    std::string body;
    for (const int64_t token : tokens) word(static_cast<uint32_t>(token), body);
    word(static_cast<uint32_t>(tokens.size()), out);
    word(checksum(body), out);
    out += body;
  }

  // Add the records of a file, up to the first that is damaged, cut or of tokens that there are not. False where one is.
  bool read(const std::string& data, int64_t vocabulary) {
    size_t at = 0;
    while (at < data.size()) {
      if (data.size() - at < 8) return false;
      const uint64_t count = word_at(data, at);
      if (count == 0 || (data.size() - at - 8) / 4 < count) return false;
      const std::string body = data.substr(at + 8, 4 * static_cast<size_t>(count));
      if (checksum(body) != word_at(data, at + 4)) return false;
      Tokens tokens;
      for (size_t i = 0; i < body.size(); i += 4) tokens.push_back(word_at(body, i));
      if (*std::max_element(tokens.begin(), tokens.end()) >= vocabulary) return false;
      add(tokens);
      at += 8 + body.size();
    }
    return true;
  }

  // Return the most bytes that a ring of this size takes with its index, whatever the lengths of texts.
  int64_t bytes() const { return bytes_of(capacity()); }

 private:
  struct Text {
    int64_t first, length;
    uint64_t hash;
    bool used, is_dead;
  };
  struct Found {
    int64_t length, place;
  };

  static constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;
  static constexpr int32_t kSeparator = -1;
  static constexpr int64_t kUsed = 16;           // tokens of a match that was right: its text was of use
  static constexpr double kPriorTries = 16.0, kRemembered = 512.0;  // tries: that priors count for; that halve those before

  static int64_t bytes_of(int64_t capacity) {
    // a token; per run a link, and the head of a chain for two tokens; records of texts with their entries in tables
    const auto runs = static_cast<int64_t>(kRuns.size());
    return capacity * (4 + 6 * runs) + capacity / kPerText * 96;
  }

  static void word(uint32_t value, std::string& out) {
    for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<char>(value >> shift & 255u));
  }

  static uint32_t word_at(const std::string& data, size_t at) {
    uint32_t value = 0;
    for (size_t i = 4; i-- > 0;) value = value << 8 | static_cast<uint8_t>(data[at + i]);
    return value;
  }

  static uint32_t checksum(const std::string& data) {  // CRC-32C, of the length too
    uint32_t sum = ~static_cast<uint32_t>(data.size());
    for (const char byte : data) {
      sum ^= static_cast<uint8_t>(byte);
      for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1u ? 0x82f63b78u : 0u);
    }
    return ~sum;
  }

  static uint64_t value(int64_t token) {  // splitmix64
    uint64_t x = static_cast<uint64_t>(token) + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (x ^ (x >> 31)) | 1u;
  }

  int64_t capacity() const { return static_cast<int64_t>(ring_.size()); }
  size_t slot(int64_t place) const { return static_cast<size_t>(place) & (ring_.size() - 1); }
  size_t head_of(uint64_t hash) const { return static_cast<size_t>((hash ^ (hash >> 29)) * kFactor >> 20) & (ring_.size() / 2 - 1); }

  Text& text_at(int64_t place) {
    const auto after = std::upper_bound(texts_.begin(), texts_.end(), place,
                                        [](int64_t wanted, const Text& text) { return wanted < text.first; });
    return *std::prev(after);
  }

  Tokens tokens_of(const Text& text) const {
    Tokens tokens;
    for (int64_t i = 0; i < text.length; ++i) tokens.push_back(ring_[slot(text.first + i)]);
    return tokens;
  }

  bool is_at(int64_t first, const Tokens& tokens, int64_t count) const {
    for (int64_t i = 0; i < count; ++i)
      if (ring_[slot(first + i)] != tokens[static_cast<size_t>(i)]) return false;
    return true;
  }

  void kill(Text& text) {
    by_hash_.erase(text.hash);
    for (int64_t i = 0; i < text.length; ++i) ring_[slot(text.first + i)] = kSeparator;
    text.is_dead = true;
  }

  void rebuild(int64_t capacity) {
    std::vector<std::pair<Tokens, bool>> all;
    for (const Text& text : texts_)
      if (!text.is_dead) all.emplace_back(tokens_of(text), text.used);
    texts_.clear();
    by_hash_.clear();
    ring_ = std::vector<int32_t>(static_cast<size_t>(capacity), kSeparator);
    for (auto& table : links_) table = std::vector<uint32_t>(static_cast<size_t>(capacity), 0);
    for (auto& table : heads_) table = std::vector<uint32_t>(static_cast<size_t>(capacity / 2), 0);
    oldest_ = end_ = 0;
    for (const auto& [tokens, used] : all)
      if (static_cast<int64_t>(tokens.size()) <= most_ / 4) append(tokens, used);
  }

  void append(const Tokens& tokens, bool used) {
    const auto count = static_cast<int64_t>(tokens.size());
    while ((end_ + count + 1 > capacity() || is_full()) && capacity() < most_) rebuild(2 * capacity());
    while (end_ - oldest_ + count + 1 > capacity() || is_full()) evict();
    write(tokens, used);
  }

  bool is_full() const { return static_cast<int64_t>(texts_.size()) >= capacity() / kPerText; }  // of records

  // Take out the oldest text; one that was used becomes the newest.
  void evict() {
    const Text text = texts_.front();
    const Tokens tokens = text.used && !text.is_dead ? tokens_of(text) : Tokens{};
    if (!text.is_dead) kill(texts_.front());
    texts_.pop_front();
    oldest_ = texts_.empty() ? end_ : texts_.front().first;
    if (!tokens.empty()) write(tokens, false);
  }

  void write(const Tokens& tokens, bool used) {
    const auto count = static_cast<int64_t>(tokens.size());
    const int64_t first = end_;
    std::array<uint64_t, kRuns.size()> runs{}, lost{};
    for (size_t level = 0; level < kRuns.size(); ++level) {
      lost[level] = 1;
      for (int64_t i = 0; i < kRuns[level]; ++i) lost[level] *= kFactor;
    }
    uint64_t hash = 0;
    for (int64_t i = 0; i < count; ++i, ++end_) {
      const int64_t token = tokens[static_cast<size_t>(i)];
      ring_[slot(end_)] = static_cast<int32_t>(token);
      hash = hash * kFactor + value(token);
      for (size_t level = 0; level < kRuns.size(); ++level) {
        if (i >= kRuns[level]) link(level, runs[level]);
        runs[level] = runs[level] * kFactor + value(token);
        if (i >= kRuns[level]) runs[level] -= value(tokens[static_cast<size_t>(i - kRuns[level])]) * lost[level];
      }
    }
    ring_[slot(end_++)] = kSeparator;
    texts_.push_back({first, count, hash, used, false});
    by_hash_[hash] = first;
  }

  // Put the place at the end into the chain of the run before it. Heads are places plus one, links are distances, in 32
  // bits; 0 ends a chain. Of a head that is older than these can tell, tokens are compared in vain.
  void link(size_t level, uint64_t hash) {
    uint32_t& head = heads_[level][head_of(hash)];
    const auto here = static_cast<uint32_t>(end_ + 1);
    links_[level][slot(end_)] = head == 0 ? 0 : here - head;
    head = here;
  }

  void read_chain(size_t level, uint64_t hash, const Context& context, std::vector<Found>& found) const {
    const uint32_t head = heads_[level][head_of(hash)];
    if (head == 0) return;
    const size_t before = found.size();
    int64_t place = end_ - static_cast<int64_t>(static_cast<uint32_t>(end_ + 1) - head);
    for (int64_t step = 0; step < kSteps && found.size() < kPlaces && place >= oldest_; ++step) {
      const int64_t length = matched(context, place);
      const auto is_there = [&](const Found& other) { return other.place == place; };
      if (length >= kRuns[level] && ring_[slot(place)] != kSeparator &&
          std::none_of(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(before), is_there))
        found.push_back({length, place});
      const uint32_t distance = links_[level][slot(place)];
      if (distance == 0) return;
      place -= static_cast<int64_t>(distance);
    }
  }

  static void count(Shares& followers, int64_t token) {
    if (Share* known = find(followers, token))
      known->probability += 1.0;
    else
      followers.push_back({token, 1.0});
  }

  // How many tokens before the place are those of the context.
  int64_t matched(const Context& context, int64_t place) const {
    const int64_t most = std::min({static_cast<int64_t>(context.size()), kDepth, place - oldest_});
    int64_t length = 0;
    while (length < most && ring_[slot(place - 1 - length)] == context[static_cast<size_t>(length)]) ++length;
    return length;
  }

  RecallRates rates_;
  int64_t most_ = kSmallest;  // tokens of the ring
  int64_t oldest_ = 0, end_ = 0;  // places: of the oldest text, after the newest
  std::vector<int32_t> ring_;
  std::array<std::vector<uint32_t>, kRuns.size()> heads_, links_;
  std::deque<Text> texts_;  // the oldest first
  std::unordered_map<uint64_t, int64_t> by_hash_;  // places of texts
};

}  // namespace spec
