// Bookkeeping of publications. See publications.h for the contract.
#include "host/publications.h"

#include <algorithm>

namespace streammoe {

void Publications::reset(const CallSpec& spec) {
  routes_.assign(static_cast<size_t>(spec.num_chunks), 0);
  layouts_.assign(static_cast<size_t>(spec.num_chunks), 0);
  waves_enqueued_ = 0;
}

Status Publications::check(const CallSpec& spec, Phase phase, int64_t chunk, int64_t num_slots) const {
  if (chunk < 0 || chunk >= spec.num_chunks) {
    return error(Code::kInvalidArgument, phase_name(phase), ": chunk must be in 0..", spec.num_chunks - 1, ", got ",
                 chunk);
  }
  if (half(phase)[static_cast<size_t>(chunk)]) {
    return error(Code::kInvalidArgument, phase_name(phase), ": chunk ", chunk, " is published already");
  }
  if (const int64_t macro = spec.macro_of(chunk); macro > 0) {
    const int64_t before = spec.macro_ends[static_cast<size_t>(macro - 1)];
    if (waves_enqueued_ <= spec.wave_of(before - 1)) {
      return error(Code::kFailedPrecondition, "a chunk of macro-chunk ", macro, " is published before all chunks of ",
                   "macro-chunk ", macro - 1, ": publish chunks 0..", before - 1, " first");
    }
  }
  // Only a wave that is enqueued can free the slot; waiting for a later one would be waiting for ourselves.
  if (chunk >= num_slots) {
    const int64_t wave = spec.wave_of(chunk - num_slots);
    if (wave >= waves_enqueued_) {
      return error(Code::kFailedPrecondition, phase_name(phase), ": chunk ", chunk, " reuses the slot of chunk ",
                   chunk - num_slots, " in a ring of ", num_slots, " slots, whose wave ends with chunk ",
                   spec.wave_ends[static_cast<size_t>(wave)] - 1, "; publish the chunks up to it first");
    }
  }
  return {};
}

std::optional<int64_t> Publications::next_wave(const CallSpec& spec) {
  if (waves_enqueued_ == static_cast<int64_t>(spec.wave_ends.size())) return std::nullopt;
  const int64_t begin = spec.wave_begin(waves_enqueued_);
  for (int64_t chunk = begin; chunk < spec.wave_ends[static_cast<size_t>(waves_enqueued_)]; ++chunk) {
    const auto c = static_cast<size_t>(chunk);
    if (!routes_[c] || !layouts_[c]) return std::nullopt;
  }
  return waves_enqueued_++;
}

int64_t Publications::first_missing(Phase phase) const {
  const auto& published = half(phase);
  return std::find(published.begin(), published.end(), uint8_t{0}) - published.begin();
}

Status Publications::complete(const CallSpec& spec) const {
  if (waves_enqueued_ == static_cast<int64_t>(spec.wave_ends.size())) return {};
  return error(Code::kFailedPrecondition, "close_stream: not all of ", spec.num_chunks,
               " chunks were published; the first wave that misses one ends with chunk ",
               spec.wave_ends[static_cast<size_t>(waves_enqueued_)] - 1);
}

}  // namespace streammoe
