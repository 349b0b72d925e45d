// What a forward on the CPU is made of: packed matrices, and one table of kernels per instruction set.
//
// All states stand transposed, [tile][channel][16 rows]: the rows of a tree lie side by side in the lanes of a vector, so
// each row goes through the same instructions in the same order whatever stands beside it. That is what makes a token's
// logits the same bits in every tree and in plain decoding.
#pragma once

#include <cstdint>

namespace cpu {

constexpr int kRows = 16;     // rows of a tile
constexpr int kOutputs = 16;  // outputs of a panel
constexpr int kDepth = 32;    // inputs of a block

enum class Kind : int { f32, bf16, i8, q4_0, q4_1, q8_0, q4_k, q6_k };

// A matrix as panels of 16 outputs, each a run of blocks of 32 inputs; see packing.hpp for the bytes of a block.
struct Matrix {
  Kind kind = Kind::f32;
  int64_t outputs = 0, inputs = 0;  // those of the model
  int64_t panels = 0, blocks = 0;   // rounded up
  const uint8_t* data = nullptr;
  const float* scales = nullptr;  // [panels * 16], of Kind::i8: times the sum
  const float* bias = nullptr;    // [panels * 16] or null
};

// What products read: [tile][inputs][16] as float, or, where the kernels take pairs, [tile][inputs / 2][16] pairs of
// bfloat16, the even input in the low half. Inputs are rounded up to whole blocks; what is behind the last is zero.
struct Input {
  uint32_t* data = nullptr;
  int64_t stride = 0;  // words from tile to tile

  float* floats(int64_t tile) const { return reinterpret_cast<float*>(data + tile * stride); }
  uint32_t* pairs(int64_t tile) const { return data + tile * stride; }
};

// Attention of one key-value head for up to 16 queries: lane i is query head `heads[i]` of row `rows[i]`.
struct AttendTask {
  const void* keys;      // [slots][size], float or bfloat16
  const void* values;
  bool half;             // they are bfloat16
  int64_t size;          // channels of a head
  int64_t prefix;        // slots that all lanes see
  int64_t slots;         // prefix, and those behind it of which `visible` tells
  const float* visible;  // [slots - prefix][16], 0 or 1
  float* query;          // [size][16], scaled
  float* scores;         // scratch [slots rounded up to 16][16]
  float* expanded;       // scratch [16 slots][size]
  float* out;            // [size][16]
};

struct Kernels {
  const char* name;
  bool pairs;
  void (*begin)();  // on each thread, before and after a forward
  void (*end)();
  // sums[i]: [tiles][16 outputs][16 rows] of matrices[i]'s panel panels[i], bias and scales applied; count is 1 or 2
  void (*products)(const Matrix* const* matrices, const int64_t* panels, int count, const Input& in, int64_t tiles,
                   int64_t rows, float* const* sums, uint8_t* scratch);
  // one output's weights, as the model has them: float [blocks * 32]
  void (*weights)(const Matrix& matrix, int64_t output, float* out);
  // RMSNorm of a tile, [channels][16], into an input, and where wanted as float [channels][16]
  void (*norm)(const float* x, const float* weight, int64_t channels, float eps, const Input* out, int64_t tile,
               int64_t first_channel, float* plain);
  void (*copy)(const float* x, int64_t channels, const Input& out, int64_t tile, int64_t first_channel);
  // silu(gates) * ups of 16 channels
  void (*gate)(const float* gates, const float* ups, const Input& out, int64_t tile, int64_t first_channel);
  // rotates a head [size][16] in place; cosines, sines: [size / 2][16]
  void (*rotate)(float* head, const float* cosines, const float* sines, int64_t size);
  void (*attend)(const AttendTask& task);
  // keeps the largest finite of 16 rows and its output, the lowest of equals; sums: [outputs][16], the first is `first`
  void (*best)(const float* sums, int32_t first, int32_t outputs, float* most, int32_t* at);
};

// The bytes of `products`' scratch for a matrix of so many blocks.
inline int64_t scratch_bytes(int64_t blocks) { return (blocks + 16) * 1024; }

// Null where this build or this CPU has it not. `amx` asks the operating system for the tiles, once per process.
const Kernels* amx_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* portable_kernels();  // the compiler's own vectors of four: NEON on aarch64

}  // namespace cpu
