// The rings of this process: who belongs to them, where every rank's heap lies, and whether they still work.
//
// Contract: a ring is created by name, collectively; a live name is replaced. Members of one group are the ranks
// that exchange tokens; a mesh with further axes has several groups. A member is found by the device ordinal it
// was registered with, never by arithmetic on ordinals. A ring that failed is terminal: it keeps its text and
// refuses every call until a ring of that name is created again. Handlers hold a shared_ptr, so replacing a ring
// never frees memory under a running call.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "host/shared_memory.h"
#include "host/status.h"
#include "protocol/ring.h"

namespace streammoe {

// One rank's side of the protocol, on whatever device it runs.
class RankStream {
 public:
  virtual ~RankStream() = default;
  virtual bool is_open() const = 0;
  // FailedPrecondition unless a stream is open; `what` is the call that needs it.
  Status require_open(const std::string& ring_name, const char* what) const;
  // After an error: makes the ring terminal, tells the peers, and returns once nothing of the call touches memory.
  virtual void abort(const Status& why) = 0;
  // After the ring has failed: returns once nothing that this rank enqueued touches memory any more.
  virtual void quiesce() {}
  // Notes a failure that only the device knows of so far.
  virtual void poll() {}
  // Copies the control region, the first layout().slots bytes of the rank's heap.
  virtual Status read_control(std::vector<uint8_t>* out) const = 0;
};

struct Member {
  int64_t ordinal = 0;  // XLA's device ordinal
  int64_t group = 0;
  int64_t rank = 0;
  const void* registered = nullptr;  // address of the `mem` leaf, set by the registering call
  std::shared_ptr<RankStream> stream;
};

class Ring {
 public:
  // Makes the stream of a rank: what tells a ring on CPUs from one on GPUs.
  using StreamFactory = std::function<std::shared_ptr<RankStream>(Ring* ring, int64_t group, int64_t rank)>;
  Ring(std::string name, const RingShape& shape, int64_t num_groups, double timeout_s, StreamFactory make_stream);
  ~Ring();

  const std::string& name() const { return name_; }
  const RingShape& shape() const { return shape_; }
  const RingLayout& layout() const { return layout_; }
  double timeout_s() const { return timeout_s_; }

  void add_member(int64_t ordinal, int64_t group, int64_t rank);
  Member* find_member(int64_t ordinal);
  const Member* find_rank(int64_t group, int64_t rank) const;        // nullptr when the rank is not of this process
  const RankStream* find_stream(int64_t group, int64_t rank) const;  // likewise
  std::vector<std::pair<int64_t, int64_t>> local_ranks() const;      // (group, rank), in device order
  // Heap of a rank of a group; nullptr until it registered or was attached.
  uint8_t* base(int64_t group, int64_t rank) const;
  void set_base(int64_t group, int64_t rank, uint8_t* base);
  // A rank's heap in memory that the library holds until the ring ends.
  void attach(int64_t group, int64_t rank, uint8_t* base, std::shared_ptr<void> memory);
  // The same for POSIX shared memory: then the `mem` leaves are handles.
  void keep(int64_t group, int64_t rank, std::shared_ptr<SharedMemory> memory);
  bool shared() const { return shared_; }
  int64_t num_groups() const { return static_cast<int64_t>(bases_.size()); }

  // Makes the ring terminal; the first reason wins. Returns once no thread of this process touches a peer's heap,
  // so that XLA may free the memory of the rank that raises.
  void fail(const std::string& reason);
  std::string failure() const;  // empty while the ring works
  // Asks the devices of this process for failures that the host has not heard of.
  void poll();
  // After fail(): returns once no rank of this process touches the memory of a call any more.
  void quiesce();
  // Whether a stream is open on a rank of this process.
  bool in_use() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  const std::atomic<bool>* failed_flag() const { return &failed_; }

 private:
  const std::string name_;
  const RingShape shape_;
  const RingLayout layout_;
  const double timeout_s_;
  const StreamFactory make_stream_;
  bool shared_ = false;                      // the heap is POSIX shared memory, the `mem` leaf only a handle
  std::vector<std::shared_ptr<void>> kept_;  // before the members, whose streams end while it is there
  std::map<int64_t, Member> members_;
  std::vector<std::vector<std::atomic<uint8_t*>>> bases_;
  mutable std::mutex mutex_;
  std::string failure_;
  std::atomic<bool> failed_{false};
  friend class PeerAccess;
  std::shared_mutex access_;
};

// Held while a thread reads or writes a peer's heap. Not allowed once the ring has failed.
class PeerAccess {
 public:
  explicit PeerAccess(Ring& ring) : lock_(ring.access_), allowed_(!ring.failed()) {}
  bool allowed() const { return allowed_; }

 private:
  std::shared_lock<std::shared_mutex> lock_;
  bool allowed_;
};

class Registry {
 public:
  static Registry& get();
  std::shared_ptr<Ring> create(const std::string& name, const RingShape& shape, int64_t num_groups, double timeout_s,
                               Ring::StreamFactory make_stream);
  std::shared_ptr<Ring> find(const std::string& name) const;
  // Forgets a ring. Calls that are running on it end with an error instead of waiting for ranks that find no ring.
  bool close(const std::string& name);

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Ring>> rings_;
};

}  // namespace streammoe
