// The canonical reduction tree of a row, and the threads that execute it.
//
// A row of kCols columns is cut into vectors of kVec, which divides kCols, vectors into chunks of kLanes, and chunks
// into kWarps stretches, as even as possible, longer ones first. In its stretch, vector j belongs to lane j % kLanes.
// The order of summation depends on (kCols, kVec, kLanes, kWarps) alone:
//
//   1. a lane adds up its own elements, column by column;
//   2. a butterfly adds up the kLanes lanes of a warp;
//   3. the kWarps warps are added pairwise: ((0+1)+(2+3))+((4+5)+(6+7)).
//
// A block or a cluster of kCluster blocks executes it. So a row's bits depend on neither launch shape, number of rows,
// nor alignment.
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

// Writes v to the same shared address in block `rank`.
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

// This thread's part of the work. S is the generated plan:
//   kCols, kVec, kLanes, kWarps   the tree; kLanes < 32 only with kWarps == 1
//   kCluster                      the executor: kWarps == kCluster * (warps of the block), or, with kWarps == 1,
//                                 kRows rows of kLanes threads per block
template <class S> struct Place {
  static constexpr int kChunk = S::kLanes * S::kVec;                                     // columns of a vector of every lane
  static constexpr int kRowChunks = (S::kCols + kChunk - 1) / kChunk;                    // of the row
  static constexpr int kShare = kRowChunks / S::kWarps, kMore = kRowChunks % S::kWarps;  // of a warp; kMore warps have one more
  static constexpr int kVectors = kShare + (kMore > 0);                                  // vectors per thread
  static constexpr bool kCovers = S::kCols == S::kWarps * kVectors * kChunk;             // every thread has all
  static constexpr int kMissing = kRowChunks * kChunk - S::kCols;                        // columns of the last chunk
  static constexpr int kFull = kShare > 0 && kMissing > 0 ? kShare - 1 : kShare;         // chunks whole in every warp
  static constexpr int kLocalWarps = S::kWarps / S::kCluster;                            // warps of this block
  // A thread has many narrow vectors; their columns are added to one, not found from the lane.
  static constexpr bool kNarrow = S::kVec < 4;
  static_assert(S::kCols % S::kVec == 0);

  int lane, row, warp;  // lane in the warp, row in the block, warp of the row
  int first;            // column of this thread's first vector

  __device__ Place() : Place(S::kWarps == 1 ? threadIdx.x % S::kLanes : threadIdx.x) {
    if constexpr (S::kWarps == 1) row = threadIdx.x / S::kLanes;
  }

  // For thread `member` of a row.
  __device__ explicit Place(int member) : lane(member % S::kLanes), row(0), warp(member / S::kLanes) {
    if constexpr (S::kCluster > 1) warp += cluster_rank() * kLocalWarps;
    first = start(warp) + lane * S::kVec;
    if constexpr (kNarrow) asm("" : "+r"(first));
  }

  // Recomputed instead of kept in registers.
  __device__ static Place anew() {
    static_assert(S::kWarps > 1);
    int member;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(member));
    return Place(member);
  }

  // First column of warp w.
  __device__ static int start(int w) { return (w * kShare + (kMore ? min(w, kMore) : 0)) * kChunk; }

  // First column of this thread's i-th vector; kCols or more if there is none. The compiler is told which surely exist;
  // `inside`: the caller knows.
  __device__ int col(int i, bool inside = false) const {
    const int col = kNarrow ? first + i * kChunk : start(warp) + (i * S::kLanes + lane) * S::kVec;
    if (kCovers) return col;
    if (inside || i < kFull) {
      __builtin_assume(col < S::kCols);
      return col;
    }
    return i < kShare || warp < kMore ? col : S::kCols;
  }

  // How many columns warp w has.
  __device__ static int cols_of(int w) {
    if constexpr (kCovers) return kVectors * kChunk;
    return max(0, min(start(w + 1), S::kCols) - start(w));
  }

  // One over warp w's columns among its first kCount chunks; finite even if it has none.
  template <class A, int kCount = kVectors> __device__ static A per_col_of(int w) {
    constexpr int kMost = (kCount < kVectors ? kCount : kVectors) * kChunk,
                  kFewer = (kCount < kShare ? kCount : kShare) * kChunk;
    constexpr int kLast = kRowChunks < S::kWarps || kCount < kShare ? kFewer : kFewer - kMissing;
    const A most = A(1) / A(kMost), fewer = kFewer ? A(1) / A(kFewer) : A(0);
    if constexpr (kCovers) return most;
    return w < kMore                     ? (kRowChunks < S::kWarps && w == kMore - 1 ? A(1) / A(kMost - kMissing) : most)
           : w == S::kWarps - 1 && kLast ? A(1) / A(kLast)
                                         : fewer;
  }

  // The first column of this block, and how many columns it has.
  __device__ static int block_begin() { return S::kCluster > 1 ? start(static_cast<int>(cluster_rank()) * kLocalWarps) : 0; }
  __device__ static int block_cols() {
    if constexpr (kCovers) return kLocalWarps * kVectors * kChunk;
    const int end = S::kCluster > 1 ? start(static_cast<int>(cluster_rank() + 1) * kLocalWarps) : S::kCols;
    return min(end, S::kCols) - block_begin();
  }

  __device__ bool leader() const { return lane == 0 && warp == 0; }
};

// The twin of Place for a row whose length is known at run time. The tree is the same, but with S::kDealt chunks are
// dealt to the warps in turn, so that all work where the row is. A thread has at most S::kVectors vectors where the
// kernel holds them. Its i-th one begins at col(i), and exists if that is below `end`.
template <class S> struct DynamicPlace {
  static constexpr int kChunk = S::kLanes * S::kVec;
  static constexpr int kStep = S::kDealt ? S::kWarps * kChunk : kChunk;  // between a thread's vectors
  static constexpr int kVectors = S::kVectors;
  static constexpr int kLocalWarps = S::kWarps / S::kCluster;
  static constexpr bool kCovers = false;

  int lane, row, warp;  // lane in the warp, row in the block, warp of the row
  int first, end;       // columns of this thread's first vector, and after its warp's last one

  __device__ explicit DynamicPlace(int cols) : DynamicPlace(cols, S::kWarps == 1 ? threadIdx.x % S::kLanes : threadIdx.x) {
    if constexpr (S::kWarps == 1) row = threadIdx.x / S::kLanes;
  }

  // For thread `member` of a row.
  __device__ DynamicPlace(int cols, int member) : lane(member % S::kLanes), row(0), warp(member / S::kLanes), num_cols(cols) {
    if constexpr (S::kWarps == 1 || S::kDealt) {
      static_assert(S::kCluster == 1);
      first = member * S::kVec;
      end = cols;
    } else {
      if constexpr (S::kCluster > 1) warp += cluster_rank() * kLocalWarps;
      first = start(warp) + lane * S::kVec;
      end = min(start(warp + 1), cols);
    }
  }

  // First column of warp w.
  __device__ int start(int w) const {
    const int chunks = (num_cols + kChunk - 1) / kChunk;
    return (w * (chunks / S::kWarps) + min(w, chunks % S::kWarps)) * kChunk;
  }
  __device__ int col(int i) const { return first + i * kStep; }
  __device__ int block_begin() const { return S::kCluster > 1 ? start(static_cast<int>(cluster_rank()) * kLocalWarps) : 0; }
  __device__ int block_cols() const {
    const int after = S::kCluster > 1 ? start(static_cast<int>(cluster_rank() + 1) * kLocalWarps) : num_cols;
    return min(after, num_cols) - block_begin();
  }
  __device__ bool leader() const { return lane == 0 && warp == 0; }

 private:
  int num_cols;
};

// A division takes more instructions.
template <class S> inline constexpr typename S::Acc kPerCol = typename S::Acc(1) / S::kCols;

__device__ constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// The ways in which two numbers of a row are joined.
struct Sum {
  template <class A> __device__ A operator()(A a, A b) const { return a + b; }
};
struct Larger {  // NaN loses
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

// Step 2: every lane gets what its kLanes neighbours make together.
template <int kLanes, class Combine, class A> __device__ A combine_lanes(A v, Combine combine) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}
template <int kLanes, class A> __device__ A sum_lanes(A v) { return combine_lanes<kLanes>(v, Sum()); }

// Gives every lane the even lanes' and the odd lanes' number.
template <class A> __device__ void split(A mine, bool odd, A& first, A& second) {
  const A other = __shfl_xor_sync(0xffffffffu, mine, 1);
  first = odd ? other : mine;
  second = odd ? mine : other;
}

// Two sums in little more than half as many shuffles: after the first, even lanes go on with one sum and odd lanes with
// the other. The bits are those of two butterflies.
template <int kLanes, class A> __device__ void sum_lanes(A& first, A& second) {
  if constexpr (kLanes > 1) {
    const bool odd = threadIdx.x % 2;
    A mine = odd ? second : first;
    mine += __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
#pragma unroll
    for (int offset = 2; offset < kLanes; offset *= 2) mine += __shfl_xor_sync(0xffffffffu, mine, offset);
    split(mine, odd, first, second);
  }
}

// The two numbers that a warp, or a row, leaves.
template <class A> struct Pair {
  A first, second;
};

// Step 3: two numbers per warp, exchanged through shared memory with one barrier.
template <class S> struct Exchange {
  using A = typename S::Acc;
  static constexpr int kPadded = power_of_two(S::kWarps);           // absent warps are zeros
  static constexpr int kPerLane = kPadded > 32 ? kPadded / 32 : 1;  // if lanes share the warps

  A (*slot)[2];  // shared, [kWarps][2]

  // Stores a warp's pair, in every block of a cluster.
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

  // f(warp) of all warps, combined pairwise, in every lane, each of which takes kEach. `neutral` changes nothing.
  template <int kEach = kPerLane, class F, class Combine> __device__ static A all(int lane, F&& f, Combine combine, A neutral) {
    const int first = lane * kEach % kPadded;
    A v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = kPadded == S::kWarps || first + i < S::kWarps ? f(first + i) : neutral;
#pragma unroll
    for (int step = 1; step < kEach; step *= 2)
#pragma unroll
      for (int i = 0; i < kEach; i += 2 * step) v[i] = combine(v[i + step], v[i]);
    return combine_lanes<kPadded / kEach>(v[0], combine);
  }
  template <int kEach = kPerLane, class F> __device__ static A sum(int lane, F&& f) { return all<kEach>(lane, f, Sum(), A(0)); }

  // Both sums over all pairs; RMSNorm needs only the second. With few warps every lane adds up all, without shuffles. With 16,
  // even lanes take the first of each pair and odd lanes the second. With more, lanes share them, one sum after the
  // other.
  __device__ static void sum_pairs(int lane, const A (*pairs)[2], A& first, A& second) {
    if constexpr (kPadded <= 8) {
      if constexpr (!S::kRms) first = sum<kPadded>(lane, [&](int w) { return pairs[w][0]; });
      second = sum<kPadded>(lane, [&](int w) { return pairs[w][1]; });
    } else if constexpr (kPadded == 16 && !S::kRms) {
      const bool odd = lane % 2;
      A mine = kPadded == S::kWarps || lane / 2 < S::kWarps ? pairs[lane / 2][odd] : A(0);
#pragma unroll
      for (int offset = 2; offset < 32; offset *= 2) mine += __shfl_xor_sync(0xffffffffu, mine, offset);
      split(mine, odd, first, second);
    } else {
      if constexpr (!S::kRms) first = sum(lane, [&](int w) { return pairs[w][0]; });
      second = sum(lane, [&](int w) { return pairs[w][1]; });
    }
  }
};

// The stretches of S::kShares neighbouring warps of the tree, which one warp executes: its vectors one after the other.
template <class S> struct Stretches {
  using P = Place<S>;
  static constexpr int kShares = S::kShares, kVectors = kShares * P::kVectors;
  static_assert(kShares == 1 || (S::kLanes == 32 && S::kCluster == 1));
  P of[kShares];
  int lane, row, warp, first;  // warp of the block

  __device__ Stretches() : Stretches(P(), threadIdx.x) {}
  __device__ static Stretches anew() {
    unsigned member;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(member));
    return {P(member), member};
  }
  __device__ int col(int i) const { return of[i / P::kVectors].col(i % P::kVectors); }
  __device__ bool leader() const { return lane == 0 && warp == 0; }

 private:
  __device__ Stretches(const P& place, unsigned member) : lane(place.lane), row(place.row), warp(place.warp) {
    of[0] = place;
    if constexpr (kShares > 1) {
      lane = member % 32;
      warp = member / 32;
#pragma unroll
      for (int k = 0; k < kShares; ++k) {
        of[k].lane = lane;
        of[k].warp = warp * kShares + k;
        of[k].first = P::start(of[k].warp) + lane * S::kVec;
      }
    }
    first = of[0].first;
  }
};

}  // namespace kf
