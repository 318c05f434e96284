// CPU stand-in for the CUDA features the kernels use: fibers for threads, async engine for TMA.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <vector>
#include <memory>
#include <algorithm>
#include <ucontext.h>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct dim3 { unsigned x = 1, y = 1, z = 1; dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };
struct int4 { int x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline float2 make_float2(float a, float b) { return {a, b}; }
struct uint2 { unsigned x, y; };
inline int4 make_int4(int a, int b, int c, int d) { return {a, b, c, d}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }

extern dim3 threadIdx, blockIdx, gridDim, blockDim;

template <class A, class B> inline auto min(A a, B b) -> std::common_type_t<A, B> { return a < b ? a : b; }
template <class A, class B> inline auto max(A a, B b) -> std::common_type_t<A, B> { return a > b ? a : b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __uint_as_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline float __int_as_float(int u) { float f; std::memcpy(&f, &u, 4); return f; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline int atomicAdd(int* p, int v) { int o = *p; *p += v; return o; }
inline unsigned atomicAdd(unsigned* p, unsigned v) { unsigned o = *p; *p += v; return o; }
inline long long clock64() { return 0; }

namespace emu {
struct Barrier { int arrived = 0; uint64_t generation = 0; };
struct Mbar { int count = 0, pending = 0; int64_t tx = 0; uint32_t phase = 0; bool init = false; };
struct Cta {
  int index = 0, rank = 0;
  struct Cluster* cluster = nullptr;
  std::vector<uint8_t> smem;
  std::map<uint32_t, Mbar> bars;
  Barrier named[17];
  std::vector<Barrier> warps;
  std::vector<std::vector<uint64_t>> slots;  // per warp
};
struct Cluster { std::vector<Cta*> ctas; Barrier sync; int threads = 0; };
struct StoreGroup { int pending = 0; };
struct Fiber {
  ucontext_t context;
  std::vector<uint8_t> stack;
  Cta* cta = nullptr;
  unsigned thread = 0;
  bool done = false;
  const char* waiting = "";
  std::shared_ptr<StoreGroup> open_group = std::make_shared<StoreGroup>();
  std::deque<std::shared_ptr<StoreGroup>> groups;
  std::vector<std::function<void()>> wg_open;
  std::deque<std::vector<std::function<void()>>> wg_groups;
  int copies = 0;  // cp.async in flight
};
extern Fiber* self;
extern std::vector<std::function<void()>> engine;  // async operations in flight
extern std::mt19937 rng;
extern uint64_t progress;
void yield(const char* what);
inline int warp() { return self->thread / 32; }
inline int lane() { return self->thread % 32; }
template <class F> void wait_until(const char* what, F f) { while (!f()) yield(what); self->waiting = ""; ++progress; }
inline void barrier(Barrier& b, int n, const char* what) {
  const uint64_t g = b.generation;
  if (++b.arrived == n) { b.arrived = 0; ++b.generation; ++progress; return; }
  wait_until(what, [&] { return b.generation != g; });
}
inline void warp_barrier() { barrier(self->cta->warps[warp()], 32, "warp"); }
template <class T> std::vector<T> exchange(T v) {
  auto& s = self->cta->slots[warp()];
  uint64_t raw = 0; std::memcpy(&raw, &v, sizeof(T));
  s[lane()] = raw;
  warp_barrier();
  std::vector<T> out(32);
  for (int i = 0; i < 32; ++i) std::memcpy(&out[i], &s[i], sizeof(T));
  warp_barrier();
  return out;
}
inline void async(std::function<void()> f) { engine.push_back(std::move(f)); }
void arrive(Cta* cta, uint32_t bar, int64_t tx_expected);
void complete(Cta* cta, uint32_t bar, int64_t bytes);
[[noreturn]] void fail(const char* text);
inline uint8_t* at(Cta* cta, uint32_t address) {
  if (address >= cta->smem.size()) fail("shared address out of range");
  return cta->smem.data() + address;
}
void run(dim3 grid, unsigned threads, size_t shared_bytes, std::function<void()> body);
inline void* shared_base() { return self->cta->smem.data() + 64; }  // not 1024-aligned on purpose
}  // namespace emu

inline void __syncwarp(unsigned = ~0u) { emu::warp_barrier(); }
inline void __syncthreads() { emu::barrier(emu::self->cta->named[16], blockDim.x, "syncthreads"); }
template <class T> inline T __shfl_xor_sync(unsigned, T v, int m) { return emu::exchange(v)[emu::lane() ^ m]; }
template <class T> inline T __shfl_sync(unsigned, T v, int l) { return emu::exchange(v)[l & 31]; }
template <class T> inline T __shfl_up_sync(unsigned, T v, int d) { auto a = emu::exchange(v); return emu::lane() >= d ? a[emu::lane() - d] : v; }
inline int __reduce_add_sync(unsigned, int v) { int s = 0; for (int x : emu::exchange(v)) s += x; return s; }
inline uint32_t __match_any_sync(unsigned, int v) { auto a = emu::exchange(v); uint32_t m = 0; for (int i = 0; i < 32; ++i) if (a[i] == v) m |= 1u << i; return m; }
