// The canonical reduction tree of a row, and who executes it.
//
// A row of kCols columns is cut into vectors of kVec, which divides kCols, and the vectors into kWarps equal stretches, one
// for each *virtual warp*: in its stretch vector j belongs to lane j % kLanes. The order of summation is a function of
// (kCols, kVec, kLanes, kWarps) alone:
//
//   1. a lane adds up its own elements, column by column;
//   2. a butterfly adds up the kLanes lanes of a virtual warp;
//   3. the kWarps virtual warps are added pairwise: ((0+1)+(2+3))+((4+5)+(6+7)).
//
// Who executes it is free: a block or a cluster of kCluster blocks, in which each physical warp plays kPlayed virtual
// warps. So a row's bits depend on neither the launch shape, the number of rows, nor its alignment.
#pragma once

#include "types.cuh"

namespace kf {

__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes v to the same shared-memory address in block `rank` of the cluster.
__device__ inline void store_cluster(float* p, unsigned rank, float v) {
  unsigned remote, local = static_cast<unsigned>(__cvta_generic_to_shared(p));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(v) : "memory");
}
__device__ inline void store_cluster(double* p, unsigned rank, double v) {
  unsigned remote, local = static_cast<unsigned>(__cvta_generic_to_shared(p));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(v) : "memory");
}

// The part of a row, or the rows, that this thread works on. S is the generated plan:
//   kCols, kVec, kLanes, kWarps   the tree; kLanes < 32 only with kWarps == 1
//   kCluster, kPlayed             the executor: kWarps == kCluster * (physical warps of the block) * kPlayed,
//                                 or, with kWarps == 1, one row per kLanes threads and kRows rows per block
template <class S> struct Place {
  static constexpr int kSpan = S::kWarps * S::kLanes * S::kVec;             // columns of one vector of every lane
  static constexpr int kChunks = (S::kCols + kSpan - 1) / kSpan;            // vectors per lane and virtual warp
  static constexpr int kStretch = kChunks * S::kLanes * S::kVec;            // columns of a virtual warp, the last ones fewer
  static constexpr bool kCovers = S::kCols == S::kWarps * kStretch;         // no lane is ever past the end
  static constexpr int kVectors = kChunks * S::kPlayed;                     // vectors per thread
  static constexpr int kLocalWarps = S::kWarps / S::kCluster;               // virtual warps of this block
  static_assert(S::kCols % S::kVec == 0);

  int lane, row, warp;  // lane in the virtual warp, row in the block, first virtual warp played

  __device__ Place() : Place(S::kWarps == 1 ? threadIdx.x % S::kLanes : threadIdx.x) {
    if constexpr (S::kWarps == 1) row = threadIdx.x / S::kLanes;
  }

  // For the member-th of the threads that share a row.
  __device__ explicit Place(int member) : lane(member % S::kLanes), row(0), warp(member / S::kLanes * S::kPlayed) {
    if constexpr (S::kCluster > 1) warp += cluster_rank() * kLocalWarps;
  }

  // First column of this thread's i-th vector, 0 <= i < kVectors: chunk i % kChunks of virtual warp i / kChunks.
  __device__ int col(int i) const { return warp * kStretch + (i * S::kLanes + lane) * S::kVec; }

  // How many columns virtual warp w holds.
  __device__ static int cols_of(int w) {
    if constexpr (kCovers) return kStretch;
    const int rest = S::kCols - w * kStretch;
    return rest < 0 ? 0 : rest > kStretch ? kStretch : rest;
  }

  __device__ bool leader() const { return lane == 0 && warp == 0; }
};

__device__ constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Step 2: every lane gets the sum over its kLanes neighbours.
template <int kLanes, class A> __device__ A sum_lanes(A v) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

// Step 3: two sums per virtual warp, exchanged through shared memory with one barrier.
template <class S> struct Exchange {
  using A = typename S::Acc;
  static constexpr int kPadded = power_of_two(S::kWarps);             // the tree has zeros where there is no warp
  static constexpr int kSlots = kPadded > 32 ? kPadded / 32 : 1;  // virtual warps that one lane reads

  A (*slot)[2];  // shared, [kWarps][2]

  // Lane 0 of the virtual warp (of every block that needs it) gets the pair.
  __device__ void put(int warp, int lane, A first, A second) {
    if constexpr (S::kCluster > 1) {
      if (lane < S::kCluster) {
        store_cluster(&slot[warp][0], lane, first);
        store_cluster(&slot[warp][1], lane, second);
      }
    } else if (lane == 0) {
      slot[warp][0] = first;
      slot[warp][1] = second;
    }
  }

  __device__ void barrier() {
    if constexpr (S::kCluster > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // Sum of f(virtual warp) over all of them, pairwise, in every lane.
  template <class F> __device__ static A sum(int lane, F&& f) {
    const int first = lane * kSlots % kPadded;
    A v[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) v[i] = kPadded == S::kWarps || first + i < S::kWarps ? f(first + i) : A(0);
#pragma unroll
    for (int step = 1; step < kSlots; step *= 2)
#pragma unroll
      for (int i = 0; i < kSlots; i += 2 * step) v[i] += v[i + step];
    return sum_lanes<(kPadded < 32 ? kPadded : 32)>(v[0]);
  }
};

}  // namespace kf
