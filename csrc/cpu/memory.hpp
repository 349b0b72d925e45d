// Memory for weights: aligned, zeroed, in large pages where the system gives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "cpu/platform.hpp"

namespace cpu {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (void* chunk : chunks_) release(chunk);
  }

  // Zeroed, at a multiple of 64 bytes, with room behind it for a vector that reads too far.
  uint8_t* take(size_t bytes) {
    bytes = (bytes + 127) / 64 * 64;
    if (bytes > left_) add_chunk(bytes);
    uint8_t* found = next_;
    next_ += bytes;
    left_ -= bytes;
    taken_ += bytes;
    std::memset(found, 0, bytes);
    return found;
  }

  size_t taken() const { return taken_; }

 private:
  static constexpr size_t kPage = 2u << 20, kChunk = 32u << 20;

  void add_chunk(size_t bytes) {
    const size_t size = ((bytes > kChunk ? bytes : kChunk) + kPage - 1) / kPage * kPage;
    void* chunk = allocate(kPage, size);
    if (!chunk) throw std::bad_alloc();
    prefer_large_pages(chunk, size);
    chunks_.push_back(chunk);
    next_ = static_cast<uint8_t*>(chunk);
    left_ = size;
  }

  std::vector<void*> chunks_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0, taken_ = 0;
};

// Scratch that grows and is never moved while it is read: aligned, not initialised.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  ~Buffer() { release(data_); }

  T* reserve(size_t count) {
    if (count > size_) {
      release(data_);
      data_ = nullptr;
      size_ = 0;
      const size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
      data_ = static_cast<T*>(allocate(4096, bytes));
      if (!data_) throw std::bad_alloc();
      std::memset(static_cast<void*>(data_), 0, bytes);
      size_ = count;
    }
    return data_;
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace cpu
