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
    for (const Room& chunk : chunks_) release_pages(chunk.at, chunk.bytes);
  }

  // Zeroed, at a multiple of 64 bytes, with room behind it for a vector that reads too far.
  uint8_t* take(size_t bytes) {
    bytes = (bytes + 127) / 64 * 64;
    Room whole;
    Room& room = bytes <= rest_.bytes ? rest_ : whole;
    if (bytes > rest_.bytes) whole = chunk_for(bytes);
    uint8_t* start = room.at;
    room.at += bytes;
    room.bytes -= bytes;
    if (whole.bytes > rest_.bytes) rest_ = whole;
    taken_ += bytes;
    return start;
  }

  size_t taken() const { return taken_; }

 private:
  static constexpr size_t kChunk = 128u << 20;  // what nothing is written to has no memory

  struct Room {
    uint8_t* at = nullptr;
    size_t bytes = 0;
  };

  Room chunk_for(size_t bytes) {
    const size_t size = ((bytes > kChunk ? bytes : kChunk) + kLargePage - 1) / kLargePage * kLargePage;
    void* chunk = allocate_pages(size);
    if (!chunk) throw std::bad_alloc();
    chunks_.push_back({static_cast<uint8_t*>(chunk), size});
    return chunks_.back();
  }

  std::vector<Room> chunks_;
  Room rest_;  // of the chunk with most
  size_t taken_ = 0;
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
