// Which halves of which chunks a rank has published in a call, and which waves may therefore start.
//
// Contract: pure bookkeeping of the host, one object per rank and call. check() refuses what would wait for work that
// is not enqueued yet (docs/protocol.md, section 3): a chunk out of range or published twice, a chunk of a later
// macro-chunk before the earlier one is complete, a chunk whose slot belongs to a wave that is not enqueued. Waves come
// out of next_wave() in order, each once both halves of all its chunks are published.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "host/call.h"
#include "host/events.h"
#include "host/status.h"

namespace streammoe {

class Publications {
 public:
  void reset(const CallSpec& spec);
  // `phase` is kPublishRoute or kPublishLayout and names the half.
  Status check(const CallSpec& spec, Phase phase, int64_t chunk, int64_t num_slots) const;
  void mark(Phase phase, int64_t chunk) { half(phase)[static_cast<size_t>(chunk)] = 1; }
  // The next wave that may start, if its chunks are all published; it counts as enqueued from then on.
  std::optional<int64_t> next_wave(const CallSpec& spec);
  int64_t waves_enqueued() const { return waves_enqueued_; }
  // The lowest chunk of which that half is missing; num_chunks when there is none.
  int64_t first_missing(Phase phase) const;
  // FailedPrecondition while a chunk is missing.
  Status complete(const CallSpec& spec) const;

 private:
  std::vector<uint8_t>& half(Phase phase) { return phase == Phase::kPublishRoute ? routes_ : layouts_; }
  const std::vector<uint8_t>& half(Phase phase) const { return phase == Phase::kPublishRoute ? routes_ : layouts_; }

  std::vector<uint8_t> routes_, layouts_;
  int64_t waves_enqueued_ = 0;
};

}  // namespace streammoe
