// How many threads a forward runs on while others want the cores.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>

namespace cpu {

// Of forwards that cost the same. Where they take twice what they took at best, half the threads are tried, and kept where
// they are much faster; more are tried again from time to time. On a quiet machine nothing is tried.
class Pace {
 public:
  explicit Pace(int most) : most_(most) {}

  // Return the number of threads for the next forward.
  int threads() const { return std::max(1, most_ >> (trial_ ? tried_ : level_)); }

  // How long a forward took on what `threads` returned.
  void took(double seconds) {
    best_ = std::min(best_ * kForget, seconds);
    ++since_;
    const double newest = 1.0 / static_cast<double>(std::min<int64_t>(since_, kTrial));
    double& mean = means_[trial_ ? tried_ : level_];
    mean += (seconds - mean) * newest;
    if (trial_ > 0) {
      if (--trial_ == 0) end_trial();
      return;
    }
    if (since_ < wait_) return;
    const bool slow = mean > kSlow * best_, fewer_exist = level_ + 1 < kLevels && (most_ >> level_) > 1;
    if (level_ > 0 && (upwards_ || !slow || !fewer_exist))
      begin_trial(level_ - 1);
    else if (slow && fewer_exist)
      begin_trial(level_ + 1);
  }

 private:
  static constexpr size_t kLevels = 11;                // of halving
  static constexpr int kTrial = 16;                    // forwards
  static constexpr int64_t kSoon = 32, kLater = 512;   // forwards between trials
  static constexpr double kSlow = 2.0, kForget = 1.001, kFaster = 0.75, kAsFast = 1.1;

  void begin_trial(size_t level) {
    tried_ = level;
    trial_ = kTrial;
    since_ = 0;
  }

  void end_trial() {
    // of what takes about as long, more threads are the better choice: they gain as soon as there is room
    const double limit = tried_ > level_ ? kFaster : kAsFast;
    const bool better = means_[tried_] < limit * means_[level_];
    upwards_ = tried_ > level_;
    if (better) level_ = tried_;
    wait_ = better ? kSoon : std::min(2 * wait_, kLater);
    since_ = kTrial;  // its mean is one of as many
  }

  const int most_;
  size_t level_ = 0, tried_ = 0;  // how often `most_` is halved
  int trial_ = 0;                 // forwards that the trial still takes
  bool upwards_ = false;          // the next trial is of more threads
  int64_t since_ = 0, wait_ = kSoon;
  double best_ = 1e30;
  std::array<double, kLevels> means_{};  // seconds of late
};

// The paces of a network's forwards, by what decides on their cost.
class Paces {
 public:
  // Runs forward(threads) on what suits forwards like it. slots: how many a row may see; reads: whether the vocabulary
  // head runs.
  template <typename Forward>
  void run(int most, int64_t rows, int64_t slots, bool reads, const Forward& forward) {
    Pace& pace = paces_.try_emplace({most, width(rows), width(slots / 256), reads}, most).first->second;
    const int threads = pace.threads();
    const auto began = std::chrono::steady_clock::now();
    forward(threads);
    pace.took(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }

 private:
  static int width(int64_t number) {
    int bits = 0;
    for (; number > 0; number /= 2) ++bits;
    return bits;
  }

  std::map<std::tuple<int, int, int, bool>, Pace> paces_;
};

}  // namespace cpu
