// A stable counting sort of routes by expert.
//
// Contract: see plan.h. Trade-off: the two passes read the ids twice instead of keeping a list per expert.
#include "cpu/plan.h"

#include <algorithm>

namespace streammoe::cpu {

Plan make_plan(std::span<const int32_t> ids, int64_t num_experts, int64_t capacity, uint8_t* dropped) {
  const auto num_pairs = static_cast<int64_t>(ids.size());
  const auto valid = [&](int64_t pair) {
    const int32_t id = ids[static_cast<size_t>(pair)];
    return id >= 0 && id < num_experts;
  };
  Plan plan;
  plan.offsets.assign(static_cast<size_t>(num_experts) + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (valid(pair)) ++plan.offsets[static_cast<size_t>(ids[static_cast<size_t>(pair)]) + 1];
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    int64_t& rows = plan.offsets[static_cast<size_t>(e) + 1];
    if (capacity >= 0) rows = std::min(rows, capacity);
    rows += plan.offsets[static_cast<size_t>(e)];
  }
  plan.pairs.resize(static_cast<size_t>(plan.offsets.back()));
  std::vector<int64_t> next(plan.offsets.begin(), plan.offsets.end() - 1);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (!valid(pair)) continue;
    const auto e = static_cast<size_t>(ids[static_cast<size_t>(pair)]);
    if (next[e] < plan.offsets[e + 1]) {
      plan.pairs[static_cast<size_t>(next[e]++)] = pair;
    } else if (dropped != nullptr) {
      dropped[pair] = 1;
    }
  }
  return plan;
}

std::vector<int64_t> pairs_without_row(const Plan& plan, int64_t num_pairs) {
  std::vector<uint8_t> planned(static_cast<size_t>(num_pairs), 0);
  for (const int64_t pair : plan.pairs) planned[static_cast<size_t>(pair)] = 1;
  std::vector<int64_t> rest;
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (!planned[static_cast<size_t>(pair)]) rest.push_back(pair);
  }
  return rest;
}

}  // namespace streammoe::cpu
