// Families of decoders and EAGLE-3's head row by row in double precision, without a cache: what csrc/cpu has to compute.
#pragma once

#include <map>

#include "cpu/experts.hpp"
#include "tests/cpu/packed.hpp"

namespace cpu_test {

using Row = std::vector<double>;

constexpr float kEps = 1e-6f;

enum class Mixes { none, convolution, delta, mamba };

// Set what a family has beside Llama's blocks.
struct Blocks {
  bool gelu = false, output_norms = false, input_norms = true;
  bool whole_norms = false;          // of queries and keys, where there are any
  std::vector<int64_t> windows = {};  // of the layers, 0 for none
  int64_t turned = 0;                // channels of a head that the first layer turns, 0 for all
  bool second_turned = true;         // the second layer turns all, by other frequencies
  bool plain = false;                // networks have no gates
  bool single = false;               // a layer has attention, or a mixer, or, if its mixer is none, a network alone
  bool clamped = false;              // the activation of experts with biases, and attention with sinks
  int64_t experts = 0;               // of each layer, instead of one network
  cpu::Routing routing = {};
  bool choice = false, shared = false;
  float scale = 0.0f, embedding = 1.0f, residual = 1.0f, divisor = 1.0f;
  std::vector<Mixes> mixers = {};    // of the layers, in attention's place
  bool beside = false;               // mixers stand beside attention instead, and factors multiply what matrices give
  cpu::Recurrence recurrence = {};   // of all mixers
  bool gated = false;                // attention, by gates of all channels
  bool by_head = false;              // by one of each head instead
  bool normed = false;               // embeddings
  float added_eps = -1.0f;           // of norms of what is added, below 0: that of the others
};

struct ToyShape {
  Kind kind, other;  // of the matrices; values, ups and downs are `other`
  int64_t hidden, inner, vocabulary;
  cpu::Heads heads;
  bool half;  // the cache is bfloat16
  bool biases, head_norms, tied;
  Blocks blocks = {};

  Mixes mixer(size_t layer) const { return blocks.mixers.empty() ? Mixes::none : blocks.mixers[layer]; }
  int64_t window(size_t layer) const { return blocks.windows.empty() ? 0 : blocks.windows[layer]; }
};

struct Dense {
  int64_t outputs = 0, inputs = 0;
  Row weights, bias;  // [outputs][inputs]; [outputs] or nothing
  double factor = 1.0;  // of all outputs

  Row operator()(const Row& x) const;
};

// Weights twice: as the network under test has them, and as the numbers that they stand for.
class Toy {
 public:
  explicit Toy(int threads = 1) : weights(threads) {}

  void matrix(const std::string& name, Kind kind, int64_t outputs, int64_t inputs);
  void add(const std::string& name, Kind kind, const FileMatrix& file);
  void vector(const std::string& name, int64_t count, double mean, double deviation);
  void bias(const std::string& name, int64_t count);
  void factor(const std::string& name, float by);
  // A router and its experts, or one gated network.
  void experts(const std::string& prefix, const ToyShape& shape);
  void network(const std::string& prefix, const ToyShape& shape);
  // Attention, or the mixer in its place or beside it, and gated network of a layer, whose queries, keys and values are made of `width`
  // inputs.
  void layer(const std::string& prefix, const ToyShape& shape, int64_t width, Mixes mixer = Mixes::none);

  cpu::Weights weights;
  std::map<std::string, Dense> dense;
  std::map<std::string, Row> vectors;

 private:
  void mix(const std::string& prefix, const ToyShape& shape, Mixes mixer);
};

namespace naive {

Row norm(const Row& x, const Row& weight, float eps = kEps);

struct Positions {
  std::vector<float> frequencies;
  float factor;

  explicit Positions(int64_t channels, float base = 100.0f);
  void rotate(double* head, int64_t position) const;
};

// All rows of a context: where they stand and which of the others each sees.
struct Context {
  std::vector<int64_t> positions;
  std::vector<std::vector<char>> sees;  // [row][row]
  std::vector<int64_t> before = {};     // how many rows of its block stand before each, -1 for rows of none; or nothing
};

// What a mixer gives for rows of inputs, before its last product: along the path that a row sees, from its first token on.
std::vector<Row> mix(const Toy& toy, const std::string& prefix, Mixes mixer, const cpu::Recurrence& of,
                     const std::vector<Row>& inputs, const Context& context);

// Adds to the rows of `residual` what attention over `inputs` gives, or a mixer, or both, and then the gated network.
class Layer {
 public:
  // positions: null where they do not count.
  Layer(const Toy& toy, const std::string& prefix, const cpu::Heads& heads, const Positions* positions,
        const Blocks& blocks = {}, int64_t window = 0, Mixes mixer = Mixes::none)
      : toy_(toy), prefix_(prefix), heads_(heads), positions_(positions), blocks_(blocks), window_(window), mixer_(mixer) {}

  void run(const std::vector<Row>& inputs, const Context& context, std::vector<Row>& residual) const;

 private:
  const Dense& dense(const std::string& name) const { return toy_.dense.at(prefix_ + name); }
  double activated(double gate, double up) const;
  Row gated(const std::string& prefix, const Row& x) const;
  Row by_experts(const Row& x) const;  // what the experts give
  std::vector<size_t> chosen(const Row& scores) const;
  // What the products behind attention and behind a mixer give.
  std::vector<Row> mixed(const std::vector<Row>& inputs, const Context& context) const;
  std::vector<Row> attended(const std::vector<Row>& inputs, const Context& context) const;
  // Rows convolved before a part (side 0) or after it, by kernels of `read`, where there is a convolution of this name.
  std::vector<Row> convolved(const std::string& name, size_t side, const std::vector<Row>& rows,
                             const std::vector<Row>& read, const Context& context) const;
  Row normed(const std::string& name, const Row& x) const;  // where there is a norm of this name
  Row heads_of(const std::string& which, int64_t count, const Row& input, int64_t position) const;
  Row attend(const Row& query, const std::vector<Row>& keys, const std::vector<Row>& values,
             const std::vector<char>& sees) const;

  const Toy& toy_;
  const std::string prefix_;
  const cpu::Heads heads_;
  const Positions* positions_;
  const Blocks blocks_;
  const int64_t window_;
  const Mixes mixer_;
};

}  // namespace naive

// The distance as a share of the length.
double distance(const float* got, const Row& exact);

}  // namespace cpu_test
