// Where tokens lie in the pool of a GPU: TokenOrder is a bijection without holes, it never moves a token when more are
// published, and the host's plan (CallSpec), the device's view of it (CallState) and it agree on every chunk.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "host/call.h"
#include "protocol/descriptor.h"

namespace streammoe {
namespace {

int failures = 0;

#define EXPECT(condition, ...)                                    \
  do {                                                            \
    if (!(condition)) {                                           \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
      if (++failures > 20) std::exit(1);                          \
    }                                                             \
  } while (false)

// A plan as jax_streammoe/waves.py makes them: equal chunk counts per macro-chunk, the last one perhaps with fewer.
CallSpec plan(int64_t num_tokens, int64_t chunk_tokens, int64_t macro_tokens) {
  CallSpec spec;
  spec.num_tokens = num_tokens, spec.chunk_tokens = chunk_tokens, spec.macro_tokens = macro_tokens;
  for (int64_t start = 0; start < num_tokens; start += macro_tokens) {
    const int64_t tokens = std::min(macro_tokens, num_tokens - start);
    spec.num_chunks += (tokens + chunk_tokens - 1) / chunk_tokens;
    spec.macro_ends.push_back(spec.num_chunks);
  }
  spec.wave_ends = spec.macro_ends;
  return spec;
}

CallState state_of(const CallSpec& spec) {
  CallState state = {};
  state.num_tokens = spec.num_tokens, state.chunk_tokens = spec.chunk_tokens, state.macro_tokens = spec.macro_tokens;
  state.chunks_per_macro = spec.macro_ends.front();
  return state;
}

void check(const CallSpec& spec, int32_t ranks) {
  const CallState state = state_of(spec);
  for (int64_t chunk = 0; chunk < spec.num_chunks; ++chunk) {
    const auto [start, stop] = spec.chunk_bounds(chunk);
    const int64_t macro = spec.macro_of(chunk), base = start - macro * spec.macro_tokens;
    EXPECT(state.chunk_base(chunk) == base && state.chunk_size(chunk) == stop - start, "chunk %ld",
           static_cast<long>(chunk));
    const TokenOrder order = spec.token_order(ranks, macro);
    for (int32_t rank = 0; rank < ranks; ++rank) {
      // What publish.cuh's slot_of computes.
      const int64_t first = state.chunk_base(chunk) * ranks + rank * state.chunk_size(chunk);
      EXPECT(order.row(rank, static_cast<int32_t>(base)) == first, "chunk %ld rank %d", static_cast<long>(chunk), rank);
    }
  }
  for (size_t macro = 0; macro < spec.macro_ends.size(); ++macro) {
    const TokenOrder order = spec.token_order(ranks, static_cast<int64_t>(macro));
    std::vector<uint8_t> seen(static_cast<size_t>(order.num_tokens) * static_cast<size_t>(ranks), 0);
    for (int32_t rank = 0; rank < ranks; ++rank) {
      for (int32_t token = 0; token < order.num_tokens; ++token) {
        const int32_t row = order.row(rank, token);
        EXPECT(row >= 0 && row < static_cast<int32_t>(seen.size()) && !seen[static_cast<size_t>(row)], "row %d", row);
        seen[static_cast<size_t>(row)] = 1;
        const TokenOrder::Owner owner = order.owner(row);
        EXPECT(owner.rank == rank && owner.token == token, "row %d is rank %d token %d", row, owner.rank, owner.token);
      }
    }
  }
}

}  // namespace
}  // namespace streammoe

int main() {
  using namespace streammoe;
  std::mt19937 random(1);
  const auto draw = [&](int64_t low, int64_t high) { return low + static_cast<int64_t>(random()) % (high - low + 1); };
  for (int n = 0; n < 3000; ++n) {
    const int64_t chunk_tokens = draw(1, 17), macro_tokens = chunk_tokens * draw(1, 6) + (n % 3 == 0 ? draw(0, 5) : 0);
    check(plan(draw(1, 3 * macro_tokens), chunk_tokens, macro_tokens), static_cast<int32_t>(draw(1, 9)));
  }
  check(plan(100, 7, 40), 72);
  if (failures == 0) std::printf("token order: 3001 plans\n");
  return failures == 0 ? 0 : 1;
}
