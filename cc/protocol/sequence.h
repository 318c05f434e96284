// Sequence words: how one rank publishes to another and how a reader waits, with a deadline and an abort.
//
// Contract: a word only grows. store_release publishes every write of this thread (and every write that
// happened before it) to whoever sees the value through load_acquire. wait_at_least ends in one of three ways:
// the value is there, a peer aborted, or the deadline passed; it never spins for ever. On the host the words are
// C++20 atomics, on the device system-scope acquire and release instructions; polling backs off so that many
// ranks can share few cores.
#pragma once

#include <cstdint>

#include "protocol/ring.h"

#if !defined(__CUDA_ARCH__)
#include <atomic>
#include <chrono>
#include <thread>
#endif

namespace streammoe {

STREAMMOE_HD inline uint64_t load_acquire(const uint64_t* word) {
#if defined(__CUDA_ARCH__)
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
#endif
}

STREAMMOE_HD inline void store_release(uint64_t* word, uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_release);
#endif
}

#if defined(__CUDACC__)
// For several words at once: one fence, which publishes what store_release would, then relaxed stores.
__device__ inline void fence_release() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
#endif

enum class WaitStatus : int32_t { kReached = 0, kAborted = 1, kDeadline = 2 };

struct WaitResult {
  WaitStatus status = WaitStatus::kReached;
  uint64_t seen = 0;  // last value of the word
  int64_t peer = -1;  // who aborted; -1 with kAborted: `failed` was set, by a rank of another group
};

// The abort words of one rank: one line per peer, non-zero once that peer has failed.
struct AbortWords {
  const uint8_t* lines = nullptr;
  int64_t num_ranks = 0;

  // Lowest peer that aborted, or -1. Acquire: the peer's error text was written before its abort word.
  STREAMMOE_HD int64_t first() const {
    for (int64_t r = 0; r < num_ranks; ++r) {
      if (load_acquire(reinterpret_cast<const uint64_t*>(lines + r * kLineBytes)) != 0) return r;
    }
    return -1;
  }
};

#if !defined(__CUDA_ARCH__)
using Clock = std::chrono::steady_clock;

// Waits for word >= wanted. Spins briefly, then yields, then sleeps 50 us a round: with more ranks than cores a
// pure spin starves the rank that is waited for.
inline WaitResult wait_at_least(const uint64_t* word, uint64_t wanted, AbortWords aborts, Clock::time_point deadline,
                                const std::atomic<bool>* failed = nullptr) {
  constexpr int kSpins = 64, kYields = 256;
  WaitResult result;
  for (int round = 0;; ++round) {
    result.seen = load_acquire(word);
    if (result.seen >= wanted) return result;
    if (round < kSpins) continue;
    result.peer = aborts.first();
    if (result.peer >= 0 || (failed != nullptr && failed->load(std::memory_order_acquire))) {
      result.status = WaitStatus::kAborted;
      return result;
    }
    if (Clock::now() >= deadline) {
      result.status = WaitStatus::kDeadline;
      return result;
    }
    if (round < kSpins + kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}
#endif

}  // namespace streammoe
