// GPU memory between the processes of one host: a ring's memory handed out as a file descriptor, and a peer's mapped.
//
// Contract: XLA's memory consists of allocations of CUDA's virtual memory management. export_rank() opens a descriptor
// for the one that holds a rank's ring; import_rank() maps a descriptor that came from another process for the GPUs of
// this one, and tells the ring where the peer lies. Either descriptor may be closed afterwards. A mapping ends with the
// ring, after all work of those GPUs; the memory behind it lives as long as anybody maps it, its owner's death
// included. Driver functions are looked up at run time, so that nothing links against libcuda. Trade-off: an allocation
// is mapped whole, as a rule XLA's whole pool: milliseconds and address space, no memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "host/registry.h"
#include "host/status.h"

namespace streammoe::cuda {

// What another process needs to map a rank's ring.
struct ExportedMemory {
  int fd = -1;         // of the allocation; whoever asked for it closes it
  int64_t bytes = 0;   // of the allocation
  int64_t offset = 0;  // of the ring in it
};

// An allocation of another process, mapped into this one.
class PeerMemory {
 public:
  // `devices`: GPUs of this process that may read and write it.
  static Status map(int fd, int64_t bytes, const std::vector<int>& devices, std::shared_ptr<PeerMemory>* out);
  PeerMemory() = default;
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  // Waits for the devices; if they cannot be waited for, the mapping is left to the process.
  ~PeerMemory();
  uint8_t* data() const { return reinterpret_cast<uint8_t*>(address_); }

 private:
  uint64_t address_ = 0;  // of reserved address space, 0: none
  size_t bytes_ = 0;
  bool mapped_ = false;
  std::vector<int> devices_;
};

// A rank of this process, whose memory is registered.
Status export_rank(const Ring& ring, int64_t group, int64_t rank, ExportedMemory* out);
// A rank of another process, in a group that has ranks of this one.
Status import_rank(Ring& ring, int64_t group, int64_t rank, int fd, int64_t bytes, int64_t offset);
// Refuses a ring with GPUs of this process in one group that do not reach each other's memory.
Status check_peers(const Ring& ring);
// Waits until this process's GPUs have done all they were given: no kernel of an earlier ring is on its way then.
Status settle(const Ring& ring);

}  // namespace streammoe::cuda
