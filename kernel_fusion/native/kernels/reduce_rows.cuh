// out[row][c] is the sum of map(in[row][r]) over chunk c of the row, divided by a divisor. Most rows have one chunk. A
// second call adds up the chunks. The kernel reads `in` once.
//
// Element r of a chunk belongs to lane r / kVec % kLanes. A lane adds up its elements, a butterfly the lanes of a warp, and
// another one the warps, so the order depends on the length alone. A row has kLanes threads. These are some lanes of a
// warp, each with kEach rows at once, or the whole block.
//
// Whether there are several chunks, or two coordinates of rows, is compiled in, because divisions take many registers.
#pragma once

#include "shared/reduce_args.h"
#include "sums.cuh"
#include "tree.cuh"

namespace kf {

// A chunk of a row.
template <class S> struct Stretch {
  using In = typename S::In;
  static constexpr int kVec = S::kVec;

  const In* p;
  i64 stride;

  __device__ static Stretch of(const ReduceArgs& args, i64 row, i64 chunk) {
    i64 offset;
    if constexpr (S::kNested) {
      const i64 outer = row / args.inner;
      offset = outer * args.outer_stride + (row - outer * args.inner) * args.inner_stride;
    } else {
      offset = row * args.outer_stride;
    }
    if constexpr (S::kChunked) offset += chunk * args.chunk * args.reduced_stride;
    return {static_cast<const In*>(args.in) + settled(offset), args.reduced_stride};
  }

  __device__ Pack<In, kVec> vector(int v) const {
    if constexpr (S::kContiguous) return load_once<S::kAlign, kVec>(p + v * kVec);
    else return some(v, kVec);
  }

  // The vector v with its first `count` elements, and zeros behind them.
  __device__ Pack<In, kVec> some(int v, int count) const {
    Pack<In, kVec> pack{};
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      if (e < count) pack.v[e] = p[(v * kVec + e) * (S::kContiguous ? i64(1) : stride)];
    return pack;
  }
};

// The sum over kLanes lanes, in every lane of the first warp.
template <class S, class A> __device__ A sum_threads(A v) {
  constexpr int kWarps = S::kLanes / 32;
  v = sum_lanes<(S::kLanes < 32 ? S::kLanes : 32)>(v);
  if constexpr (kWarps > 1) {
    __shared__ A sums[kWarps];
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = sum_lanes<kWarps>(sums[threadIdx.x % kWarps]);
  }
  return v;
}

template <class S> __device__ void reduce_rows(const ReduceArgs& args) {
  using A = typename S::Acc;
  constexpr int kVec = S::kVec, kLanes = S::kLanes, kGroups = S::kThreads / kLanes;
  wait_for_previous_kernel();
  const i64 first = static_cast<i64>(blockIdx.x) * (kGroups * S::kEach) + (kGroups == 1 ? 0 : threadIdx.x / kLanes);
  const auto inside = [&](int k) {  // a block has its one row or chunk
    return kGroups * S::kEach == 1 || first + k * kGroups < args.outer * args.inner;
  };
  const i64 row = S::kChunked ? blockIdx.x / static_cast<unsigned>(args.chunks) : first;
  const i64 chunk = S::kChunked ? first - row * args.chunks : 0;
  Stretch<S> stretch[S::kEach];
#pragma unroll
  for (int k = 0; k < S::kEach; ++k)  // outside, the first row again, ignored
    stretch[k] = Stretch<S>::of(args, inside(k) ? row + k * kGroups : 0, chunk);

  const i64 rest = args.reduced - chunk * args.chunk;
  const int length = static_cast<int>(rest < args.chunk ? rest : args.chunk), vectors = length / kVec;
  A sums[S::kEach][kVec] = {};
  struct Loaded {
    Pack<typename S::In, kVec> of[S::kEach];
  };
  const auto load_vectors = [&](int v) {
    Loaded loaded;
#pragma unroll
    for (int k = 0; k < S::kEach; ++k) loaded.of[k] = stretch[k].vector(v);
    return loaded;
  };
  const auto add_vectors = [&](int, const Loaded& loaded) {
#pragma unroll
    for (int k = 0; k < S::kEach; ++k) add_mapped<S::kMap>(sums[k], loaded.of[k]);
  };
  const int v = batched<S::kUnroll, false>(static_cast<int>(threadIdx.x % kLanes), vectors, kLanes, load_vectors, add_vectors);
  const int tail = length % kVec;
#pragma unroll
  for (int k = 0; k < S::kEach; ++k) {
    if (v == vectors && tail) add_mapped<S::kMap>(sums[k], stretch[k].some(v, tail));
    const A sum = sum_threads<S>(sum_elements(sums[k]));
    if (threadIdx.x % kLanes == 0 && inside(k))
      static_cast<typename S::Out*>(args.out)[first + k * kGroups] =
          narrow<typename S::Out>(sum / static_cast<A>(args.divisor));
  }
}

}  // namespace kf
