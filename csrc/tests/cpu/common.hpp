// Helpers of the tests of csrc/cpu: guarded memory, random numbers, and checks that name a table.
#pragma once

#if defined(_WIN32)
#define NOMINMAX
#include <windows.h>
#undef near
#undef far
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cpu/isa.hpp"
#include "tests/check.hpp"

namespace cpu_test {

#if defined(_WIN32)
inline size_t page_bytes() { return 4096; }
inline uint8_t* walled(size_t size, size_t page) {
  uint8_t* base = static_cast<uint8_t*>(VirtualAlloc(nullptr, size, MEM_RESERVE, PAGE_NOACCESS));
  if (!base || !VirtualAlloc(base + page, size - 2 * page, MEM_COMMIT, PAGE_READWRITE)) std::abort();
  return base;
}
inline void unmap(uint8_t* base, size_t) { VirtualFree(base, 0, MEM_RELEASE); }
#else
inline size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
// Memory whose first and last page nobody may touch.
inline uint8_t* walled(size_t size, size_t page) {
  void* mapped = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) std::perror("mmap"), std::abort();
  uint8_t* base = static_cast<uint8_t*>(mapped);
  if (mprotect(base + page, size - 2 * page, PROT_READ | PROT_WRITE) != 0) std::perror("mprotect"), std::abort();
  return base;
}
inline void unmap(uint8_t* base, size_t size) { munmap(base, size); }
#endif

// Memory that begins at a multiple of 64 bytes and ends, rounded up to one, where a page that nobody may touch begins.
// The sanitizers do not see what tiles of inline assembly load; this wall does. Filled with NaN of any kind of float.
template <typename T>
class Guarded {
 public:
  Guarded() = default;
  explicit Guarded(int64_t count) : count_(count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    const size_t page = page_bytes(), inner = (bytes + page - 1) / page * page;
    size_ = inner + 2 * page;
    base_ = walled(size_, page);
    std::memset(base_ + page, 0xFF, inner);
    data_ = reinterpret_cast<T*>(base_ + page + inner - bytes);
  }
  Guarded(const T* from, int64_t count) : Guarded(count) { std::copy(from, from + count, data_); }
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Guarded() {
    if (base_) unmap(base_, size_);
  }

  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return count_; }
  void fill(T value) const { std::fill(data_, data_ + count_, value); }
  std::vector<T> values() const { return {data_, data_ + count_}; }

 private:
  uint8_t* base_ = nullptr;
  T* data_ = nullptr;
  size_t size_ = 0;
  int64_t count_ = 0;
};

// Tables of both numerics.
inline std::vector<const cpu::Kernels*> every_table() {
  std::vector<const cpu::Kernels*> tables = cpu::available_kernels(cpu::kBfloat16);
  for (const cpu::Kernels* kernels : cpu::available_kernels(cpu::kInteger)) tables.push_back(kernels);
  return tables;
}

inline void expect(bool holds, const cpu::Kernels& kernels, const std::string& what, int64_t size) {
  if (!holds) check(false, (std::string(kernels.name) + ": " + what).c_str(), size);
}

inline float normal(double deviation = 1.0) {
  return static_cast<float>(std::normal_distribution<double>(0.0, deviation)(generator));
}

inline std::vector<float> normals(int64_t count, double deviation = 1.0) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(deviation);
  return values;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Places of the `count` largest finite values, largest first, the lowest first of equals; -1 where there are fewer.
inline std::vector<int64_t> best_of(const std::vector<float>& values, int64_t count) {
  std::vector<int64_t> places;
  for (size_t i = 0; i < values.size(); ++i)
    if (std::isfinite(values[i])) places.push_back(static_cast<int64_t>(i));
  const auto value = [&](int64_t place) { return values[static_cast<size_t>(place)]; };
  std::stable_sort(places.begin(), places.end(), [&](int64_t a, int64_t b) { return value(a) > value(b); });
  places.resize(static_cast<size_t>(count), -1);
  return places;
}

inline bool all_nan(const std::vector<float>& values) {
  for (const float value : values)
    if (!std::isnan(value)) return false;
  return !values.empty();
}

// The nearest bfloat16 number, the even one of two; by arithmetic, for numbers that are not subnormal.
inline double as_bf16(double value) {
  if (value == 0.0 || !std::isfinite(value)) return value;
  int exponent;
  const double mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(mantissa * 256.0), exponent - 8);
}

inline uint16_t bf16_bits(double value) {  // of a number that bfloat16 has
  const float narrow = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &narrow, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// Kernels run between begin and end, as tiles have to be set up.
class Begun {
 public:
  explicit Begun(const cpu::Kernels& kernels) : kernels_(kernels) { kernels_.begin(); }
  Begun(const Begun&) = delete;
  Begun& operator=(const Begun&) = delete;
  ~Begun() { kernels_.end(); }

 private:
  const cpu::Kernels& kernels_;
};

// The parts of the programs.
void test_platform();
void test_packing();
void test_products();
void test_integers();
void test_states();
void test_attend();
void test_fused();
void test_angles();
void test_order();
void test_decoder();
void test_mixers();
void test_eagle();
void test_block_heads();
void test_threads();
void test_walls();
void test_fork();

}  // namespace cpu_test
