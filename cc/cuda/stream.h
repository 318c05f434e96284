// One rank's side of a streamed call on a GPU: the host half, which only enqueues.
//
// Contract: methods are called in the order open, publish_*, close, or backward between such calls, by XLA's thread of
// one device, with the CUDA stream that XLA gave to the handler; nothing here waits for the device, allocates, or reads
// device memory (but for attach, abort and read_control). Under `overlap` a wave runs on a side stream: it is enqueued
// behind its chunks' publications, runs while XLA's stream goes on to produce, and is joined before XLA's stream reads
// what it wrote. Every kernel waits only for kernels of a lower ticket (docs/protocol.md). Payload is copied in: a
// chunk's operands may be freed when the publishing call's kernels are done, in stream order; expert weights and `mem`
// must live from open to close.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "host/call.h"
#include "host/events.h"
#include "host/problem.h"
#include "host/publications.h"
#include "host/registry.h"
#include "host/status.h"
#include "kernels/backward.h"
#include "kernels/stream.h"

namespace streammoe::cuda {

class Stream : public RankStream {
 public:
  Stream(Ring* ring, int64_t group, int64_t rank);
  ~Stream() override;

  // Once, when the ring is registered: side stream, events, error record; zeroes the control region.
  Status attach(cudaStream_t stream);
  // Once, when all ranks are registered: tells the device where they lie.
  Status connect(cudaStream_t stream);
  Status open(const CallSpec& spec, const ExpertWeights& weights, cudaStream_t stream);
  // `chunk` is -1 when the program computes it: then it is the next one, which the kernel compares with the operand.
  // y is [T, H]; rows of completed macro-chunks are written to it before the next macro-chunk is published.
  Status publish_route(int64_t chunk, const int32_t* chunk_operand, const int32_t* ids, const float* weights, void* y,
                       cudaStream_t stream);
  Status publish_layout(int64_t chunk, const int32_t* chunk_operand, const void* x, void* y, cudaStream_t stream);
  // Both halves of the chunk were published by a kernel that is not ours, earlier in stream order.
  Status publish_external(int64_t chunk, cudaStream_t stream);
  Status close(const ExpertWeights& weights, void* y, int32_t* expert_rows, int32_t* counts, cudaStream_t stream);
  // Whether a backward of so many tokens may start: no stream is open, and the ring holds them.
  Status expect_backward(int64_t num_tokens) const;
  // The gradients of a call on a ring over ranks: as open, one publication of everything, and close. `args` are this
  // rank's operands and results, `gradients` the tensors that hold args.gradients; the workspace has backward_bytes()
  // for the tokens of all ranks, and behind them the weights of their routes.
  Status backward(const sm90::BackwardArgs& args, const sm90::HalfTensors& gradients, uint8_t* workspace,
                  cudaStream_t stream);
  // A call that used no slot: the ring's counters move past it.
  Status advance(const CallSpec& spec, cudaStream_t stream);

  const CallSpec& spec() const { return spec_; }
  // The chunk that a half published under a traced index must be.
  int64_t next_chunk(Phase phase) const { return published_.first_missing(phase); }

  bool is_open() const override { return open_; }
  void abort(const Status& why) override;
  void quiesce() override;
  void poll() override;
  Status read_control(std::vector<uint8_t>* out) const override;

 private:
  // Held while a handler enqueues; notes on XLA's stream how far it has come.
  class Enqueuing {
   public:
    Enqueuing(Stream& stream, cudaStream_t on) : stream_(stream), on_(on), lock_(stream.mutex_) {}
    ~Enqueuing();
    Status status() const;  // not ok once the ring has failed

   private:
    Stream& stream_;
    cudaStream_t on_;
    std::lock_guard<std::mutex> lock_;
  };

  void end();
  Status begin(Phase phase, int64_t chunk, void* y, cudaStream_t stream, bool* dropped);
  Status advance_waves(cudaStream_t stream);
  Status run_wave(int64_t wave, cudaStream_t stream);
  Status run_experts(int64_t wave, int64_t num_rows, bool beside_producer, cudaStream_t stream);
  Status publish_backward(const CallSpec& spec, const sm90::BackwardArgs& args, cudaStream_t stream);
  Status finish_macros(int64_t upto, void* y, cudaStream_t stream);
  Status join(cudaStream_t stream);
  std::string describe(const DeviceError& error) const;
  sm90::DeviceRing device_ring() const;
  uint8_t* mem() const { return ring_->base(group_, rank_); }

  Ring* const ring_;
  const int64_t group_, rank_;
  const RingLayout& at_;
  const RingShape& shape_;

  int device_ = -1;
  int32_t num_sms_ = 0;
  cudaStream_t side_ = nullptr;    // waves under `overlap`
  cudaStream_t urgent_ = nullptr;  // abort words, past whatever waits on the others
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
  cudaEvent_t last_ = nullptr;    // the last that was enqueued on XLA's stream, outside of captures
  DeviceError* error_ = nullptr;  // pinned; host and device address are the same

  std::mutex mutex_;
  std::atomic<bool> open_{false};
  CallSpec spec_;
  ExpertWeights weights_;
  Publications published_;
  int64_t macros_combined_ = 0;
  uint32_t resident_ctas_ =
      0;  // of the up products launched beside a producer so far, as the ring's header counts them
};

// What is to know of the call whose gradients these are: its layer, and all tokens of a rank as one chunk.
CallSpec backward_spec(const sm90::BackwardArgs& args);

}  // namespace streammoe::cuda
