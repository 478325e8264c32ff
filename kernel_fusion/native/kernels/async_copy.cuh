// Bulk copies from global to shared memory (one instruction moves kilobytes and takes no registers), and the mbarriers in
// shared memory that count them. sm_90 and newer.
#pragma once

#include "types.cuh"

namespace kf {

using Mbarrier = unsigned long long;

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ inline void mbarrier_init(Mbarrier* b, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(Mbarrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

__device__ inline void mbarrier_arrive_expect(Mbarrier* b, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}

// Waits until the phase of the given parity is complete.
__device__ inline void mbarrier_wait(Mbarrier* b, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(shared_address(b)), "r"(parity) : "memory");
}

// Starts copying `bytes` (a multiple of 16, both addresses too) and counts them on `b` when they are there.
__device__ inline void bulk_load(void* shared, const void* global, unsigned bytes, Mbarrier* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(b)) : "memory");
}

// Writes a pair to the same place in block `rank` of the cluster and counts its bytes on that block's `b`.
__device__ inline void store_cluster_counted(float* p, unsigned rank, float first, float second, Mbarrier* b) {
  unsigned remote, barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(b)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(remote),
               "f"(first), "f"(second), "r"(barrier) : "memory");
}

}  // namespace kf
