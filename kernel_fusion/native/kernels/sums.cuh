// The terms of a reduction, sums of a thread's own elements, and tiles of columns.
#pragma once

#include "shared/names.h"
#include "vectors.cuh"

namespace kf {

// The function of the elements that a reduction adds up.
__device__ inline float magnitude(float v) { return fabsf(v); }
__device__ inline double magnitude(double v) { return fabs(v); }

template <Map kMap, class A> __device__ A add_mapped(A sum, A v) {
  if constexpr (kMap == Map::kSquare) return fused(v, v, sum);
  if constexpr (kMap == Map::kAbs) return sum + magnitude(v);
  return sum + v;
}

template <Map kMap, class A, class T, int kVec> __device__ void add_mapped(A (&sums)[kVec], const Pack<T, kVec>& pack) {
  A v[kVec];
  widen_pack(pack, v);
#pragma unroll
  for (int e = 0; e < kVec; ++e) sums[e] = add_mapped<kMap>(sums[e], v[e]);
}

// The pairwise sum of a thread's own sums.
template <class A, int kVec> __device__ A sum_elements(const A (&v)[kVec]) {
  A sums[kVec];
#pragma unroll
  for (int e = 0; e < kVec; ++e) sums[e] = v[e];
#pragma unroll
  for (int step = 1; step < kVec; step *= 2)
#pragma unroll
    for (int e = 0; e < kVec; e += 2 * step) sums[e] += sums[e + step];
  return sums[0];
}

// For sums down columns: a block takes a tile of kLanes vectors of columns, and rows in kThreads / kLanes lines of
// threads, which are added pairwise.
template <class S> struct Tile {
  static constexpr int kLines = S::kThreads / S::kLanes;
  int lane, line;

  __device__ Tile() : lane(threadIdx.x % S::kLanes), line(threadIdx.x / S::kLanes) {}
  __device__ i64 col(i64 tile) const { return (tile * S::kLanes + lane) * S::kVec; }

  // Adds up the lines of threads into line 0. Every thread of the block calls this.
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
