// A pool of threads for forwards: one job at a time, barriers that spin some microseconds and then let others run.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace cpu {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spins until `done()`; after a while it gives the core away, as on a busy machine whoever is waited for needs it.
template <typename Done>
void spin_until(Done done, int spins = 500) {
  for (int i = 0; !done(); ++i)
    if (i < spins)
      relax();
    else
      std::this_thread::yield();
}

// The threads that run one job together.
class Team {
 public:
  explicit Team(int count) : count_(count) {}
  int count() const { return count_; }

  // Returns once all have come.
  void barrier() {
    if (count_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      spin_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
    }
  }

 private:
  const int count_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

class Pool {
 public:
  // The process's own; a child after a fork gets a new one.
  static Pool& shared() {
    static const bool watched = watch_forks();
    (void)watched;
    Pool* pool = instance().load(std::memory_order_acquire);
    if (pool) return *pool;
    Pool* made = new Pool;  // never destroyed: its threads end with the process
    if (instance().compare_exchange_strong(pool, made, std::memory_order_acq_rel)) return *made;
    delete made;  // another caller came first
    return *pool;
  }

  // Runs job(team, index) on `threads` threads, the caller's among them. Callers take turns.
  template <typename Job>
  void run(int threads, const Job& job) {
    const std::lock_guard<std::mutex> turn(turn_);
    Team team(std::min(std::max(threads, 1), static_cast<int>(kMost)));
    if (team.count() == 1) return job(team, 0);
    grow(team.count() - 1);
    call_ = [](const void* known, Team& all, int index) { (*static_cast<const Job*>(known))(all, index); };
    job_ = &job;
    team_ = &team;
    left_.store(team.count() - 1, std::memory_order_relaxed);
    {
      const std::lock_guard<std::mutex> lock(sleep_);
      const uint64_t number = generation_.load(std::memory_order_relaxed) / kMost + 1;
      generation_.store(number * kMost + static_cast<uint64_t>(team.count() - 1), std::memory_order_release);
    }
    if (sleepers_.load() > 0) wake_.notify_all();
    job(team, 0);
    spin_until([&] { return left_.load(std::memory_order_acquire) == 0; });
  }

 private:
  static std::atomic<Pool*>& instance() {
    static std::atomic<Pool*> pool{nullptr};
    return pool;
  }

  static bool watch_forks() {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { instance().store(nullptr); });
#endif
    return true;
  }

  void grow(int workers) {
    while (static_cast<int>(started_) < workers) {
      std::thread(&Pool::work, this, started_, generation_.load()).detach();
      ++started_;
    }
  }

  void work(int index, uint64_t seen) {
    // A generation's next forward follows that soon, and who sleeps takes some 50 us to wake. Where giving the core away
    // takes longer than a moment, others want it.
    using Clock = std::chrono::steady_clock;
    constexpr auto kAwake = std::chrono::milliseconds(3);
    constexpr auto kMoment = std::chrono::microseconds(20);
    constexpr int kSpins = 32;
    const auto waits = [&] { return generation_.load(std::memory_order_acquire) == seen; };
    for (;;) {
      const auto began = Clock::now();
      for (auto last = began, now = began; waits() && now - began < kAwake && now - last < kMoment;) {
        for (int i = 0; i < kSpins && waits(); ++i) relax();
        std::this_thread::yield();
        last = now, now = Clock::now();
      }
      if (waits()) {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return !waits(); });
        sleepers_.fetch_sub(1);
      }
      seen = generation_.load(std::memory_order_acquire);
      if (index < static_cast<int>(seen % kMost)) {
        call_(job_, *team_, index + 1);
        left_.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  static constexpr uint64_t kMost = 4096;  // workers
  std::atomic<uint64_t> generation_{0};    // of a job: its number times kMost, and how many workers it wants
  std::atomic<int> left_{0}, sleepers_{0};
  void (*call_)(const void*, Team&, int) = nullptr;
  const void* job_ = nullptr;
  Team* team_ = nullptr;
  int started_ = 0;
};

// The part of [0, count) that is thread `index`'s own of `threads`, in whole steps.
struct Share {
  int64_t first, last;
  Share(int64_t count, int index, int threads, int64_t step = 1) {
    const int64_t steps = (count + step - 1) / step;
    first = std::min(count, steps * index / threads * step);
    last = std::min(count, steps * (index + 1) / threads * step);
  }
};

}  // namespace cpu
