// How a stream on a GPU ends when something failed, and what is known of it. See stream.h for the contract.
//
// A failure that the device finds stays on the device until somebody asks: poll() reads the pinned record. One that the
// host finds is told to the device by the abort words, and raised only when nothing that was enqueued here or on a peer
// of this process can touch memory any more.
#include <chrono>
#include <string>
#include <thread>

#include "cuda/status.h"
#include "cuda/stream.h"
#include "protocol/sequence.h"

namespace streammoe::cuda {

// What a handler holds while it enqueues. Whoever ends the ring takes it too: then nothing more is enqueued, and what
// was can be waited for.
Status Stream::Enqueuing::status() const {
  if (!stream_.ring_->failed()) return {};
  return error(Code::kFailedPrecondition, "ring '", stream_.ring_->name(), "' is unusable, make_ring again; it failed ",
               "with: ", stream_.ring_->failure());
}

Stream::Enqueuing::~Enqueuing() {
  if (stream_.shape_.num_ranks == 1) return;  // nobody else's memory is touched
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(on_, &capturing) != cudaSuccess || capturing != cudaStreamCaptureStatusNone) return;
  (void)cudaEventRecord(stream_.last_, on_);
}

// XLA frees the call's memory once the error is raised, and this rank's ring with it: nothing that was enqueued here or
// on a peer of this process may touch either then. Every wait ends at once, for the abort words are there first.
void Stream::abort(const Status& why) {
  ring_->fail(why.message());
  for (const auto& [group, rank] : ring_->local_ranks()) {
    if (group == group_) static_cast<Stream&>(*ring_->find_rank(group, rank)->stream).end();
  }
  for (const auto& [group, rank] : ring_->local_ranks()) {
    if (group == group_) static_cast<Stream&>(*ring_->find_rank(group, rank)->stream).quiesce();
  }
}

// After the ring has failed: no handler enqueues any more, and the device knows.
void Stream::end() {
  const std::lock_guard lock(mutex_);
  open_ = false;
  if (device_ < 0) return;
  int before = 0;
  (void)cudaGetDevice(&before);
  (void)cudaSetDevice(device_);
  (void)sm90::launch_abort(device_ring(), urgent_);
  (void)cudaSetDevice(before);
}

// Not for ever: what was enqueued may stand behind a collective of XLA's for which the failing rank will never come.
// The ring's deadline bounds the wait; the kernels themselves have ended or will, without sending a row.
void Stream::quiesce() {
  if (device_ < 0) return;
  end();
  const auto give_up = Clock::now() + std::chrono::duration<double>(ring_->timeout_s());
  const auto done = [&] {
    return cudaStreamQuery(urgent_) != cudaErrorNotReady && cudaStreamQuery(side_) != cudaErrorNotReady &&
           cudaEventQuery(last_) != cudaErrorNotReady;  // of XLA's stream
  };
  while (!done() && Clock::now() < give_up) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

void Stream::poll() {
  if (error_ == nullptr || load_acquire(&error_->code) == 0 || ring_->failed()) return;
  ring_->fail(describe(*error_));
}

std::string Stream::describe(const DeviceError& e) const {
  const char* phase = phase_name(static_cast<Phase>(e.phase));
  const auto text = [&](const auto&... parts) {
    return error(Code::kAborted, "ring '", ring_->name(), "': rank ", e.rank, parts...).message();
  };
  switch (static_cast<DeviceFailure>(e.code)) {
    case DeviceFailure::kDeadline:
      return text(
          " waited ", ring_->timeout_s(), " s for rank ", e.peer, " in phase ", phase, ", slot ", e.slot,
          ": sequence wanted ", e.wanted, ", seen ", e.seen,
          "; that rank died, stalls, or runs another program. The ring is unusable: make_ring again on all ranks");
    case DeviceFailure::kAborted:
      return text(" stopped in phase ", phase, " because rank ", e.peer, " failed");
    case DeviceFailure::kWrongChunk:
      return text(", ", phase, ": chunks under a traced index are published in order, each once: wanted chunk ",
                  e.wanted, ", got ", static_cast<int64_t>(e.seen));
    case DeviceFailure::kNotARing:
      return text(": the ring's memory does not hold a ring; it was overwritten, or restored from a checkpoint: call ",
                  "make_ring again");
    case DeviceFailure::kOtherProgram:
      return text(" and rank ", e.peer, " disagree about the plan of the call in slot ", e.slot, ": wanted ", e.wanted,
                  ", got ", e.seen, "; all ranks must run the same calls on the ring, in the same order");
    case DeviceFailure::kNone:
      break;
  }
  return text(" failed with code ", e.code);
}

Status Stream::read_control(std::vector<uint8_t>* out) const {
  if (device_ < 0) return error(Code::kFailedPrecondition, "ring '", ring_->name(), "' is not registered");
  int before = 0;
  STREAMMOE_CUDA(cudaGetDevice(&before), "inspect");
  STREAMMOE_CUDA(cudaSetDevice(device_), "inspect");
  out->resize(static_cast<size_t>(at_.slots));
  const cudaError_t result = cudaMemcpy(out->data(), mem(), out->size(), cudaMemcpyDeviceToHost);
  STREAMMOE_CUDA(cudaSetDevice(before), "inspect");
  return cuda_status(result, "inspect");
}

}  // namespace streammoe::cuda
