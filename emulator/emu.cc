#include <cuda.h>
#include <cuda_runtime_api.h>
#include "device/ptx_sm90.cuh"
#include "device/wgmma_sm90.cuh"
#include "device/element.cuh"
dim3 threadIdx, blockIdx, gridDim, blockDim;
int emu_sms = 6;
namespace emu {
Fiber* self = nullptr;
std::vector<std::function<void()>> engine;
std::mt19937 rng(1);
uint64_t progress = 0;
static ucontext_t main_context;
static std::function<void()>* body_ = nullptr;
void fail(const char* text) { std::printf("EMU FAIL: %s (cta %d thread %u)\n", text, self ? self->cta->index : -1, self ? self->thread : 0); std::fflush(stdout); std::abort(); }
void yield(const char* what) { self->waiting = what; swapcontext(&self->context, &main_context); }
void flip(Mbar& b) { if (b.pending == 0 && b.tx == 0) { b.phase ^= 1; b.pending = b.count; ++progress; } }
static Mbar& bar_of(Cta* cta, uint32_t bar) { Mbar& b = cta->bars[bar]; if (!b.init) fail("barrier used before init"); return b; }
void arrive(Cta* cta, uint32_t bar, int64_t tx) { Mbar& b = bar_of(cta, bar); b.tx += tx; if (--b.pending < 0) fail("too many arrivals"); flip(b); }
void complete(Cta* cta, uint32_t bar, int64_t bytes) { Mbar& b = bar_of(cta, bar); b.tx -= bytes; flip(b); }
static void entry() { (*body_)(); self->done = true; ++progress; swapcontext(&self->context, &main_context); std::abort(); }
static void run_ctas(int first, int count, int per_cluster, unsigned threads, size_t bytes, std::function<void()>& body) {
  std::vector<std::unique_ptr<Cluster>> clusters; std::vector<std::unique_ptr<Cta>> ctas; std::vector<std::unique_ptr<Fiber>> fibers;
  for (int c = 0; c < count; ++c) {
    if (c % per_cluster == 0) clusters.push_back(std::make_unique<Cluster>());
    auto cta = std::make_unique<Cta>();
    cta->index = first + c; cta->rank = c % per_cluster; cta->cluster = clusters.back().get();
    cta->smem.assign(bytes + 2048, 0xAB); cta->warps.resize((threads + 31) / 32); cta->slots.assign((threads + 31) / 32, std::vector<uint64_t>(32));
    clusters.back()->ctas.push_back(cta.get()); clusters.back()->threads += threads;
    for (unsigned t = 0; t < threads; ++t) {
      auto f = std::make_unique<Fiber>(); f->cta = cta.get(); f->thread = t; f->stack.resize(48 * 1024);
      getcontext(&f->context); f->context.uc_stack.ss_sp = f->stack.data(); f->context.uc_stack.ss_size = f->stack.size(); f->context.uc_link = nullptr;
      makecontext(&f->context, entry, 0); fibers.push_back(std::move(f));
    }
    ctas.push_back(std::move(cta));
  }
  body_ = &body;
  std::vector<Fiber*> live; for (auto& f : fibers) live.push_back(f.get());
  int idle = 0;
  while (!live.empty()) {
    const uint64_t before = progress;
    if (rng() % 4 == 0) std::shuffle(live.begin(), live.end(), rng);
    for (Fiber* f : live) {
      self = f; threadIdx.x = f->thread; blockIdx.x = f->cta->index % gridDim.x; blockIdx.y = f->cta->index / gridDim.x;
      swapcontext(&main_context, &f->context);
      // some of the asynchronous operations
      while (!engine.empty() && rng() % 64 == 0) { size_t i = rng() % engine.size(); auto op = engine[i]; engine[i] = engine.back(); engine.pop_back(); op(); ++progress; }
    }
    live.erase(std::remove_if(live.begin(), live.end(), [](Fiber* f) { return f->done; }), live.end());
    if (progress == before && engine.empty()) {
      if (++idle > 3) {
        std::map<std::string, int> what; for (Fiber* f : live) ++what[std::string(f->waiting) + " cta " + std::to_string(f->cta->index) + " warp " + std::to_string(f->thread / 32)];
        for (auto& [w, n] : what) std::printf("  %d x %s\n", n, w.c_str());
        self = nullptr; fail("deadlock");
      }
    } else idle = 0;
    if (progress == before && !engine.empty()) { auto op = engine.back(); engine.pop_back(); op(); ++progress; }
  }
  while (!engine.empty()) { auto op = engine.back(); engine.pop_back(); op(); }
  for (auto& f : fibers) for (auto& g : f->groups) if (g->pending) fail("stores in flight at the end");
  self = nullptr;
}
void run(dim3 grid, unsigned threads, size_t bytes, std::function<void()> body) {
  gridDim = grid; blockDim = dim3(threads);
  const int total = grid.x * grid.y;
  if (threads == 384) { run_ctas(0, total, 2, threads, bytes, body); return; }
  for (int c = 0; c < total; ++c) run_ctas(c, 1, 1, threads, bytes, body);
}
}  // namespace emu
using namespace emu;
namespace streammoe::sm90 {
cudaError_t prepare_stream() { return cudaSuccess; }  // the kernels of streams are not among the units
cudaError_t prepare_ring_rows() { return cudaSuccess; }
void mbar_init(uint32_t bar, uint32_t count) { Mbar& b = self->cta->bars[bar]; b = {int(count), int(count), 0, 0, true}; if (bar % 8) fail("barrier alignment"); }
void mbar_wait(uint32_t bar, uint32_t parity, const char* what) { Cta* c = self->cta; wait_until(what, [=] { Mbar& b = c->bars[bar]; if (!b.init) fail("wait before init"); return b.phase != parity; }); }
void send_async_16(uint32_t slot, uint32_t bar, uint32_t rank, int4 v) { Cta* c = self->cta->cluster->ctas[rank]; arrive(c, bar, 16); async([=] { std::memcpy(at(c, slot), &v, 16); complete(c, bar, 16); }); }
static uint32_t swizzled(uint32_t a, int mode) { if (mode == CU_TENSOR_MAP_SWIZZLE_128B) return a ^ ((a >> 3) & 0x70); if (mode == CU_TENSOR_MAP_SWIZZLE_64B) return a ^ ((a >> 3) & 0x30); return a; }
void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2, uint16_t mask) {
  if (dst % (map->swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 1024 : 512)) fail("box alignment");
  CUtensorMap m = *map; Cluster* cl = self->cta->cluster;
  async([=] {
    for (size_t r = 0; r < cl->ctas.size(); ++r) {
      if (!((mask >> r) & 1)) continue;
      for (uint32_t y = 0; y < m.box[1]; ++y) for (uint32_t x = 0; x < m.box[0]; ++x) {
        const int64_t i0 = int64_t(c0) + x, i1 = int64_t(c1) + y;
        uint16_t v = 0;
        if (i0 >= 0 && i0 < int64_t(m.dims[0]) && i1 >= 0 && i1 < int64_t(m.dims[1]) && (m.rank < 3 || (c2 >= 0 && c2 < int64_t(m.dims[2]))))
          std::memcpy(&v, m.base + i0 * 2 + i1 * m.strides[0] + (m.rank < 3 ? 0 : c2 * m.strides[1]), 2);
        std::memcpy(at(cl->ctas[r], swizzled(dst + y * m.box[0] * 2 + x * 2, m.swizzle)), &v, 2);
      }
      complete(cl->ctas[r], bar, m.box[0] * m.box[1] * 2);
    }
  });
}
void tma_store(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2) {
  CUtensorMap m = *map; Cta* c = self->cta; auto g = self->open_group; ++g->pending;
  async([=] {
    for (uint32_t y = 0; y < m.box[1]; ++y) for (uint32_t x = 0; x < m.box[0]; ++x) {
      const int64_t i0 = int64_t(c0) + x, i1 = int64_t(c1) + y;
      if (i0 < 0 || i0 >= int64_t(m.dims[0]) || i1 < 0 || i1 >= int64_t(m.dims[1]) || (m.rank == 3 && (c2 < 0 || c2 >= int64_t(m.dims[2])))) continue;
      std::memcpy(const_cast<uint8_t*>(m.base) + i0 * 2 + i1 * m.strides[0] + (m.rank < 3 ? 0 : c2 * m.strides[1]), at(c, swizzled(src + y * m.box[0] * 2 + x * 2, m.swizzle)), 2);
    }
    --g->pending;
  });
}
void tma_store_commit() { self->groups.push_back(self->open_group); self->open_group = std::make_shared<StoreGroup>(); }
void store_wait(int n) { Fiber* f = self; wait_until("store read", [=] { while (!f->groups.empty() && f->groups.front()->pending == 0) f->groups.pop_front(); return int(f->groups.size()) <= n; }); }
void copy_async_16(uint32_t dst, const void* src, uint32_t bytes) { Cta* c = self->cta; Fiber* f = self; ++f->copies; async([=] { uint8_t b[16] = {}; std::memcpy(b, src, bytes); std::memcpy(at(c, dst), b, 16); --f->copies; }); }
void copy_async_arrive(uint32_t bar) { Cta* c = self->cta; Fiber* f = self; 
  struct Poll { static void go(Cta* c, Fiber* f, uint32_t bar) { if (f->copies == 0) arrive(c, bar, 0); else async([=] { go(c, f, bar); }); } };
  async([=] { Poll::go(c, f, bar); }); }
void stmatrix(uint32_t address, int n, const uint32_t* r) {
  // addresses of all lanes; this lane writes its own fragments
  std::vector<uint32_t> a = exchange(address);
  const int l = lane();
  for (int m = 0; m < n; ++m) std::memcpy(at(self->cta, a[8 * m + l / 4] + (l % 4) * 4), &r[m], 4);
  warp_barrier();
}
static float read16(Cta* c, uint64_t d, int mn, int i, int k, bool f16) {
  const uint32_t start = (d & 0x3fff) << 4, lbo = ((d >> 16) & 0x3fff) << 4, sbo = ((d >> 32) & 0x3fff) << 4;
  if ((d >> 62) != 1) fail("only 128-byte swizzle");
  uint32_t a = mn ? start + (i / 64) * lbo + (k / 8) * sbo + (k % 8) * 128 + (i % 64) * 2 : start + (i / 8) * sbo + (i % 8) * 128 + k * 2;
  uint16_t v; std::memcpy(&v, at(c, swizzled(a, CU_TENSOR_MAP_SWIZZLE_128B)), 2);
  return emu_widen(f16, v);
}
void wgmma_op(float* d, int n, int ta, int tb, bool f16, uint64_t a, uint64_t b, int accumulate) {
  Cta* c = self->cta; const int w = warp() % 4, l = lane();
  auto op = [=] {
    float A[2][16];
    for (int h = 0; h < 2; ++h) for (int k = 0; k < 16; ++k) A[h][k] = read16(c, a, ta, 16 * w + l / 4 + 8 * h, k, f16);
    for (int j = 0; j < n / 8; ++j) for (int x = 0; x < 2; ++x) {
      float B[16]; for (int k = 0; k < 16; ++k) B[k] = read16(c, b, tb, 8 * j + 2 * (l % 4) + x, k, f16);
      for (int h = 0; h < 2; ++h) { double s = 0; for (int k = 0; k < 16; ++k) s += double(A[h][k]) * B[k]; float& o = d[4 * j + 2 * h + x]; o = float((accumulate ? double(o) : 0.0) + s); }
    }
  };
  if (!accumulate) for (int i = 0; i < n / 2; ++i) d[i] = NAN;  // visible to whoever reads too early
  self->wg_open.push_back(op);
}
void wgmma_commit() { self->wg_groups.push_back(std::move(self->wg_open)); self->wg_open.clear(); if (rng() % 2) { /* finish early */ while (!self->wg_groups.empty()) { for (auto& f : self->wg_groups.front()) f(); self->wg_groups.pop_front(); } } }
void wgmma_wait_n(int n) { yield("wgmma"); ++progress; while (int(self->wg_groups.size()) > n) { for (auto& f : self->wg_groups.front()) f(); self->wg_groups.pop_front(); } warp_barrier(); }
}
static CUresult encode(CUtensorMap* m, CUtensorMapDataType, cuuint32_t rank, void* data, const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle sw, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  std::memset(m, 0, sizeof *m); m->base = static_cast<const uint8_t*>(data); m->rank = rank; m->swizzle = sw;
  if (reinterpret_cast<uintptr_t>(data) % 16) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < rank; ++i) { m->dims[i] = dims[i]; m->box[i] = box[i]; if (dims[i] == 0) return CUDA_ERROR_INVALID_VALUE; }
  for (unsigned i = 0; i + 1 < rank; ++i) { m->strides[i] = strides[i]; if (strides[i] % 16) return CUDA_ERROR_INVALID_VALUE; }
  const unsigned inner = box[0] * 2, limit = sw == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 64; if (inner > limit) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** e, unsigned, int, cudaDriverEntryPointQueryResult* f) { *e = reinterpret_cast<void*>(&encode); *f = cudaDriverEntryPointSuccess; return cudaSuccess; }
