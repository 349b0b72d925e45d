// What differs between compilers and systems: which code is built, what the CPU has, memory, threads. The compilers are GCC
// and clang, on Windows clang-cl too: vectors are theirs. No other header of csrc/cpu asks for a system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#if defined(_MSC_VER) && !defined(__clang__)
#error "csrc/cpu needs GCC or clang; on Windows clang-cl"
#endif

// clang-cl says that it is no GNU C
#if defined(__x86_64__)
#define CPU_X86_64 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define CPU_X86_64 0
#endif

#include <sys/stat.h>

#if defined(_WIN32)
#include <malloc.h>
#else
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#if defined(__linux__) && CPU_X86_64
#include <sys/syscall.h>
#endif

namespace cpu {

// ---- what the CPU has, and the system saves

#if CPU_X86_64
enum class Feature { avx2, fma, f16c, avx512f, avx512bw, avx512dq, avx512vl, avx512vnni, avx512bf16, avxvnni, amx };

// By CPUID alone: what compilers offer needs a library that clang-cl does not link.
inline bool cpu_has(Feature feature) {
  struct Leaves {
    unsigned ecx1 = 0, ebx7 = 0, ecx7 = 0, edx7 = 0, eax71 = 0;
    uint64_t saved = 0;  // XCR0: registers that the system saves

    Leaves() {
      unsigned a = 0, b = 0, c = 0, d = 0;
      if (!__get_cpuid(1, &a, &b, &c, &d)) return;
      ecx1 = c;
      if (c >> 27 & 1) {
        unsigned low = 0, high = 0;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        saved = uint64_t{high} << 32 | low;
      }
      if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
      const unsigned last = a;
      ebx7 = b, ecx7 = c, edx7 = d;
      if (last >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) eax71 = a;
    }
  };
  static const Leaves leaves;
  const bool wide = (leaves.saved & 0x06) == 0x06, wider = (leaves.saved & 0xE6) == 0xE6;
  const bool tiles = (leaves.saved >> 17 & 3) == 3;
  switch (feature) {
    case Feature::fma: return wide && leaves.ecx1 >> 12 & 1;
    case Feature::f16c: return wide && leaves.ecx1 >> 29 & 1;
    case Feature::avx2: return wide && leaves.ebx7 >> 5 & 1;
    case Feature::avx512f: return wider && leaves.ebx7 >> 16 & 1;
    case Feature::avx512dq: return wider && leaves.ebx7 >> 17 & 1;
    case Feature::avx512bw: return wider && leaves.ebx7 >> 30 & 1;
    case Feature::avx512vl: return wider && leaves.ebx7 >> 31 & 1;
    case Feature::avx512vnni: return wider && leaves.ecx7 >> 11 & 1;
    case Feature::avx512bf16: return wider && leaves.eax71 >> 5 & 1;
    case Feature::avxvnni: return wide && leaves.eax71 >> 4 & 1;
    case Feature::amx: return tiles && leaves.edx7 >> 22 & 1 && leaves.edx7 >> 24 & 1 && leaves.edx7 >> 25 & 1;
  }
  return false;
}

template <typename... Features>
bool cpu_has(Feature first, Features... others) {
  return cpu_has(first) && cpu_has(others...);
}

// Lets this process use tiles: their state is large, so Linux wants to be asked. Elsewhere it is unknown who has to.
inline bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
#else
  return false;
#endif
}
#endif

// ---- memory

// At a multiple of `alignment`, of which `bytes` is one; null where there is none left.
inline void* allocate(size_t alignment, size_t bytes) {
#if defined(_WIN32)
  return _aligned_malloc(bytes, alignment);
#else
  return std::aligned_alloc(alignment, bytes);
#endif
}

inline void release(void* memory) {
#if defined(_WIN32)
  _aligned_free(memory);
#else
  std::free(memory);
#endif
}

constexpr size_t kLargePage = 2u << 20;

// Zeroed, at a multiple of kLargePage, of which `bytes` is one, in large pages where the system gives them; null where there
// is none left. Who writes to a page first takes it, on that thread and near its core.
inline void* allocate_pages(size_t bytes) {
#if defined(_WIN32)
  void* memory = allocate(kLargePage, bytes);
  if (memory) std::memset(memory, 0, bytes);
  return memory;
#else
  void* whole = mmap(nullptr, bytes + kLargePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (whole == MAP_FAILED) return nullptr;
  auto* start = static_cast<unsigned char*>(whole);
  const size_t before = (kLargePage - reinterpret_cast<uintptr_t>(whole) % kLargePage) % kLargePage;
  if (before) munmap(start, before);
  munmap(start + before + bytes, kLargePage - before);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  madvise(start + before, bytes, MADV_HUGEPAGE);
#endif
  return start + before;
#endif
}

inline void release_pages(void* memory, size_t bytes) {
#if defined(_WIN32)
  (void)bytes;
  release(memory);
#else
  munmap(memory, bytes);
#endif
}

// Returns what was freed to the system, where the C library is glibc, which keeps it for the next allocation.
inline void return_freed_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

// ---- files

// An open file, by a descriptor of its own, from whose bytes threads copy side by side.
class OpenFile {
 public:
#if defined(_WIN32)
  // Reading at a place would move the position of all: no file is left open there.
  explicit OpenFile(int) {}
  bool read(uint8_t*, int64_t, int64_t) const { return false; }
  bool is_same() const { return false; }
#else
  explicit OpenFile(int descriptor) : descriptor_(dup(descriptor)) { fstat(descriptor_, &state_); }
  ~OpenFile() { close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  // Copies bytes from `offset` on. Returns whether all of them were there.
  bool read(uint8_t* out, int64_t bytes, int64_t offset) const {
    for (int64_t done = 0; done < bytes;) {
      const int64_t count = pread(descriptor_, out + done, static_cast<size_t>(bytes - done), offset + done);
      if (count <= 0) return false;
      done += count;
    }
    return true;
  }

  // Whether size and time of the last change are those of the beginning.
  bool is_same() const {
    struct stat now {};
    return fstat(descriptor_, &now) == 0 && now.st_size == state_.st_size && changed(now) == changed(state_);
  }

 private:
  static std::pair<int64_t, int64_t> changed(const struct stat& state) {
#if defined(__APPLE__)
    return {state.st_mtimespec.tv_sec, state.st_mtimespec.tv_nsec};
#else
    return {state.st_mtim.tv_sec, state.st_mtim.tv_nsec};
#endif
  }

  const int descriptor_;
  struct stat state_ {};
#endif
};

// ---- threads

// Of a thread that waits for another one: leaves what the core can do to its twin.
inline void relax() {
#if CPU_X86_64
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Runs `call` in each child that this process forks from now on.
inline void after_fork(void (*call)()) {
#if defined(_WIN32)
  (void)call;
#else
  pthread_atfork(nullptr, nullptr, call);
#endif
}

}  // namespace cpu
