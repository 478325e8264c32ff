// What a reduction sums up: squares, absolute values, or the elements themselves.
#pragma once

#include "shared/names.h"
#include "vectors.cuh"

namespace kf {

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

// The sum of a thread's own sums, pairwise.
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

}  // namespace kf
