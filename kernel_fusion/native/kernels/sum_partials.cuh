// out[c] is the sum of partials[p][c] over p, in a fixed order. Every sum of columns ends with this kernel.
//
// A block takes 32 columns. 8 lanes have 4 columns each, so a warp reads 4 partial rows at a time. Each thread adds partial
// rows d, d + kDepth, ... Then shuffles add the sums of a warp, and shared memory brings together those of the block.
// blockIdx.y chooses one of two sums.
#pragma once

#include "shared/row_norm_args.h"
#include "vectors.cuh"

namespace kf {

// All groups together may have more columns than an int counts.
template <int kCols> struct ColumnIndex {
  using type = int;
};
template <> struct ColumnIndex<0> {
  using type = i64;
};

template <class S, class T> __device__ void sum_partials_to(const SumPartialsArgs& args, int which) {
  using A = typename S::Acc;
  constexpr int kWarps = S::kThreads / 32, kDepth = 4 * kWarps, kLoads = 32 / static_cast<int>(sizeof(A));
  __shared__ A table[kWarps][32];
  using Index = typename ColumnIndex<S::kCols>::type;
  const Index cols = S::kCols == 0 ? static_cast<Index>(args.cols) : S::kCols;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index first = static_cast<Index>(blockIdx.x) * 32 + lane % 8 * 4;
  A sums[4] = {};
  // The pitch is a multiple of 32 columns.
  const A* partials = static_cast<const A*>(args.partials[which]) + first;
  wait_for_previous_kernel(partials + threadIdx.x / 8 * args.pitch);
  batched<kLoads>(
      static_cast<int>(threadIdx.x / 8), static_cast<int>(args.num_partials), kDepth,
      [&](int p) { return load<16, 4>(partials + p * args.pitch); },
      [&](int, const Pack<A, 4>& pack) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[e] += pack.v[e];
      });
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sums[e] += __shfl_xor_sync(0xffffffffu, sums[e], 8);
    sums[e] += __shfl_xor_sync(0xffffffffu, sums[e], 16);
    if (lane < 8) table[warp][lane * 4 + e] = sums[e];
  }
  __syncthreads();
  const Index col = static_cast<Index>(blockIdx.x) * 32 + lane;
  if (warp > 0 || col >= cols) return;
  A sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += table[w][lane];
  static_cast<T*>(args.out[which])[col] = narrow<T>(sum);
}

template <class S> __device__ void sum_partials(const SumPartialsArgs& args) {
  if (blockIdx.y == 0) {
    if constexpr (kPresent<typename S::First>) sum_partials_to<S, typename S::First>(args, 0);
  } else {
    if constexpr (kPresent<typename S::Second>) sum_partials_to<S, typename S::Second>(args, 1);
  }
}

}  // namespace kf
