// Threads: any number of them gives the same bits, callers take turns, and a child of a fork has its own.
#if !defined(_WIN32)
#include <sys/wait.h>
#endif

#include <atomic>
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>

#include "cpu/pace.hpp"
#include "cpu/threads.hpp"
#include "tests/cpu/toys.hpp"

namespace cpu_test {
namespace {

constexpr int64_t kPrompt = 5, kNodes = 19, kCapacity = kPrompt + kNodes;

Kind kind_for(const cpu::Kernels& kernels) { return kernels.pairs ? Kind::bf16 : Kind::q8_0; }

// A tiny model with a prompt and a tree, whose forward can be asked for by anybody.
class Client {
 public:
  explicit Client(const cpu::Kernels& kernels, int threads = 1)
      : toy_({kind_for(kernels), kind_for(kernels), 64, 96, 53, {4, 2, 16}, kernels.pairs, true, true, false}, threads),
        network_(toy_, kernels), tree_(kPrompt, kNodes), seen_(tree_.seen(kPrompt)),
        tokens_(random_tokens(kCapacity, toy_.shape.vocabulary - 1)) {}

  Given run(int threads) {
    const Slab slab(slab_bytes(toy_.shape, kLayers, kCapacity));
    const std::vector<int64_t> prompt(tokens_.begin(), tokens_.begin() + kPrompt);
    const std::vector<int64_t> tree(tokens_.begin() + kPrompt, tokens_.end());
    network_.run(Ask::in_order(prompt, 0), slab, kCapacity, threads);
    return network_.run({tree, tree_.positions(), kPrompt, kPrompt, &seen_}, slab, kCapacity, threads);
  }

 private:
  const ToyDecoder toy_;
  Network network_;
  const Tree tree_;
  const std::vector<uint64_t> seen_;
  const std::vector<int64_t> tokens_;
};

// The first two callers of a process come at once: they have to find one pool.
void test_first_callers() {
  const FileMatrix file = random_matrix(Kind::f32, 64, 64, false);
  const auto load = [&] {
    cpu::Weights weights(2);
    pack(weights, "m", Kind::f32, file, nullptr);
  };
  std::thread other(load);
  load();
  other.join();
}

void test_packing_by_threads() {
  const FileMatrix file = random_matrix(Kind::q4_k, 100, 512, false);
  const auto packed_by = [&](int threads) {
    cpu::Weights weights(threads);
    pack(weights, "m", Kind::q4_k, file, nullptr);
    std::vector<float> all;
    for (int64_t o = 0; o < 100; ++o) {
      const std::vector<float> row = weights_of(*cpu::portable_kernels(), weights.matrix("m"), o);
      all.insert(all.end(), row.begin(), row.end());
    }
    return all;
  };
  const std::vector<float> alone = packed_by(1);
  for (const int threads : {2, 3, 5, 9})
    check(same_bits(packed_by(threads), alone), "weights packed by threads", threads);
}

// Two callers, each with a decoder of its own and every number of threads, in turns.
void test_two_callers(const cpu::Kernels& kernels) {
  constexpr int kTimes = 12;
  Client one(kernels), two(kernels);
  const Given first = one.run(1), second = two.run(1);
  int wrong[2] = {0, 0};
  const auto call = [](Client& client, const Given& wanted, int more, int& wrong) {
    for (int i = 0; i < kTimes; ++i) wrong += !(client.run(1 + (i + more) % 4) == wanted);
  };
  std::thread other([&] { call(two, second, 1, wrong[1]); });
  call(one, first, 2, wrong[0]);
  other.join();
  expect(wrong[0] == 0 && wrong[1] == 0, kernels, "two callers", wrong[0] + wrong[1]);
}

// Spins until `done()`, for twenty seconds at most; returns whether it came.
template <typename Done>
bool comes(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!done())
    if (std::chrono::steady_clock::now() > end)
      return false;
    else
      std::this_thread::yield();
  return true;
}

// Every number is in one piece, and the pieces of a thread ascend, those before its own share for themselves.
void test_pieces() {
  for (const int threads : {1, 2, 3, 5, 16})
    for (const int64_t count : {1, 2, 7, 64, 1000})
      for (const int64_t step : {1, 2, 5}) {
        std::vector<std::atomic<int>> times(static_cast<size_t>(count));
        std::atomic<int> wrong{0};
        cpu::Pool::shared().run(threads, [&](const cpu::Team& team) {
          for (int stage = 0; stage < 4; ++stage)
            team.each(count, step, [&](cpu::Pieces& pieces) {
              int64_t last = 0;
              bool before = false;
              while (pieces.next()) {
                wrong += pieces.first % step != 0 || pieces.last <= pieces.first || pieces.last > count;
                wrong += pieces.index() < 0 || pieces.index() >= team.count() || (before && !pieces.is_before_own());
                wrong += pieces.is_before_own() == before && pieces.first < last;
                before = pieces.is_before_own(), last = pieces.last;
                for (int64_t i = pieces.first; i < pieces.last; ++i) ++times[static_cast<size_t>(i)];
              }
            });
        });
        for (const auto& each : times) wrong += each != 4;
        check(wrong == 0, "pieces of a stage", count);
      }
}

// Who holds a piece delays no other piece, and whoever does not come is not waited for.
void test_held_piece() {
  constexpr int64_t kCount = 64;
  for (const bool caller_waits : {false, true}) {
    std::atomic<int64_t> pieces_taken{0}, done{0};
    std::atomic<bool> came{true};
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // a sleeper who was not woken just now is woken
    cpu::Pool::shared().run(2, [&](const cpu::Team& team) {
      team.each(kCount, 1, [&](cpu::Pieces& pieces) {
        for (bool first = true; pieces.next(); first = false) {
          ++pieces_taken;
          if (first) {  // both have one
            if (!comes([&] { return pieces_taken >= 2; })) came = false;
            const int64_t own = pieces.last - pieces.first;
            if (caller_waits == (pieces.index() == 0) && !comes([&] { return done == kCount - own; })) came = false;
          }
          done += pieces.last - pieces.first;
        }
      });
    });
    check(came && done == kCount, "a piece that is held", caller_waits);
  }
}

// A stage whose body throws on the caller's thread has ended when the caller sees it.
void test_throwing() {
  std::atomic<int> under_way{0};
  for (int i = 0; i < 20; ++i) {
    bool thrown = false;
    try {
      cpu::Pool::shared().run(3, [&](const cpu::Team& team) {
        team.each(100, 1, [&](cpu::Pieces& pieces) {
          ++under_way;
          if (pieces.index() == 0) --under_way, throw std::runtime_error("thrown");
          while (pieces.next()) std::this_thread::yield();
          --under_way;
        });
      });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    check(thrown && under_way == 0, "a body that throws", i);
  }
}

thread_local int jobs_begun = 0;

// Each thread begins a job before its pieces, and one job ends before the next begins.
void test_around() {
  std::atomic<int> wrong{0};
  const auto begin = [] { ++jobs_begun; };
  const auto end = [] { --jobs_begun; };
  for (int i = 0; i < 50; ++i) {
    const bool around = i % 3 != 0;
    const auto job = [&](const cpu::Team& team) {
      for (int stage = 0; stage < 3; ++stage)
        team.each(40, 1, [&](cpu::Pieces& pieces) {
          while (pieces.next()) wrong += jobs_begun != around, std::this_thread::yield();
        });
    };
    if (around)
      cpu::Pool::shared().run(4, job, {begin, end});
    else
      cpu::Pool::shared().run(4, job);
    wrong += jobs_begun != 0;
  }
  check(wrong == 0, "what is done around a job", wrong);
}

// A table whose kernels wait at random, as threads do whose cores others want; the caller's more often where `callers`.
class Slowed {
 public:
  explicit Slowed(const cpu::Kernels& kernels, bool callers) : table_(kernels) {
    original = &kernels;
    caller = callers ? std::this_thread::get_id() : std::thread::id();
    table_.products = [](const cpu::Matrix* const* matrices, const int64_t* panels, int count, const cpu::Input& in,
                         int64_t tiles, int64_t rows, float* const* sums, uint8_t* scratch) {
      wait();
      original->products(matrices, panels, count, in, tiles, rows, sums, scratch);
    };
    table_.attend = [](const cpu::AttendTask& task) {
      wait();
      original->attend(task);
    };
    table_.rotate = [](float* head, const float* cosines, const float* sines, int64_t size) {
      wait();
      original->rotate(head, cosines, sines, size);
    };
  }
  const cpu::Kernels& table() const { return table_; }

 private:
  static void wait() {
    thread_local std::minstd_rand draws(static_cast<unsigned>(++seeds));
    const auto draw = draws() % 64;
    if (std::this_thread::get_id() == caller || draw < 2) std::this_thread::sleep_for(std::chrono::microseconds(20 * draw));
    if (draw < 16) std::this_thread::yield();
  }

  static inline const cpu::Kernels* original = nullptr;
  static inline std::thread::id caller;
  static inline std::atomic<int> seeds{0};
  cpu::Kernels table_;
};

void test_delays(const cpu::Kernels& kernels) {
  for (const bool callers : {false, true}) {
    const Slowed slowed(kernels, callers);
    Client client(slowed.table());
    const Given alone = client.run(1);
    for (const int threads : {2, 3, 5}) expect(client.run(threads) == alone, kernels, "bits under delays", threads);
  }
}

// Equal logits in all parts of a vocabulary: the lowest token leads whoever has found it.
void test_equal_logits(const cpu::Kernels& kernels) {
  const Kind kind = kind_for(kernels);
  const ToyDecoder toy({kind, kind, 32, 32, 1500, {2, 1, 16}, kernels.pairs, false, false, false});
  const std::vector<int64_t> tokens = random_tokens(3, 1499);
  for (const bool callers : {false, true}) {
    const Slowed slowed(kernels, callers);
    Network network(toy, slowed.table());
    for (const int threads : {1, 2, 3, 5}) {
      const Slab slab(slab_bytes(toy.shape, kLayers, 3));
      Ask ask = Ask::in_order(tokens, 0);
      ask.count = 130;  // each logit is there a hundred times and more
      const Given given = network.run(ask, slab, 3, threads);
      for (size_t r = 0; r < 3; ++r) expect(given.chosen_is_best(r), kernels, "the lowest of equals", threads);
    }
  }
}

// How many of `forwards` ran on fewer threads than `most`, each taking about what `seconds` says of their number.
template <typename Seconds>
int64_t on_fewer(cpu::Pace& pace, int most, int64_t forwards, const Seconds& seconds) {
  int64_t fewer = 0;
  for (int64_t i = 0; i < forwards; ++i) {
    const int threads = pace.threads();
    check(threads >= 1 && threads <= most, "threads of a pace", threads);
    fewer += threads < most;
    pace.took(seconds(threads) * (below(20) ? 0.9 + 0.05 * static_cast<double>(below(5)) : 2.0));
  }
  return fewer;
}

// Fewer threads run forwards only where, and for as long as, that is faster.
void test_pace() {
  const auto quiet = [](int threads) { return 0.005 / threads; };
  const auto crowded = [](int threads) { return 0.01 * threads; };
  const auto slow = [](int threads) { return 0.1 / threads; };
  for (const int most : {1, 2, 6, 64}) {
    cpu::Pace pace(most);
    check(on_fewer(pace, most, 3000, quiet) == 0, "fewer threads on a quiet machine", most);
    if (most == 1) continue;
    on_fewer(pace, most, 1000, crowded);  // until it has found out
    check(on_fewer(pace, most, 1000, crowded) > 800, "fewer threads on a crowded machine", most);
    on_fewer(pace, most, 3000, quiet);
    check(on_fewer(pace, most, 1000, quiet) == 0, "all threads on a quiet machine again", most);
    cpu::Pace other(most);
    on_fewer(other, most, 100, quiet);
    check(on_fewer(other, most, 2000, slow) < 200, "fewer threads that are no faster", most);
  }
}

#if !defined(_WIN32)
// What a child of this process says of `holds`; false also where it crashes, or hangs for twenty seconds.
template <typename Holds>
bool in_child(const Holds& holds) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(holds() ? 0 : 1);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Products of a matrix that has a block less than it says.
bool reads_too_far(const cpu::Kernels& kernels) {
  std::fclose(stderr);
  const Packed packed(Kind::bf16, 16, 64, false, false, false);
  cpu::Matrix longer = packed.matrix;
  longer.blocks = 3;
  const Guarded<uint32_t> inputs(3 * cpu::kDepth * cpu::kRows);
  const cpu::Input in{inputs.data(), inputs.size()};
  const Guarded<float> sums(cpu::kOutputs * cpu::kRows);
  const Guarded<uint8_t> scratch(cpu::scratch_bytes(3, 1));
  const cpu::Matrix* matrix = &longer;
  const int64_t panel = 0;
  float* to = sums.data();
  kernels.begin();
  kernels.prepare(longer, in, 1, scratch.data());
  kernels.products(&matrix, &panel, 1, in, 1, 1, &to, scratch.data());
  kernels.end();
  return true;
}
#endif

}  // namespace

void test_threads() {
  test_first_callers();
  test_pieces();
  test_held_piece();
  test_throwing();
  test_around();
  test_pace();
  test_packing_by_threads();
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    Client client(*kernels, 3);
    const Given alone = client.run(1);
    for (const int threads : {2, 3, 5, 1, 3})
      expect(client.run(threads) == alone, *kernels, "bits by threads", threads);
    test_two_callers(*kernels);
    test_delays(*kernels);
    test_equal_logits(*kernels);
  }
}

#if defined(_WIN32)
void test_walls() {}
void test_fork() {}
#else
// That reading behind a matrix ends the program on every instruction set is what the other tests rely on.
void test_walls() {
  for (const cpu::Kernels* kernels : cpu::available_kernels())
    expect(!in_child([&] { return reads_too_far(*kernels); }), *kernels, "reading too far is noticed", 3);
}

void test_fork() {
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    Client client(*kernels);
    const Given alone = client.run(3);
    const auto runs = [&] { return client.run(3) == alone && client.run(2) == alone; };
    expect(in_child(runs), *kernels, "a forward in the child of a fork", 3);
    expect(in_child([&] { return runs() && in_child(runs); }), *kernels, "a forward in a child's child", 3);
    expect(runs(), *kernels, "a forward of the parent", 3);
  }
}
#endif

}  // namespace cpu_test
