// Checks of expert ids. See ids.h for the contract.
#include "cpu/ids.h"

namespace streammoe::cpu {
namespace {

bool is_expert(int32_t id, int64_t num_experts) { return id >= 0 && id < num_experts; }

}  // namespace

Status check_ids(std::span<const int32_t> ids, int64_t top_k, int64_t num_experts, int64_t first_token) {
  for (size_t n = 0; n < ids.size(); ++n) {
    if (ids[n] == -1 || is_expert(ids[n], num_experts)) continue;
    const auto pair = static_cast<int64_t>(n);
    return error(Code::kInvalidArgument, "topk_ids[", first_token + pair / top_k, ", ", pair % top_k, "] is ", ids[n],
                 ", outside -1..", num_experts - 1);
  }
  return {};
}

IdCounts sanitise_ids(std::span<const int32_t> ids, int64_t num_experts, int32_t* out) {
  IdCounts counts;
  for (size_t n = 0; n < ids.size(); ++n) {
    const bool valid = is_expert(ids[n], num_experts);
    counts.masked += ids[n] == -1;
    counts.invalid += !valid && ids[n] != -1;
    out[n] = valid ? ids[n] : -1;
  }
  return counts;
}

}  // namespace streammoe::cpu
