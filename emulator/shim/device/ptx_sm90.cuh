#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
namespace streammoe::sm90 {
inline uint32_t smem_address(const void* p) { return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - emu::self->cta->smem.data()); }
void mbar_init(uint32_t bar, uint32_t count);
inline void fence_mbar_init() {}
inline void mbar_arrive_expect_tx(uint32_t bar, uint32_t bytes) { emu::arrive(emu::self->cta, bar, bytes); }
inline void mbar_arrive_cluster(uint32_t bar, uint32_t rank) { emu::arrive(emu::self->cta->cluster->ctas[rank], bar, 0); }
void mbar_wait(uint32_t bar, uint32_t parity, const char* what);
void send_async_16(uint32_t slot, uint32_t bar, uint32_t rank, int4 value);
inline int4 load_shared_16(uint32_t a) { int4 v; std::memcpy(&v, emu::at(emu::self->cta, a), 16); return v; }
inline void tma_prefetch_map(const CUtensorMap*) {}
void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2, uint16_t mask);
inline uint16_t own_mask() { return static_cast<uint16_t>(1u << emu::self->cta->rank); }
inline void tma_load_2d(uint32_t d, const CUtensorMap* m, uint32_t b, int32_t c0, int32_t c1) { tma_load(d, m, b, c0, c1, 0, own_mask()); }
inline void tma_load_2d_multicast(uint32_t d, const CUtensorMap* m, uint32_t b, int32_t c0, int32_t c1, uint16_t k) { tma_load(d, m, b, c0, c1, 0, k); }
inline void tma_load_3d(uint32_t d, const CUtensorMap* m, uint32_t b, int32_t c0, int32_t c1, int32_t c2) { tma_load(d, m, b, c0, c1, c2, own_mask()); }
inline void tma_load_3d_multicast(uint32_t d, const CUtensorMap* m, uint32_t b, int32_t c0, int32_t c1, int32_t c2, uint16_t k) { tma_load(d, m, b, c0, c1, c2, k); }
void tma_store(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2);
inline void tma_store_2d(const CUtensorMap* m, uint32_t s, int32_t c0, int32_t c1) { tma_store(m, s, c0, c1, 0); }
inline void tma_store_3d(const CUtensorMap* m, uint32_t s, int32_t c0, int32_t c1, int32_t c2) { tma_store(m, s, c0, c1, c2); }
void tma_store_commit();
void store_wait(int pending);
template <int kPending> inline void tma_store_wait_read() { store_wait(kPending); }
inline void tma_store_wait_all() { store_wait(0); }
inline void fence_async_shared() {}
void copy_async_16(uint32_t dst, const void* src, uint32_t bytes);
void copy_async_arrive(uint32_t bar);
inline uint32_t cluster_cta_rank() { return emu::self->cta->rank; }
inline void cluster_sync() { emu::barrier(emu::self->cta->cluster->sync, emu::self->cta->cluster->threads, "cluster_sync"); }
inline void named_barrier_sync(uint32_t id, uint32_t threads) { emu::barrier(emu::self->cta->named[id], threads, "named"); }
template <int k> inline void registers_decrease() {}
template <int k> inline void registers_increase() {}
inline void dependent_launch_wait() {}
inline void dependent_launch_trigger() {}
void stmatrix(uint32_t address, int n, const uint32_t* r);
inline void stmatrix_x4(uint32_t a, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) { const uint32_t r[4] = {r0, r1, r2, r3}; stmatrix(a, 4, r); }
inline void stmatrix_x2(uint32_t a, uint32_t r0, uint32_t r1) { const uint32_t r[2] = {r0, r1}; stmatrix(a, 2, r); }
}
