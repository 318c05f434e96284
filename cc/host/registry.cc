// Ring registry. See registry.h for the contract.
#include "host/registry.h"

#include <algorithm>
#include <utility>

namespace streammoe {

Status RankStream::require_open(const std::string& ring_name, const char* what) const {
  if (is_open()) return {};
  return error(Code::kFailedPrecondition, "ring '", ring_name, "': ", what, " without open_stream");
}

Ring::Ring(std::string name, const RingShape& shape, int64_t num_groups, double timeout_s, StreamFactory make_stream)
    : name_(std::move(name)),
      shape_(shape),
      layout_(make_ring_layout(shape)),
      timeout_s_(timeout_s),
      make_stream_(std::move(make_stream)) {
  for (int64_t g = 0; g < num_groups; ++g) bases_.emplace_back(static_cast<size_t>(shape.num_ranks));
}

Ring::~Ring() {
  // After a failure a kernel of this process may still be on its way to a peer: what it reaches is left to the process.
  if (failed() && shape_.on_gpu() && !kept_.empty()) new std::vector<std::shared_ptr<void>>(std::move(kept_));
}

void Ring::add_member(int64_t ordinal, int64_t group, int64_t rank) {
  Member& member = members_[ordinal];
  member.ordinal = ordinal, member.group = group, member.rank = rank;
  member.stream = make_stream_(this, group, rank);
}

Member* Ring::find_member(int64_t ordinal) {
  const auto it = members_.find(ordinal);
  return it == members_.end() ? nullptr : &it->second;
}

const Member* Ring::find_rank(int64_t group, int64_t rank) const {
  for (const auto& [ordinal, member] : members_) {
    if (member.group == group && member.rank == rank) return &member;
  }
  return nullptr;
}

const RankStream* Ring::find_stream(int64_t group, int64_t rank) const {
  const Member* member = find_rank(group, rank);
  return member == nullptr ? nullptr : member->stream.get();
}

std::vector<std::pair<int64_t, int64_t>> Ring::local_ranks() const {
  std::vector<std::pair<int64_t, int64_t>> all;
  for (const auto& [ordinal, member] : members_) all.emplace_back(member.group, member.rank);
  return all;
}

uint8_t* Ring::base(int64_t group, int64_t rank) const {
  return bases_[static_cast<size_t>(group)][static_cast<size_t>(rank)].load(std::memory_order_acquire);
}

void Ring::set_base(int64_t group, int64_t rank, uint8_t* base) {
  bases_[static_cast<size_t>(group)][static_cast<size_t>(rank)].store(base, std::memory_order_release);
}

void Ring::attach(int64_t group, int64_t rank, uint8_t* base, std::shared_ptr<void> memory) {
  set_base(group, rank, base);
  std::lock_guard lock(mutex_);
  kept_.push_back(std::move(memory));
}

void Ring::keep(int64_t group, int64_t rank, std::shared_ptr<SharedMemory> memory) {
  shared_ = true;
  uint8_t* base = memory->data();
  attach(group, rank, base, std::move(memory));
}

void Ring::fail(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = reason;
  }
  failed_.store(true, std::memory_order_release);
  const std::unique_lock no_access_left(access_);
}

std::string Ring::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Ring::poll() {
  for (auto& [ordinal, member] : members_) member.stream->poll();
}

void Ring::quiesce() {
  for (auto& [ordinal, member] : members_) member.stream->quiesce();
}

bool Ring::in_use() const {
  return std::any_of(members_.begin(), members_.end(), [](const auto& m) { return m.second.stream->is_open(); });
}

namespace {

void retire(const std::shared_ptr<Ring>& ring, const char* how) {
  if (ring != nullptr && ring->in_use() && !ring->failed()) {
    ring->fail("it was " + std::string(how) + " while a call was running on it; wait for the call's results first");
    ring->quiesce();
  }
}

}  // namespace

Registry& Registry::get() {
  // Never destroyed: worker threads of a stalled ring may outlive main().
  static Registry* registry = new Registry;
  return *registry;
}

std::shared_ptr<Ring> Registry::create(const std::string& name, const RingShape& shape, int64_t num_groups,
                                       double timeout_s, Ring::StreamFactory make_stream) {
  auto ring = std::make_shared<Ring>(name, shape, num_groups, timeout_s, std::move(make_stream));
  std::shared_ptr<Ring> replaced;  // ends after the lock: its worker may still have to be joined
  {
    std::lock_guard lock(mutex_);
    replaced = std::exchange(rings_[name], ring);
  }
  retire(replaced, "made again");
  return ring;
}

std::shared_ptr<Ring> Registry::find(const std::string& name) const {
  std::lock_guard lock(mutex_);
  const auto it = rings_.find(name);
  return it == rings_.end() ? nullptr : it->second;
}

bool Registry::close(const std::string& name) {
  std::shared_ptr<Ring> closed;
  {
    std::lock_guard lock(mutex_);
    const auto it = rings_.find(name);
    if (it == rings_.end()) return false;
    closed = std::move(it->second);
    rings_.erase(it);
  }
  retire(closed, "closed");
  return true;
}

}  // namespace streammoe
