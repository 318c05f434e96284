// The consumer's side of a stream: wait for the chunks of a wave, copy their tokens in, run the experts, send rows
// to the tokens' owners. See stream.h for the contract.
//
// A wave waits for all sources of a chunk before it plans that chunk. A slot is acknowledged as soon as its rows are
// in the pool, before any expert runs, so a source may refill it while its tokens are computed. Every access to a
// peer's heap is made under PeerAccess, so that a failing rank's memory is never touched after it raised.
#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/stream.h"

namespace streammoe::cpu {

Status Stream::run_wave(int64_t wave) {
  const int64_t begin = spec_.wave_begin(wave);
  const int64_t end = spec_.wave_ends[static_cast<size_t>(wave)];
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    Span span(ring_->name(), group_, rank_, Phase::kDispatch, chunk);
    STREAMMOE_RETURN_IF_ERROR(fault(Phase::kDispatch));
    STREAMMOE_RETURN_IF_ERROR(admit(chunk));
  }
  const int64_t macro = spec_.macro_of(begin);
  const bool seal = spec_.macro_ends[static_cast<size_t>(macro)] == end;
  {
    Span span(ring_->name(), group_, rank_, Phase::kExperts, begin, end - 1);
    STREAMMOE_RETURN_IF_ERROR(fault(Phase::kExperts));
    if (spec_.capacity >= 0) drop_beyond_capacity();
    const bool everything = seal || !spec_.packed;
    STREAMMOE_RETURN_IF_ERROR(compute(everything, everything ? 1 : spec_.min_carry_rows));
  }
  return seal ? seal_macro(macro) : Status();
}

// Copies one chunk of every rank into the pool and acknowledges the slots.
Status Stream::admit(int64_t chunk) {
  const uint64_t q = chunk_sequence(base_, chunk);
  const int64_t slot_idx = sequence_slot(q, shape_.num_slots);
  for (int64_t i = 0; i < shape_.num_ranks; ++i) {
    const int64_t peer = (rank_ + i) % shape_.num_ranks;  // start with the own slot: ranks spread over the sources
    // Acquire of both words: the peer's descriptors and payload, written before its release stores, are visible.
    for (const int64_t table : {at_.route_ready, at_.layout_ready}) {
      const int64_t offset = at_.word(table, peer, slot_idx, shape_.num_slots);
      STREAMMOE_RETURN_IF_ERROR(wait(word(rank_, offset), q, Phase::kDispatch, peer, slot_idx));
    }
    const uint8_t* slot = heap(peer) + at_.slot(slot_idx);
    SlotDescriptor route, layout;
    {
      PeerAccess access(*ring_);
      if (!access.allowed()) return ring_failed();
      std::memcpy(&route, slot + at_.slot_route_descriptor, sizeof(route));
      std::memcpy(&layout, slot + at_.slot_layout_descriptor, sizeof(layout));
    }
    Status status = check_descriptor(peer, chunk, route, "routing");
    if (status.ok()) status = check_descriptor(peer, chunk, layout, "layout");
    if (!status.ok()) return fail(status, true);
    STREAMMOE_RETURN_IF_ERROR(make_room(slot, route.num_tokens));
    PeerAccess access(*ring_);
    if (!access.allowed()) return ring_failed();
    copy_in(peer, slot, route);
    // Release: all reads of the slot are complete; the owner acquires this word before it writes the slot again.
    store_release(word(peer, at_.word(at_.consumed, rank_, slot_idx, shape_.num_slots)), q);
  }
  return {};
}

Status Stream::check_descriptor(int64_t peer, int64_t chunk, const SlotDescriptor& seen, const char* half) const {
  const SlotDescriptor wanted{chunk_sequence(base_, chunk), call_, tag_, chunk, 0, 0};
  const auto [start, stop] = spec_.chunk_bounds(chunk);
  if (seen.sequence == wanted.sequence && seen.call == wanted.call && seen.tag == wanted.tag && seen.chunk == chunk &&
      seen.num_tokens == stop - start) {
    return {};
  }
  return error(Code::kFailedPrecondition, "ring '", ring_->name(), "': rank ", rank_, " and rank ", peer,
               " disagree about the ", half, " of chunk ", chunk, ": (sequence, call, chunk, plan) wanted (",
               wanted.sequence, ", ", wanted.call, ", ", wanted.chunk, ", ", wanted.tag, "), got (", seen.sequence,
               ", ", seen.call, ", ", seen.chunk, ", ", seen.tag,
               "); all ranks must run the same calls on the ring, in the same order");
}

// The admission rule: when the tokens of a slot do not fit behind the carried ones, the carried rows are computed in
// partial blocks first. A pool of R * C tokens can therefore never block the stream.
Status Stream::make_room(const uint8_t* slot, int64_t num_tokens) {
  if (pool_used_ + num_tokens <= shape_.pool_tokens) return {};
  int64_t needed = 0;
  {
    PeerAccess access(*ring_);
    if (!access.allowed()) return ring_failed();
    const auto* ids = reinterpret_cast<const int32_t*>(slot + at_.slot_topk_ids);
    const int64_t first = rank_ * spec_.problem.num_experts;
    for (int64_t token = 0; token < num_tokens; ++token) {
      needed += std::any_of(ids + token * shape_.top_k, ids + (token + 1) * shape_.top_k,
                            [&](int32_t id) { return id >= first && id < first + spec_.problem.num_experts; });
    }
  }
  return pool_used_ + needed <= shape_.pool_tokens ? Status() : compute(true, 1);
}

void Stream::copy_in(int64_t peer, const uint8_t* slot, const SlotDescriptor& descriptor) {
  const auto* ids = reinterpret_cast<const int32_t*>(slot + at_.slot_topk_ids);
  const int64_t first = rank_ * spec_.problem.num_experts;
  const int64_t row_bytes = shape_.hidden * shape_.itemsize;
  for (int64_t token = 0; token < descriptor.num_tokens; ++token) {
    bool copied = false;
    for (int64_t k = 0; k < shape_.top_k; ++k) {
      const int64_t expert = ids[token * shape_.top_k + k] - first;
      if (expert < 0 || expert >= spec_.problem.num_experts) continue;
      if (!copied) {  // once per token, however many of its routes are ours
        std::memcpy(heap(rank_) + at_.token_pool + pool_used_ * row_bytes, slot + at_.slot_x + token * row_bytes,
                    static_cast<size_t>(row_bytes));
        copied = true;
      }
      pending_.push_back({expert, pool_used_, peer, (descriptor.token_base + token) * shape_.top_k + k});
      ++stats_.expert_rows[static_cast<size_t>(expert)];
    }
    pool_used_ += copied;
  }
}

// Keeps the `capacity` lowest (rank, token, k) routes of every expert and tells the owners which were dropped.
void Stream::drop_beyond_capacity() {
  std::sort(pending_.begin(), pending_.end(), [](const PendingRow& a, const PendingRow& b) {
    return std::tie(a.expert, a.peer, a.pair_idx) < std::tie(b.expert, b.peer, b.pair_idx);
  });
  PeerAccess access(*ring_);
  if (!access.allowed()) return;  // the next access reports it
  std::vector<PendingRow> kept;
  std::fill(stats_.expert_rows.begin(), stats_.expert_rows.end(), 0);
  for (const PendingRow& row : pending_) {
    int32_t& rows = stats_.expert_rows[static_cast<size_t>(row.expert)];
    const bool dropped = rows >= spec_.capacity;
    heap(row.peer)[at_.combine_flags + row.pair_idx] = dropped;
    if (dropped) continue;
    ++rows;
    kept.push_back(row);
  }
  pending_ = std::move(kept);
}

// Computes pending rows in blocks of block_m rows, expert by expert, and stores them at the tokens' owners. Without
// `partial_blocks` only full blocks run, of experts with at least `min_rows` pending; the rest is carried.
Status Stream::compute(bool partial_blocks, int64_t min_rows) {
  const int64_t block_m = spec_.problem.block_m;
  std::stable_sort(pending_.begin(), pending_.end(),
                   [](const PendingRow& a, const PendingRow& b) { return a.expert < b.expert; });
  PeerAccess access(*ring_);
  if (!access.allowed()) return ring_failed();
  const int64_t row_bytes = shape_.hidden * shape_.itemsize;
  std::vector<RowTask> tasks;
  std::vector<ExpertBlock> blocks;
  std::vector<PendingRow> carried;
  for (size_t at = 0; at < pending_.size();) {
    const int64_t expert = pending_[at].expert;
    size_t end = at;
    while (end < pending_.size() && pending_[end].expert == expert) ++end;
    const auto rows = static_cast<int64_t>(end - at);
    const int64_t run = rows < min_rows ? 0 : partial_blocks ? rows : rows / block_m * block_m;
    for (int64_t i = 0; i < run; ++i) {
      const PendingRow& row = pending_[at + static_cast<size_t>(i)];
      if (i % block_m == 0) {
        blocks.push_back({expert, static_cast<int64_t>(tasks.size()), std::min(block_m, run - i)});
      }
      tasks.push_back({heap(rank_) + at_.token_pool + row.pool_row * row_bytes,
                       heap(row.peer) + at_.combine_rows + row.pair_idx * row_bytes});
    }
    carried.insert(carried.end(), pending_.begin() + static_cast<std::ptrdiff_t>(at) + run,
                   pending_.begin() + static_cast<std::ptrdiff_t>(end));
    at = end;
  }
  run_expert_blocks(spec_.problem, weights_, blocks, tasks.data());
  pending_ = std::move(carried);
  if (pending_.empty()) pool_used_ = 0;
  return {};
}

// Tells every rank that this one has read and written all it will of the macro-chunk, and waits for the others. The
// release stores publish the rows written above; each owner acquires all of them before it combines.
Status Stream::seal_macro(int64_t macro) {
  Span span(ring_->name(), group_, rank_, Phase::kDone, spec_.macro_begin(macro),
            spec_.macro_ends[static_cast<size_t>(macro)] - 1);
  STREAMMOE_RETURN_IF_ERROR(fault(Phase::kDone));
  const uint64_t number = macro_base_ + static_cast<uint64_t>(macro) + 1;
  {
    PeerAccess access(*ring_);
    if (!access.allowed()) return ring_failed();
    for (int64_t peer = 0; peer < shape_.num_ranks; ++peer)
      store_release(word(peer, at_.word(at_.done, rank_, 0, 1)), number);
  }
  for (int64_t peer = 0; peer < shape_.num_ranks; ++peer) {
    STREAMMOE_RETURN_IF_ERROR(wait(word(rank_, at_.word(at_.done, peer, 0, 1)), number, Phase::kDone, peer, 0));
  }
  return {};
}

}  // namespace streammoe::cpu
