// Threads: any number of them gives the same bits, callers take turns, and a child of a fork has its own.
#include <sys/wait.h>

#include <thread>

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

// Evaluate `holds` in a child process; false also if that crashes, or hangs for twenty seconds.
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

}  // namespace

// That reading behind a matrix ends the program on every instruction set is what the other tests rely on.
void test_walls() {
  for (const cpu::Kernels* kernels : cpu::available_kernels())
    expect(!in_child([&] { return reads_too_far(*kernels); }), *kernels, "reading too far is noticed", 3);
}

void test_threads() {
  test_first_callers();
  test_packing_by_threads();
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    Client client(*kernels, 3);
    const Given alone = client.run(1);
    for (const int threads : {2, 3, 5, 1, 3})
      expect(client.run(threads) == alone, *kernels, "bits by threads", threads);
    test_two_callers(*kernels);
  }
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

}  // namespace cpu_test
