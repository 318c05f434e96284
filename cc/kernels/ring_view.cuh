// A rank's ring as its kernels see it, and their grids.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/device_sms.h"
#include "kernels/stream.h"
#include "protocol/publish.cuh"

namespace streammoe::sm90 {

inline RingView view_of(const DeviceRing& ring) { return make_ring_view(ring.mem, ring.shape, ring.rank); }

// Where every rank's ring lies, [R].
__device__ __forceinline__ uint8_t* const* peers_of(const RingView& ring) {
  return reinterpret_cast<uint8_t* const*>(ring.mem + ring.at.peers);
}

// CTAs for `items` of work, each CTA taking `per_cta` at a time: never more than fill the machine.
inline uint32_t grid_for(int64_t items, int64_t per_cta) {
  int sms = 132;
  (void)device_sms(&sms);  // a launch that follows will say what is wrong
  return static_cast<uint32_t>(std::clamp<int64_t>((items + per_cta - 1) / per_cta, 1, 8 * int64_t{sms}));
}

}  // namespace streammoe::sm90
