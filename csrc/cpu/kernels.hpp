// The parts of a forward on the CPU: packed matrices, and one table of kernels per instruction set.
//
// All states stand transposed, [tile][channel][16 rows]: the rows of a tree lie side by side in the lanes of a vector, so
// each row goes through the same instructions in the same order whatever stands beside it. That is what makes a token's
// logits the same bits in every tree and in plain decoding. Products do so too where the rows are a tile's; without tiles
// they take rows one by one, each sum in an order of its own, so that one row costs a sixteenth of sixteen.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/formats.hpp"

namespace cpu {

constexpr int kRows = 16;     // rows of a tile
constexpr int kOutputs = 16;  // outputs of a panel
constexpr int kDepth = 32;    // inputs of a block

// The weight formats, one file of csrc/cpu/formats each: f32, bf16, i8, q4_0, ...; and, as int_i8, int_q4_0, ..., those of
// csrc/cpu/integers, whose integers are multiplied as they are. setup.py lists both.
#define CPU_NAME(name) name,
#define CPU_INTEGER_NAME(name) int_##name,
enum class Kind : int { CPU_FORMATS(CPU_NAME) CPU_INTEGERS(CPU_INTEGER_NAME) };
#undef CPU_NAME
#undef CPU_INTEGER_NAME

constexpr int kFloatKinds = 0
#define CPU_ONE(name) +1
    CPU_FORMATS(CPU_ONE);
#undef CPU_ONE
constexpr bool has_integers(Kind kind) { return static_cast<int>(kind) >= kFloatKinds; }

// How products are computed. bfloat16: weights become floats, or bfloat16 where the CPU multiplies such pairs. integer:
// packed weights stay integers and rows become such, so that all instruction sets give the same bits.
constexpr char kBfloat16[] = "bfloat16", kInteger[] = "integer";

// A matrix as panels of 16 outputs, each a run of blocks of 32 inputs; see csrc/cpu/formats for the bytes of a block.
struct Matrix {
  Kind kind = Kind::f32;
  int64_t outputs = 0, inputs = 0;  // those of the model
  int64_t panels = 0, blocks = 0;   // rounded up
  const uint8_t* data = nullptr;
  int64_t step = 0;               // bytes from a panel to the next one
  const float* scales = nullptr;  // [panels * 16], of i8 and int_i8: times the sum
  const float* bias = nullptr;    // [panels * 16] or null
  float factor = 1.0f;            // of all outputs, the bias included; those who call kernels multiply by it
};

// Inputs of products: [tile][inputs][16] as float, or, where the kernels take pairs, [tile][inputs / 2][16] pairs of
// bfloat16, the even input in the low half. Inputs are rounded up to whole blocks; what is behind the last is zero.
struct Input {
  uint32_t* data = nullptr;
  int64_t stride = 0;  // words from tile to tile
  int64_t rows = INT64_MAX;  // of all tiles; kernels may leave out what no row fills

  int64_t rows_of(int64_t tile) const { return rows - tile * kRows < kRows ? rows - tile * kRows : kRows; }
  float* floats(int64_t tile) const { return reinterpret_cast<float*>(data + tile * stride); }
  uint32_t* pairs(int64_t tile) const { return data + tile * stride; }
};

// A slot that some lanes of a group see and others do not; bit i of a mask is lane i. Its place on a lane's path, from 0,
// is the number of slots before it that the lane sees.
struct Step {
  int64_t slot;
  uint16_t lanes;  // that see it
  uint16_t odd;    // those of them on whose path it has an odd place
  uint16_t last;   // those of them on whose path it ends a chunk of kChunk slots
};

constexpr int kChunk = 32;  // slots whose values a tile sums

// Attention of one key-value head for up to 16 queries. Query q of a tile is head q % per_row of row q / per_row; lane i is
// query first + i. Within a window, slots are counted from a slot that all of them have behind them or at their windows'
// begin, a multiple of kChunk: so a place stands in the same chunk, whatever the window of the rows beside it.
struct AttendTask {
  const float* queries;  // [per_row][size][16 rows], of the tile
  int64_t per_row, first, count;
  float scale;           // of the scores
  const float* sinks;    // [per_row], or null: of each head a score beside those of slots, of no value
  const void* keys;      // [slots][size], float or bfloat16
  const void* values;
  bool half;             // they are bfloat16
  int64_t size;          // channels of a head, an even number
  int64_t prefix;        // slots that all lanes see, each from its first one on
  const int32_t* begins; // [16], of which `prefix` is the most: the first slot that a lane sees
  int64_t lead;          // the largest of them
  int64_t slots;         // prefix, and up to the last of `steps`
  const Step* step;      // [steps], ascending slots behind the prefix
  int64_t steps;
  float* scratch;        // attend_floats(...)
  int64_t* turned;       // chunks of keys, or of values, that `chunks` holds: 0 for a head's first task, then set by tasks
  uint16_t* chunks;      // turned_halves(...), kept while tasks of the same head follow
  bool shares;           // such tasks follow or came before
  const Input* out;      // to channels `channel` and on of `tile`
  int64_t tile, channel;
};

// Select the activation of a gated network. Each is x times a sigmoid: of x, of twice the argument of GELU's tanh, or of
// 1.702 x; this one is of at most 7, and times one more than what is within 7 of zero. Or it is a sigmoid alone, or x where
// that is positive, by which networks without gates multiply x itself.
enum class Activation : int { silu, gelu_tanh, clamped, sigmoid, relu };

// A causal convolution of one row: of each channel, its last inputs by weights of its own.
struct ConvolveTask {
  const float* const* rows;  // [taps], the oldest first: [channels]
  const float* weights;      // [taps][stride]
  const float* bias;         // [channels] or null
  int64_t taps, stride;
  int64_t channels;  // a multiple of 16
  bool silu;         // of the sums
  float* out;        // [channels]
};

// One row's update of 16 columns of a head's state, [size][16]: the state decays, adds the value under the key, and is read
// by the query. By the delta rule it adds the value less what it gives for the key.
struct UpdateTask {
  const float* before;
  float* after;  // may be `before`
  bool delta;
  int64_t size;  // a multiple of 4
  const float *key, *query;  // [size]
  const float* value;        // [16]
  float decay, rate;         // of the state, and of what is added
  float* out;                // [16]; null: not read
};

struct Kernels {
  const char* name;
  const char* numerics;  // kBfloat16 or kInteger
  bool pairs;
  void (*begin)();  // on each thread, before and after a forward
  void (*end)();
  // Convert the input into the layout that `products` expects, into scratch. Call once per thread, before all products.
  void (*prepare)(const Matrix& matrix, const Input& in, int64_t rows, uint8_t* scratch);
  // sums[i]: [tiles][16 outputs][16 rows] of matrices[i]'s panel panels[i], bias and scales applied; count is 1 or 2
  void (*products)(const Matrix* const* matrices, const int64_t* panels, int count, const Input& in, int64_t tiles,
                   int64_t rows, float* const* sums, uint8_t* scratch);
  // one output's weights, as the model has them: float [blocks * 32]
  void (*weights)(const Matrix& matrix, int64_t output, float* out);
  // RMSNorm of a tile, [channels][16], into an input, and where wanted as float [channels][16]
  void (*norm)(const float* x, const float* weight, int64_t channels, float eps, const Input* out, int64_t tile,
               int64_t first_channel, float* plain);
  void (*copy)(const float* x, int64_t channels, const Input& out, int64_t tile, int64_t first_channel);
  // activation(gates) * ups of 16 channels
  void (*gate)(const float* gates, const float* ups, const Input& out, int64_t tile, int64_t first_channel,
               Activation activation);
  // rotates channels [size][16] of a head in place, the first half with the second; cosines, sines: [size / 2][16]
  void (*rotate)(float* head, const float* cosines, const float* sines, int64_t size);
  void (*attend)(const AttendTask& task);
  // keeps the `count` largest finite of 16 rows and their outputs, [count][16], largest first, the lowest first of equals;
  // sums: [outputs][16], the first is `first`, and those of later calls are higher
  void (*best)(const float* sums, int32_t first, int32_t outputs, int64_t count, float* most, int32_t* at);
  // rows of states [size][16], to where each stands `stride` values behind the one before, as float or bfloat16
  void (*write)(const float* states, int64_t size, int64_t rows, void* to, int64_t stride, bool half);
  void (*add)(float* to, const float* from, int64_t count);
  void (*convolve)(const ConvolveTask& task);
  // divides a row's channels, a multiple of 16, by the root of 1e-6 and the sum of their squares, and multiplies by `factor`
  void (*unit)(float* x, int64_t size, float factor);
  void (*update)(const UpdateTask& task);
  // y + skip * x, times the activated gates where there are any, to y; channels of a row, a multiple of 16
  void (*skip)(const float* x, float by, const float* gates, int64_t channels, float* y);
};

// The bytes of `products`' scratch for a matrix of so many blocks: weights that it makes, then what `prepare` makes, as floats
// or pairs and as integers, at last lanes of sums.
constexpr int64_t kKeptBytes = 128 * 1024;
inline int64_t made_bytes(int64_t blocks) { return (blocks + 16) * 1024; }
inline int64_t integers_at(int64_t blocks, int64_t tiles) {
  return made_bytes(blocks) + tiles * ((blocks + 1) / 2 * 4096 + 64);
}
inline int64_t scratch_bytes(int64_t blocks, int64_t tiles) {
  return integers_at(blocks, tiles) + tiles * blocks * 1024 + kKeptBytes;
}

// Return the scratch memory of an AttendTask.
inline int64_t attend_floats(int64_t size, int64_t slots, int64_t steps) {
  const int64_t apart = std::max<int64_t>(size, kRows);
  return (9 * apart + 2 * (slots + 4 * kChunk)) * kRows + (steps + kChunk) * (size + kRows);
}
inline int64_t turned_halves(int64_t size, int64_t slots, bool half) {
  return (slots / kChunk + 1) * kChunk * size * (half ? 1 : 2);
}

// The compiler's own vectors of four, which are always there; isa.hpp lists all.
const Kernels* portable_kernels();

}  // namespace cpu
