// A pool of threads for forwards. The caller runs a job alone and deals out its stages in pieces; whoever comes first takes
// the next one. A thread whose core is given to others delays the piece that it holds, and a stage waits for nobody else.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "cpu/platform.hpp"

namespace cpu {

class Pool;

// The pieces of a stage that one thread takes: first those of its own share, ascending, then those that other threads have
// not taken yet, beginning with the shares behind its own.
class Pieces {
 public:
  int64_t first = 0, last = 0;  // of the stage's count: the present piece

  // Takes the next piece. A stage's body goes on until there is none.
  bool next();
  int index() const { return index_; }  // of the thread
  bool is_before_own() const { return before_own_; }  // the present piece, and all that follow
  int64_t taken() const { return taken_; }

 private:
  friend class Pool;
  friend class Team;
  explicit Pieces(int64_t count) : all_(count) {}
  Pieces(Pool& pool, int index) : pool_(&pool), index_(index) {}

  Pool* const pool_ = nullptr;  // null: the stage is one piece, of `all_`
  const int64_t all_ = 0;
  const int index_ = 0;
  int tried_ = 0;                 // shares that have none left
  int64_t held_ = 0, taken_ = 0;  // held: a worker's first piece, as `take` returns it
  bool before_own_ = false;
};

// Those who run a job together. `job(team)` runs on the caller's thread alone.
class Team {
 public:
  int count() const { return count_; }

  // Deals out [0, count) in pieces of whole steps; body(pieces) runs on each thread that comes in time. Returns when all
  // pieces are done.
  template <typename Body>
  void each(int64_t count, int64_t step, const Body& body) const;

 private:
  friend class Pool;
  Team(Pool& pool, int count) : pool_(pool), count_(count) {}

  Pool& pool_;
  const int count_;
};

class Pool {
 public:
  static constexpr int kMost = 1024;  // threads of a job

  // Run on each thread before its first piece of a job, and after its last one.
  struct Around {
    void (*begin)() = nullptr;
    void (*end)() = nullptr;
  };

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

  // Runs job(team) with up to so many threads, the caller's among them. Callers take turns.
  template <typename Job>
  void run(int threads, const Job& job) {
    run(threads, job, Around());
  }

  template <typename Job>
  void run(int threads, const Job& job, const Around& around) {
    const std::lock_guard<std::mutex> turn(turn_);
    const Team team(*this, std::min(std::max(threads, 1), static_cast<int>(kMost)));
    grow(team.count());
    around_ = around;
    ++job_;
    const Open open(*this);
    job(team);
  }

 private:
  friend class Pieces;
  friend class Team;
  using Clock = std::chrono::steady_clock;

  // Of one thread: its share of the stage, as the stage's number times kPieces, and how many pieces nobody has taken.
  struct alignas(64) Seat {
    std::atomic<uint64_t> share{0};
    std::atomic<bool> asleep{false};
    alignas(64) std::mutex mutex;
    std::condition_variable wake;
  };
  static constexpr uint64_t kPieces = uint64_t{1} << 32;
  static constexpr auto kBrief = std::chrono::microseconds(50), kSeldom = std::chrono::microseconds(500);

  struct Stage {
    int64_t count = 0, step = 0, steps = 0, pieces = 0;
    int threads = 0;
    void (*call)(const void* body, Pieces& pieces) = nullptr;
    const void* body = nullptr;

    int64_t end_of(int share) const { return pieces * (share + 1) / threads; }
    int64_t begin_of(int64_t piece) const { return std::min(count, steps * piece / pieces * step); }
  };

  // A job under way, on the caller's thread.
  class Open {
   public:
    explicit Open(Pool& pool) : pool_(pool) {
      pool_.open_.store(true, std::memory_order_relaxed);
      if (pool_.around_.begin) pool_.around_.begin();
    }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;
    ~Open() {
      if (pool_.around_.end) pool_.around_.end();
      pool_.open_.store(false, std::memory_order_relaxed);
    }

   private:
    Pool& pool_;
  };

  static std::atomic<Pool*>& instance() {
    static std::atomic<Pool*> pool{nullptr};
    return pool;
  }

  static bool watch_forks() {
    after_fork([] { instance().store(nullptr); });
    return true;
  }

  void grow(int threads) {
    while (seated_ < threads) {
      auto& seat = seats_[static_cast<size_t>(seated_)];
      if (!seat) seat = std::make_unique<Seat>();
      if (seated_ > 0) std::thread(&Pool::work, this, seated_).detach();
      ++seated_;
    }
  }

  Seat& seat(int index) const { return *seats_[static_cast<size_t>(index)]; }

  // Takes a piece of a share; returns how many were left with it, 0: none.
  int64_t take(int share) {
    std::atomic<uint64_t>& left = seat(share).share;
    uint64_t seen = left.load(std::memory_order_acquire);
    while (seen % kPieces)
      if (left.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        return static_cast<int64_t>(seen % kPieces);
    return 0;
  }

  void run_stage(const Stage& stage) {
    stage_ = stage;  // nobody reads it without a piece
    ++number_;
    int64_t first = 0;
    for (int i = 0; i < stage.threads; ++i) {
      const int64_t end = stage.end_of(i);
      seat(i).share.store(number_ * kPieces + static_cast<uint64_t>(end - first), std::memory_order_release);
      first = end;
    }
    dealt_.store(number_);
    if (sleepers_.load() > 0) wake(stage.threads);
    Finish finish(*this);
    stage.call(stage.body, finish.mine);
  }

  // Ends a stage on the caller's thread, after an exception too: nobody holds a piece of it then.
  struct Finish {
    explicit Finish(Pool& all) : pool(all), mine(all, 0) {}
    Finish(const Finish&) = delete;
    Finish& operator=(const Finish&) = delete;
    ~Finish() {
      while (mine.next()) continue;
      const int64_t others = pool.stage_.pieces - mine.taken();
      if (others == 0) return;
      if (!spin([&] { return pool.done_.load(std::memory_order_acquire) == others; })) pool.wait_for(others);
      pool.done_.store(0, std::memory_order_relaxed);
    }
    Pool& pool;
    Pieces mine;
  };

  void wait_for(int64_t others) {
    std::unique_lock<std::mutex> lock(waiting_mutex_);
    waiting_.store(true);
    all_done_.wait(lock, [&] { return done_.load() == others; });
    waiting_.store(false, std::memory_order_relaxed);
  }

  // Wakes who sleeps, but not often: a woken thread takes a core from whoever has it, and that may be the caller.
  void wake(int threads) {
    const auto now = Clock::now();
    if (now - woken_ < kSeldom) return;
    woken_ = now;
    for (int i = 1; i < threads; ++i) {
      Seat& one = seat(i);
      if (!one.asleep.load() || !one.asleep.exchange(false)) continue;
      sleepers_.fetch_sub(1);
      { const std::lock_guard<std::mutex> lock(one.mutex); }
      one.wake.notify_one();
    }
  }

  // Waits for `done()`, as long as it takes when all go on. Who waits longer sleeps: somebody needs the core.
  template <typename Done>
  static bool spin(const Done& done) {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      relax();
    }
    const auto end = Clock::now() + kBrief;
    do {
      for (int i = 0; i < 16; ++i) {
        if (done()) return true;
        relax();
      }
    } while (Clock::now() < end);
    return done();
  }

  // A generation's next forward follows that soon, and who sleeps takes some 50 us to wake. Where giving the core away
  // takes longer than a moment, others want it, and will for a while. Returns whether there is something to do.
  template <typename Done>
  static bool stay_awake(const Done& done, Clock::time_point& crowded_until) {
    constexpr auto kAwake = std::chrono::milliseconds(3), kCrowded = std::chrono::milliseconds(100);
    constexpr auto kMoment = std::chrono::microseconds(20);
    const auto began = Clock::now();
    for (auto last = began, now = began; now - began < kAwake && now >= crowded_until; last = now) {
      for (int i = 0; i < 32; ++i) {
        if (done()) return true;
        relax();
      }
      std::this_thread::yield();
      now = Clock::now();
      if (now - last > kMoment) crowded_until = now + kCrowded;
    }
    return done();
  }

  // Until pieces of the share are dealt out, or for no reason.
  void sleep(Seat& own) {
    std::unique_lock<std::mutex> lock(own.mutex);
    own.asleep.store(true);
    sleepers_.fetch_add(1);
    if ((void)dealt_.load(), !has_pieces(own)) own.wake.wait(lock);  // what is dealt later wakes
    if (own.asleep.exchange(false)) sleepers_.fetch_sub(1);
  }

  static bool has_pieces(const Seat& seat) { return seat.share.load(std::memory_order_acquire) % kPieces != 0; }

  // Wait for jobs, and take their pieces, until the process ends.
  void work(int index) {
    Seat& own = seat(index);
    Around around;  // of the job that it has begun
    uint64_t job = 0;
    Clock::time_point crowded_until{};
    const auto leave_job = [&] {
      if (around.end) around.end();
      around = {};
      job = 0;
    };
    const auto some = [&] { return has_pieces(own); };
    for (;;) {
      if (!spin(some) && (open_.load(std::memory_order_relaxed) || !stay_awake(some, crowded_until))) {
        leave_job();
        sleep(own);
      }
      Pieces mine(*this, index);
      mine.held_ = take(index);
      if (mine.held_ == 0) continue;
      if (job != job_) {  // who holds a piece may read what the caller has written
        leave_job();
        around = around_;
        job = job_;
        if (around.begin) around.begin();
      }
      stage_.call(stage_.body, mine);
      done_.fetch_add(mine.taken());
      if (!waiting_.load()) continue;
      { const std::lock_guard<std::mutex> lock(waiting_mutex_); }
      all_done_.notify_one();
    }
  }

  std::mutex turn_;
  std::array<std::unique_ptr<Seat>, kMost> seats_;
  int seated_ = 0;
  // of the job and its stage: the caller writes them while nobody else holds a piece
  Around around_;
  uint64_t job_ = 0, number_ = 0;
  Stage stage_;
  Clock::time_point woken_{};  // when somebody was
  alignas(64) std::atomic<uint64_t> dealt_{0};  // the last stage's number
  std::atomic<int> sleepers_{0};
  std::atomic<bool> open_{false};             // a job is under way
  alignas(64) std::atomic<int64_t> done_{0};  // pieces that workers have done
  std::atomic<bool> waiting_{false};          // the caller sleeps until they are
  alignas(64) std::mutex waiting_mutex_;
  std::condition_variable all_done_;
};

inline bool Pieces::next() {
  if (!pool_) {
    first = last;
    last = all_;
    taken_ += first < last;
    return first < last;
  }
  const Pool::Stage& stage = pool_->stage_;
  int64_t left = held_;
  held_ = 0;
  while (left == 0 && tried_ < stage.threads) {
    left = pool_->take((index_ + tried_) % stage.threads);
    tried_ += left == 0;
  }
  if (left == 0) return false;
  const int share = (index_ + tried_) % stage.threads;
  before_own_ = share < index_;
  const int64_t piece = stage.end_of(share) - left;
  first = stage.begin_of(piece);
  last = stage.begin_of(piece + 1);
  ++taken_;
  return true;
}

template <typename Body>
void Team::each(int64_t count, int64_t step, const Body& body) const {
  // Many pieces, so that the last ones are short, but not so many that taking them costs time. A long stage has more: who
  // waits for a long piece falls asleep.
  constexpr int64_t kOfThread = 8, kLongest = 8;  // pieces; steps
  if (count <= 0) return;
  Pool::Stage stage;
  stage.count = count;
  stage.step = step;
  stage.steps = (count + step - 1) / step;
  stage.pieces = std::min(stage.steps, std::max(count_ * kOfThread, stage.steps / kLongest));
  if (count_ == 1 || stage.pieces == 1) {
    Pieces whole(count);
    return body(whole);
  }
  stage.threads = count_;
  stage.call = [](const void* known, Pieces& pieces) { (*static_cast<const Body*>(known))(pieces); };
  stage.body = &body;
  pool_.run_stage(stage);
}

}  // namespace cpu
