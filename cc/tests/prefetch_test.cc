// Which weights are prefetched and how many, as pure functions.
//
// Contract: a plain main() that prints every broken promise and exits with 1: each k step of each first tile at most
// once, first steps first, own steps where every cluster has a tile; bytes only where they can help and fit in L2.
// Trade-off: no GPU, so this says nothing about time.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "device/prefetch_order.h"
#include "host/heuristics.h"

namespace streammoe {
namespace {

int failures = 0;

void expect(bool condition, const char* what, int64_t a, int64_t b) {
  if (condition || ++failures > 20) return;
  std::printf("FAIL %s: %lld, %lld\n", what, static_cast<long long>(a), static_cast<long long>(b));
}

void check_order(uint32_t clusters, uint32_t tiles, uint32_t rounds) {
  const uint32_t steps = rounds * clusters / tiles + 1;
  std::vector<int> seen(tiles * steps, 0);
  uint32_t deepest = 0;
  for (uint32_t round = 0; round < rounds; ++round) {
    for (uint32_t cluster = 0; cluster < clusters; ++cluster) {
      const PrefetchStep step = prefetch_step(round, cluster, clusters, tiles);
      const bool inside = step.tile < tiles && step.k < steps;
      expect(inside, "a step lies outside of the first tiles", clusters, tiles);
      if (!inside) continue;
      expect(step.k >= deepest, "a later step comes before an earlier one", clusters, tiles);
      expect(tiles != clusters || (step.tile == cluster && step.k == round), "not the own step", clusters, tiles);
      deepest = std::max(deepest, step.k);
      ++seen[step.k * tiles + step.tile];
    }
  }
  for (size_t i = 0; i < seen.size(); ++i) {
    expect(seen[i] == (i < size_t{rounds} * clusters), "a step is left out or asked for twice", clusters, tiles);
  }
}

void check_bytes() {
  constexpr int64_t kL2 = int64_t{50} << 20;
  for (const int64_t experts : {1, 8, 32, 128, 256, 1024}) {
    int64_t before = 0;
    for (int64_t pairs = 1; pairs < 4 * kBlockM * experts; pairs += 1 + pairs / 7) {
      const int64_t up = up_prefetch_bytes(pairs, experts), down = down_prefetch_bytes(pairs, experts);
      const bool full_blocks = pairs >= kBlockM * experts;
      const bool guessed = !prefetch_by_ids(pairs) && pairs < 2 * experts;
      expect((up == 0) == (full_blocks || guessed), "bytes of the up product", pairs, experts);
      expect((down == 0) == full_blocks, "bytes of the down product", pairs, experts);
      expect(up >= 0 && down >= 0 && up + down <= kL2 * 3 / 4, "more than stays in L2", pairs, experts);
      expect(!full_blocks || before == 0 || up == 0, "bytes come back with more rows", pairs, experts);
      before = up;
    }
  }
  expect(up_prefetch_bytes(8, 128) > 0 && up_prefetch_bytes(512, 128) > 0, "decoding of qwen3-30b", 8, 512);
  expect(up_prefetch_bytes(8192 * 8, 128) == 0 && down_prefetch_bytes(8192 * 8, 128) == 0, "its prefill", 65536, 128);
}

}  // namespace
}  // namespace streammoe

int main() {
  for (const uint32_t clusters : {1u, 2u, 58u, 66u}) {
    for (const uint32_t tiles : {1u, 2u, 3u, 24u, 65u, 66u}) {
      for (const uint32_t rounds : {1u, 2u, 7u}) {
        if (tiles <= clusters) streammoe::check_order(clusters, tiles, rounds);
      }
    }
  }
  streammoe::check_bytes();
  std::printf(streammoe::failures == 0 ? "prefetch_test: ok\n" : "prefetch_test: %d failures\n", streammoe::failures);
  return streammoe::failures == 0 ? 0 : 1;
}
