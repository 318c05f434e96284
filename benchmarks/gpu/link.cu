// What NVLink gives a kernel: a pull and a push of rows between two GPUs of one process, on a given number of SMs.
//
// Contract: C functions for link.py; a status is a cudaError_t as int. link_open enables peer access and makes the
// buffers, link_run times, link_check copies once and counts wrong words. A copy is what fetch_chunks in
// cc/kernels/stream.cu does: a warp per row, 16-byte volatile accesses, 8 in flight per lane. Both kernels keep to SMs
// below `sms`: the grid fills the GPU, and CTAs elsewhere, or beyond `ctas` of an SM, leave at once.
// Trade-off: 8 loads in flight take 32 registers, so at most 4 CTAs of 256 threads fit an SM.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kGpus = 2, kThreads = 256, kWarps = kThreads / 32, kVectors = 8, kMaxCtas = 4, kMaxSms = 256;
constexpr uint64_t kHoldNs = 400'000;  // longer than the host takes to enqueue what follows
enum Kind { kPull, kPush, kCopy };

struct Gpu {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr, held = nullptr;
  uint8_t *from = nullptr, *to = nullptr;  // `sets` buffers of `bytes` each
  int* taken = nullptr;                    // CTAs that stay, by SM
  unsigned long long* wrong = nullptr;
  int sms = 0;
};

Gpu gpus[kGpus];
int64_t bytes = 0, row_bytes = 0;
int sets = 0;

__device__ __forceinline__ uint4 load_16(const uint8_t* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

// The value of 16-byte word `i` of a buffer: no two buffers hold the same.
__device__ __forceinline__ uint4 word(uint64_t seed, uint64_t i) {
  const uint64_t a = (i + seed) * 0x9e3779b97f4a7c15ull, b = (a ^ (a >> 29)) * 0xbf58476d1ce4e5b9ull;
  return make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b),
                    static_cast<uint32_t>(b >> 32));
}

__global__ void fill(uint8_t* to, uint64_t seed, int64_t words) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < words; i += gridDim.x * int64_t{kThreads}) {
    reinterpret_cast<uint4*>(to)[i] = word(seed, static_cast<uint64_t>(i));
  }
}

__global__ void count_wrong(const uint8_t* at, uint64_t seed, int64_t words, unsigned long long* wrong) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < words; i += gridDim.x * int64_t{kThreads}) {
    const uint4 want = word(seed, static_cast<uint64_t>(i)), got = reinterpret_cast<const uint4*>(at)[i];
    if (want.x != got.x || want.y != got.y || want.z != got.z || want.w != got.w) atomicAdd(wrong, 1ull);
  }
}

// Keeps the stream busy while the host enqueues the rest, so that both GPUs begin together.
__global__ void hold(uint64_t ns) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}

// Copies rows; either side may be the peer's. `taken` is zero before the launch.
__global__ void __launch_bounds__(kThreads, kMaxCtas)
    copy_rows(const uint8_t* from, uint8_t* to, int64_t rows, int64_t row_bytes, int sms, int ctas, int* taken) {
  __shared__ int place;
  if (threadIdx.x == 0) {
    uint32_t sm;
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    place = -1;
    if (static_cast<int>(sm) < sms) {
      const int n = atomicAdd(&taken[sm], 1);
      if (n < ctas) place = n * sms + static_cast<int>(sm);
    }
  }
  __syncthreads();
  if (place < 0) return;
  const int lane = threadIdx.x & 31;
  const int64_t stride = int64_t{sms} * ctas * kWarps;
  for (int64_t row = place * int64_t{kWarps} + (threadIdx.x >> 5); row < rows; row += stride) {
    const uint8_t* source = from + row * row_bytes;
    uint8_t* target = to + row * row_bytes;
    for (int64_t at = lane * 16; at < row_bytes; at += kVectors * 512) {
      uint4 data[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (at + v * 512 < row_bytes) data[v] = load_16(source + at + v * 512);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (at + v * 512 < row_bytes) *reinterpret_cast<uint4*>(target + at + v * 512) = data[v];
      }
    }
  }
}

cudaError_t open_gpu(int index) {
  Gpu& gpu = gpus[index];
  const size_t total = static_cast<size_t>(bytes) * static_cast<size_t>(sets);
  cudaError_t status = cudaSetDevice(index);
  if (status == cudaSuccess) status = cudaDeviceEnablePeerAccess(1 - index, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError(), status = cudaSuccess;
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&gpu.sms, cudaDevAttrMultiProcessorCount, index);
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking);
  if (status == cudaSuccess) status = cudaEventCreate(&gpu.begin);
  if (status == cudaSuccess) status = cudaEventCreate(&gpu.end);
  if (status == cudaSuccess) status = cudaEventCreateWithFlags(&gpu.held, cudaEventDisableTiming);
  if (status == cudaSuccess) status = cudaMalloc(reinterpret_cast<void**>(&gpu.from), total);
  if (status == cudaSuccess) status = cudaMalloc(reinterpret_cast<void**>(&gpu.to), total);
  if (status == cudaSuccess) status = cudaMalloc(reinterpret_cast<void**>(&gpu.taken), kMaxSms * sizeof(int));
  if (status == cudaSuccess) status = cudaMalloc(reinterpret_cast<void**>(&gpu.wrong), sizeof(*gpu.wrong));
  if (status != cudaSuccess) return status;
  for (int set = 0; set < sets; ++set) {
    fill<<<1024, kThreads, 0, gpu.stream>>>(gpu.from + set * bytes, static_cast<uint64_t>(index * sets + set) << 40,
                                            bytes / 16);
  }
  status = cudaGetLastError();
  return status == cudaSuccess ? cudaStreamSynchronize(gpu.stream) : status;
}

// Whose buffers a copy that runs on `index` reads and writes: a push sends its own to the peer, the others fetch.
int source_of(int kind, int index) { return kind == kPush ? index : 1 - index; }

cudaError_t launch(int kind, int index, int set, int sms, int ctas) {
  Gpu& gpu = gpus[index];
  const int source = source_of(kind, index);
  const uint8_t* from = gpus[source].from + set * bytes;
  uint8_t* to = gpus[1 - source].to + set * bytes;
  if (kind == kCopy) {
    return cudaMemcpyPeerAsync(to, 1 - source, from, source, static_cast<size_t>(bytes), gpu.stream);
  }
  const cudaError_t status = cudaMemsetAsync(gpu.taken, 0, kMaxSms * sizeof(int), gpu.stream);
  if (status != cudaSuccess) return status;
  copy_rows<<<static_cast<unsigned>(gpu.sms * kMaxCtas), kThreads, 0, gpu.stream>>>(from, to, bytes / row_bytes,
                                                                                    row_bytes, sms, ctas, gpu.taken);
  return cudaGetLastError();
}

}  // namespace

extern "C" {

const char* link_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

int link_count(int* count) { return cudaGetDeviceCount(count); }

// Buffers of num_bytes, a multiple of row, num_sets of them to read and to write on either GPU.
int link_open(int64_t num_bytes, int64_t row, int num_sets) {
  if (row % 16 != 0 || num_bytes % row != 0) return cudaErrorInvalidValue;
  bytes = num_bytes, row_bytes = row, sets = num_sets;
  for (int index = 0; index < kGpus; ++index) {
    const cudaError_t status = open_gpu(index);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

int link_sms() { return gpus[0].sms; }

// Milliseconds of `repeats` transfers in a row, on GPU 0 and, when `both`, on GPU 1 at the same time; the longer time.
int link_run(int kind, int both, int sms, int ctas, int repeats, float* milliseconds) {
  const int used = both ? kGpus : 1;
  cudaError_t status = cudaSetDevice(0);
  if (status != cudaSuccess) return status;
  hold<<<1, 1, 0, gpus[0].stream>>>(kHoldNs);
  status = cudaGetLastError();
  if (status == cudaSuccess) status = cudaEventRecord(gpus[0].held, gpus[0].stream);
  for (int index = 0; index < used && status == cudaSuccess; ++index) {
    status = cudaSetDevice(index);
    if (status == cudaSuccess && index > 0) status = cudaStreamWaitEvent(gpus[index].stream, gpus[0].held, 0);
    if (status == cudaSuccess) status = cudaEventRecord(gpus[index].begin, gpus[index].stream);
    for (int n = 0; n < repeats && status == cudaSuccess; ++n) status = launch(kind, index, n % sets, sms, ctas);
    if (status == cudaSuccess) status = cudaEventRecord(gpus[index].end, gpus[index].stream);
  }
  *milliseconds = 0;
  for (int index = 0; index < used && status == cudaSuccess; ++index) {
    float elapsed = 0;
    status = cudaEventSynchronize(gpus[index].end);
    if (status == cudaSuccess) status = cudaEventElapsedTime(&elapsed, gpus[index].begin, gpus[index].end);
    *milliseconds = elapsed > *milliseconds ? elapsed : *milliseconds;
  }
  return status;
}

// Words of 16 bytes that are wrong after one transfer of every buffer by either GPU.
int link_check(int kind, int sms, int ctas, int64_t* wrong) {
  *wrong = 0;
  cudaError_t status = cudaSuccess;
  for (int index = 0; index < kGpus && status == cudaSuccess; ++index) {
    const int source = source_of(kind, index);
    Gpu& target = gpus[1 - source];
    status = cudaSetDevice(1 - source);
    if (status == cudaSuccess) status = cudaMemset(target.to, 0, static_cast<size_t>(bytes * sets));
    if (status == cudaSuccess) status = cudaMemset(target.wrong, 0, sizeof(*target.wrong));
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (status == cudaSuccess) status = cudaSetDevice(index);
    for (int set = 0; set < sets && status == cudaSuccess; ++set) status = launch(kind, index, set, sms, ctas);
    if (status == cudaSuccess) status = cudaStreamSynchronize(gpus[index].stream);
    if (status == cudaSuccess) status = cudaSetDevice(1 - source);
    for (int set = 0; set < sets && status == cudaSuccess; ++set) {
      count_wrong<<<1024, kThreads, 0, target.stream>>>(
          target.to + set * bytes, static_cast<uint64_t>(source * sets + set) << 40, bytes / 16, target.wrong);
      status = cudaGetLastError();
    }
    unsigned long long found = 0;
    if (status == cudaSuccess) status = cudaStreamSynchronize(target.stream);
    if (status == cudaSuccess) status = cudaMemcpy(&found, target.wrong, sizeof(found), cudaMemcpyDeviceToHost);
    *wrong += static_cast<int64_t>(found);
  }
  return status;
}
}
