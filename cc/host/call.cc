// The plan of a call. See call.h for the contract.
#include "host/call.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

namespace streammoe {

uint64_t CallSpec::tag() const {
  uint64_t tag = mix_tag(0, kRingMagic);
  for (const int64_t value :
       {problem.num_experts, problem.hidden, problem.intermediate, problem.top_k, static_cast<int64_t>(problem.dtype),
        static_cast<int64_t>(problem.activation), static_cast<int64_t>(std::bit_cast<uint32_t>(problem.limit)),
        problem.block_m, num_tokens, chunk_tokens, macro_tokens, num_chunks, min_carry_rows, capacity,
        static_cast<int64_t>(packed), static_cast<int64_t>(backward)}) {
    tag = mix_tag(tag, static_cast<uint64_t>(value));
  }
  for (const int64_t end : macro_ends) tag = mix_tag(tag, static_cast<uint64_t>(end));
  for (const int64_t end : wave_ends) tag = mix_tag(tag, static_cast<uint64_t>(end));
  return tag;
}

Status CallSpec::check(const RingShape& shape) const {
  const auto refuse = [](const auto&... parts) {
    return error(Code::kInvalidArgument, "the plan of the call: ", parts...);
  };
  const int64_t ring_tokens = shape.num_slots * shape.chunk_tokens;
  if (num_tokens < 0 || macro_tokens > ring_tokens || macro_tokens < std::min<int64_t>(num_tokens, 1)) {
    return refuse("macro_tokens must be at most num_slots * chunk_tokens = ", ring_tokens, " and at least 1, got ",
                  macro_tokens, " for ", num_tokens, " tokens");
  }
  if (chunk_tokens < 1 || chunk_tokens > shape.most_chunk_tokens()) {
    return refuse("chunk_tokens must be in 1..", shape.most_chunk_tokens(), ", got ", chunk_tokens);
  }
  const auto ascends = [&](const std::vector<int64_t>& ends) {
    return num_chunks > 0 && !ends.empty() && ends.front() > 0 && ends.back() == num_chunks &&
           std::adjacent_find(ends.begin(), ends.end(), std::greater_equal<>()) == ends.end();
  };
  if (!ascends(macro_ends) || !ascends(wave_ends) ||
      !std::includes(wave_ends.begin(), wave_ends.end(), macro_ends.begin(), macro_ends.end())) {
    return refuse("macro_ends and wave_ends must ascend to num_chunks = ", num_chunks,
                  ", and every macro end must be a wave end");
  }
  for (size_t m = 1; m + 1 < macro_ends.size(); ++m) {
    if (macro_ends[m] - macro_ends[m - 1] != macro_ends.front()) {
      return refuse("all macro-chunks but the last must have as many chunks as the first, ", macro_ends.front());
    }
  }
  if (macro_ends.back() - (macro_ends.size() > 1 ? macro_ends[macro_ends.size() - 2] : 0) > macro_ends.front()) {
    return refuse("the last macro-chunk must have at most as many chunks as the first, ", macro_ends.front());
  }
  int64_t first = 0, start = 0;  // chunk and token
  for (const int64_t end : macro_ends) {
    const int64_t tokens = std::min(macro_tokens, num_tokens - start);
    if (tokens < std::min<int64_t>(num_tokens, 1) || (end - first) * chunk_tokens < tokens) break;
    first = end, start += tokens;
  }
  if (first != num_chunks || start != num_tokens) {
    return refuse("its chunks hold ", start, " of ", num_tokens, " tokens");
  }
  const int64_t max_experts = std::numeric_limits<int32_t>::max() / shape.num_ranks;
  if (problem.num_experts < 1 || problem.num_experts > max_experts) {
    return refuse("num_experts must be in 1..", max_experts, " per rank, got ", problem.num_experts);
  }
  return {};
}

int64_t CallSpec::macro_of(int64_t chunk) const {
  return std::upper_bound(macro_ends.begin(), macro_ends.end(), chunk) - macro_ends.begin();
}

int64_t CallSpec::wave_of(int64_t chunk) const {
  return std::upper_bound(wave_ends.begin(), wave_ends.end(), chunk) - wave_ends.begin();
}

std::pair<int64_t, int64_t> CallSpec::chunk_bounds(int64_t chunk) const {
  const int64_t macro = macro_of(chunk);
  const int64_t first = macro_begin(macro);
  const int64_t stop_of_macro = std::min(num_tokens, (macro + 1) * macro_tokens);
  const int64_t start = std::min(macro * macro_tokens + (chunk - first) * chunk_tokens, stop_of_macro);
  return {start, std::min(start + chunk_tokens, stop_of_macro)};
}

}  // namespace streammoe
