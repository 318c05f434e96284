// What a kernel tells the host when a call fails on the device, without the host waiting for it.
//
// Contract: one record per rank in pinned host memory that the device can write. A kernel fills the fields and then
// stores `code` with release at system scope; the host looks at it at its next call on the ring, or in ring.check().
// The first failure of a ring stays. Trade-off: the failing call itself may return, with NaN from the macro-chunk of
// the failure on; its caller learns later.
#pragma once

#include <cstdint>

namespace streammoe {

enum class DeviceFailure : uint64_t {
  kNone = 0,
  kDeadline = 1,      // a word was not reached in time
  kAborted = 2,       // a peer failed
  kWrongChunk = 3,    // chunks under a traced index are published in order: wanted and seen are chunk indices
  kNotARing = 4,      // the memory does not hold a ring: it was overwritten
  kOtherProgram = 5,  // a descriptor of another call or plan: wanted and seen are tags
};

struct DeviceError {
  uint64_t code;  // DeviceFailure
  int64_t rank;
  int64_t peer;
  int64_t slot;
  int64_t phase;  // Phase of host/events.h
  uint64_t wanted;
  uint64_t seen;
};

}  // namespace streammoe
