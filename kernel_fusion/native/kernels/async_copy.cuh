// Bulk copies from global to shared memory, and the mbarriers that count their bytes, on sm_90 and newer.
#pragma once

#include "types.cuh"

namespace kf {

using Mbarrier = unsigned long long;

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Keeps an address in a register, instead of recomputing it from the block's rank.
template <class T> __device__ T* settled_shared(T* p) {
  unsigned address = shared_address(p);
  asm volatile("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

__device__ inline void mbarrier_init(Mbarrier* b, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}

// Shows initialised barriers to the copy engine and the cluster.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(Mbarrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

__device__ inline void mbarrier_arrive_expect(Mbarrier* b, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}

// Announces bytes that will arrive on the barrier; this thread arrives later.
__device__ inline void mbarrier_expect(Mbarrier* b, unsigned bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is over.
__device__ inline void mbarrier_wait(Mbarrier* b, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}

// Starts copying `bytes`, which `b` counts; bytes and both addresses are multiples of 16.
__device__ inline void bulk_load(void* shared, const void* global, unsigned bytes, Mbarrier* b) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(b))
      : "memory");
}

// Starts to bring `bytes` to L2; bytes and address are multiples of 16.
__device__ inline void bulk_prefetch(const void* global, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Starts copying a word; copy_arrive() arrives on `b` when this thread's words have.
__device__ inline void copy_word(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ inline void copy_arrive(Mbarrier* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}

// Every thread that wrote the data calls this before a bulk store of it.
__device__ inline void bulk_store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All threads of a block copy `count` elements from shared to global memory. With the same alignment within 16 bytes,
// one instruction moves all but the ends; thread 0 waits until it has read them.
template <class T> __device__ void bulk_store(T* global, const T* shared, int count) {
  constexpr int kSize = static_cast<int>(sizeof(T)), kWhole = 16 / kSize;
  const auto place = reinterpret_cast<unsigned long long>(global);
  const bool alike = ((place ^ shared_address(shared)) & 15) == 0;
  const int head = alike ? min(count, static_cast<int>(-place & 15) / kSize) : count, whole = (count - head) / kWhole * kWhole;
  if (threadIdx.x == 0 && whole > 0)
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;\n"
        "cp.async.bulk.wait_group.read 0;" ::"l"(global + head),
        "r"(shared_address(shared + head)), "r"(whole * kSize)
        : "memory");
  for (int i = threadIdx.x; i < head; i += blockDim.x) global[i] = shared[i];
  for (int i = head + whole + threadIdx.x; i < count; i += blockDim.x) global[i] = shared[i];
}

// Writes a pair to the same place in block `rank` and counts its bytes on that block's `b`.
__device__ inline void store_cluster_counted(float* p, unsigned rank, float first, float second, Mbarrier* b) {
  unsigned remote, barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(b)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(remote),
               "f"(first), "f"(second), "r"(barrier)
               : "memory");
}

}  // namespace kf
