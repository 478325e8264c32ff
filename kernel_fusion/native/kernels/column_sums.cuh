// What kernels that sum up columns share: a block takes a tile of kLanes vectors of columns and, in kThreads / kLanes lines of
// threads, rows; each thread keeps the sums of its columns, and at the end the lines are added pairwise.
#pragma once

#include "types.cuh"

namespace kf {

// S is the generated plan: kThreads, kLanes, kVec.
template <class S> struct Tile {
  static constexpr int kLines = S::kThreads / S::kLanes;
  int lane, line;

  __device__ Tile() : lane(threadIdx.x % S::kLanes), line(threadIdx.x / S::kLanes) {}
  __device__ i64 col(i64 tile) const { return (tile * S::kLanes + lane) * S::kVec; }

  // Adds up the lines, in a fixed order; the sums are those of line 0 then. Every thread of the block calls it.
  template <class A> __device__ void add_lines(A (&sums)[S::kVec]) const {
    static_assert((kLines & (kLines - 1)) == 0);
    if constexpr (kLines > 1) {
      __shared__ A table[S::kVec][S::kThreads];
#pragma unroll
      for (int half = kLines / 2; half > 0; half /= 2) {
        if (line >= half && line < 2 * half) {
#pragma unroll
          for (int e = 0; e < S::kVec; ++e) table[e][threadIdx.x] = sums[e];
        }
        __syncthreads();
        if (line < half) {
#pragma unroll
          for (int e = 0; e < S::kVec; ++e) sums[e] += table[e][threadIdx.x + half * S::kLanes];
        }
      }
    }
  }
};

}  // namespace kf
