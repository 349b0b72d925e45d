// The instruction sets that this build has and this CPU runs.
#pragma once

#include <cstring>
#include <vector>

#include "cpu/kernels.hpp"

namespace cpu {

// One of the build. Each isa_*.cpp has one, and nothing else knows of it.
class InstructionSet {
 public:
  // find: null where this CPU has it not; rank: the higher, the faster
  InstructionSet(const Kernels* (*find)(), int rank) : find_(find), rank_(rank) {
    InstructionSet** place = &first();
    while (*place && (*place)->rank_ > rank) place = &(*place)->next_;
    next_ = *place;
    *place = this;
  }
  static InstructionSet*& first() {
    static InstructionSet* fastest = nullptr;
    return fastest;
  }
  const Kernels* find() const { return find_(); }
  const InstructionSet* next() const { return next_; }

 private:
  const Kernels* (*const find_)();
  const int rank_;
  InstructionSet* next_;
};

// Return the kernels of such numerics that this CPU runs, the fastest first.
inline std::vector<const Kernels*> available_kernels(const char* numerics = kBfloat16) {
  std::vector<const Kernels*> available;
  for (const InstructionSet* set = InstructionSet::first(); set; set = set->next()) {
    const Kernels* kernels = set->find();
    if (kernels && std::strcmp(kernels->numerics, numerics) == 0) available.push_back(kernels);
  }
  return available;
}

}  // namespace cpu
