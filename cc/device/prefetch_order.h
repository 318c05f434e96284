// Which weights a CTA pair of a grouped product asks for before it may begin; host and device.
//
// Contract: the tiles that the clusters compute first are 0 .. tiles - 1, at most one per cluster. Counted over rounds
// and clusters, all of them get their first k step before any gets its second, and no step is asked for twice: in round
// r a cluster that has a tile takes step r of it when every cluster has one, and clusters without a tile take later
// steps of the others'. Trade-off: who asks need not be who loads, so a prefetch may be for a neighbour; L2 is shared.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define STREAMMOE_HOST_DEVICE __host__ __device__
#else
#define STREAMMOE_HOST_DEVICE
#endif

namespace streammoe {

struct PrefetchStep {
  uint32_t tile, k;
};

// tiles: 1 .. clusters.
STREAMMOE_HOST_DEVICE inline PrefetchStep prefetch_step(uint32_t round, uint32_t cluster, uint32_t clusters,
                                                        uint32_t tiles) {
  const uint32_t index = round * clusters + cluster;
  return {index % tiles, index / tiles};
}

}  // namespace streammoe

#undef STREAMMOE_HOST_DEVICE
