// Tokens, and tokens with probabilities or counts.
#pragma once

#include <cstdint>
#include <vector>

namespace spec {

using Tokens = std::vector<int64_t>;
using Context = std::vector<int64_t>;  // the last tokens, the newest first

struct Share {
  int64_t token;
  double probability;
};
using Shares = std::vector<Share>;

template <typename Any>
auto find(Any& shares, int64_t token) {
  auto* share = shares.data();
  while (share != shares.data() + shares.size() && share->token != token) ++share;
  return share != shares.data() + shares.size() ? share : nullptr;
}

}  // namespace spec
