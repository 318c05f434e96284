// Where the down product's rows go when tokens belong to several ranks; host and device.
//
// Contract: pair p of the pool order is route k of token row p / K; its row goes to peers[rank] + offset, which is
// [T, K, width] at the token's owner. Without peers there is one matrix for all pairs. Trade-off: two divisions per row
// and tile instead of a table of destinations.
#pragma once

#include "protocol/descriptor.h"

namespace streammoe {

struct RowOwners {
  uint8_t* const* peers = nullptr;  // [R], in device memory: every rank's ring
  int64_t offset = 0;               // bytes
  TokenOrder order;
};

}  // namespace streammoe
