// out[c] = sum over p of partials[p][c], in a fixed order: the finish of every column sum.
//
// A block of 32 x kDepth threads takes 32 columns; thread (c, d) adds partials d, d + kDepth, ..., then the kDepth sums
// of a column are added pairwise. blockIdx.y chooses between the two sums of a call (dweight, dbias).
#pragma once

#include "shared/row_norm_args.h"
#include "types.cuh"

namespace kf {

template <class S, class T> __device__ void sum_partials_to(const SumPartialsArgs& args, int which) {
  using A = typename S::Acc;
  constexpr int kDepth = S::kThreads / 32;
  __shared__ A table[kDepth][32 + 1];
  const int lane = threadIdx.x % 32, depth = threadIdx.x / 32;
  const int col = blockIdx.x * 32 + lane;
  A sum = 0;
  if (col < S::kCols) {
    const A* partials = static_cast<const A*>(args.partials[which]) + col;
#pragma unroll 4
    for (i64 p = depth; p < args.num_partials; p += kDepth) sum += partials[p * args.pitch];
  }
  table[depth][lane] = sum;
#pragma unroll
  for (int half = kDepth / 2; half > 0; half /= 2) {
    __syncthreads();
    if (depth < half) table[depth][lane] += table[depth + half][lane];
  }
  if (depth == 0 && col < S::kCols) static_cast<T*>(args.out[which])[col] = narrow<T>(table[0][lane]);
}

template <class S> __device__ void sum_partials(const SumPartialsArgs& args) {
  if (blockIdx.y == 0) {
    if constexpr (kPresent<typename S::First>) sum_partials_to<S, typename S::First>(args, 0);
  } else {
    if constexpr (kPresent<typename S::Second>) sum_partials_to<S, typename S::Second>(args, 1);
  }
}

}  // namespace kf
