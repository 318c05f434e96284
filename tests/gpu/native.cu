// Kernels that the tests need and the library must not have: one that keeps SMs busy, and some that are wrong.
//
// Contract: plain C functions, called from native.py; all return a cudaError_t but num_sms and spin_running. A spinner
// fills each of its SMs, so that no other kernel of any size gets in, and ends when it is told to, or after its own
// limit: a test that would hang fails instead. The wrong kernels lie in the namespace of the library, because
// sanitizers are asked to look at nothing else; each is wrong in the one way that one tool must see.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kMaxBlocks = 1024;
constexpr int kSharedBytes = 200 * 1024;  // of 227 KB: no room for a CTA of a product beside it

struct Flags {
  uint32_t stop;
  uint32_t started[kMaxBlocks];  // a word per block, so that no atomic crosses the bus
};

Flags* flags = nullptr;  // pinned, seen from both sides
cudaStream_t stream = nullptr;

__device__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__global__ void spin(volatile Flags* f, uint64_t limit_ns) {
  const uint64_t deadline = now_ns() + limit_ns;
  f->started[blockIdx.x] = 1;
  __threadfence_system();  // publishes `started` to the host, which waits for it
  while (f->stop == 0 && now_ns() < deadline) {
  }
}

}  // namespace

namespace streammoe::wrong {

__global__ void reads(const uint8_t* at, uint8_t* out) { *out = *at; }

// Two warps exchange values without a barrier.
__global__ void races(int* out) {
  __shared__ volatile int values[64];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = values[63 - threadIdx.x];
}

// All lanes of a warp come to a barrier that is for half of them.
__global__ void syncs(int* out) {
  __shared__ volatile int values[32];
  const uint32_t mask = __ballot_sync(0xffffffffu, threadIdx.x < 16);
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncwarp(mask);
  out[threadIdx.x] = values[31 - threadIdx.x];
}

}  // namespace streammoe::wrong

extern "C" {

int num_sms() {
  int sms = 0;
  return cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess ? sms : -1;
}

// Starts `blocks` blocks, one per SM, on a stream of their own and returns when all of them run.
int spin_start(int blocks, double limit_s) {
  if (blocks < 1 || blocks > kMaxBlocks) return cudaErrorInvalidValue;
  if (flags == nullptr) {
    if (cudaError_t e = cudaHostAlloc(reinterpret_cast<void**>(&flags), sizeof(Flags), cudaHostAllocMapped)) return e;
    if (cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return e;
    if (cudaError_t e = cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes)) return e;
  }
  *flags = {};
  volatile Flags* seen = flags;
  spin<<<blocks, 32, kSharedBytes, stream>>>(seen, static_cast<uint64_t>(limit_s * 1e9));
  if (cudaError_t e = cudaGetLastError()) return e;
  for (int b = 0; b < blocks; ++b) {
    while (seen->started[b] == 0) {
      if (cudaStreamQuery(stream) != cudaErrorNotReady) return cudaErrorLaunchFailure;
    }
  }
  return cudaSuccess;
}

// 1 while the spinner runs, 0 when it has ended.
int spin_running() { return cudaStreamQuery(stream) == cudaErrorNotReady; }

int spin_stop() {
  *reinterpret_cast<volatile uint32_t*>(&flags->stop) = 1;
  return cudaStreamSynchronize(stream);
}

// Reads the byte at an address of the caller's.
int wrong_read(const void* at) {
  uint8_t* out = nullptr;
  if (cudaError_t e = cudaMalloc(&out, 1)) return e;
  streammoe::wrong::reads<<<1, 1>>>(static_cast<const uint8_t*>(at), out);
  return cudaDeviceSynchronize();
}

// Reads behind the end of memory that it allocates.
int wrong_memory() {
  uint8_t* data = nullptr;
  if (cudaError_t e = cudaMalloc(&data, 100)) return e;
  return wrong_read(data + 120);
}

int wrong_race() {
  int* out = nullptr;
  if (cudaError_t e = cudaMalloc(&out, 64 * sizeof(int))) return e;
  streammoe::wrong::races<<<1, 64>>>(out);
  return cudaDeviceSynchronize();
}

int wrong_sync() {
  int* out = nullptr;
  if (cudaError_t e = cudaMalloc(&out, 32 * sizeof(int))) return e;
  streammoe::wrong::syncs<<<1, 32>>>(out);
  return cudaDeviceSynchronize();
}

}  // extern "C"
