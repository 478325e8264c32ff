// Backward of rotary_norm.cuh. With g the gradient turned back, w = weight_offset + weight and m = x * rstd of D columns:
//
//   dx = rstd * (g w - m E[g w m]), dweight = sum of g m over heads and tokens
//
// The statistics are computed again, by the same sums as forward's. A thread also keeps one sum of a weight's gradient. Each
// block leaves a partial row of it, and of zeros for the other weight; sum_partials.cuh adds them in order. Bytes per element:
// x and dy in, dx out. kRounds rounds the m of dweight alone.
#pragma once

#include "rotary_norm.cuh"

namespace kf {

template <class S, class W> struct RotaryNormBwdHeads {
  using A = typename S::Acc;
  using X = typename S::X;
  using Lane = HeadLane<S>;

  struct Row {
    typename Lane::template Packs<X> x, dy;
    LaneAngles<S> angles;
    X* dx;
    bool live;
  };
  struct Now {
    typename Lane::Values x, g;
    X* dx;
    bool live;
  };

  const RotaryNormArgs& args;
  const int part;
  const Lane at;
  LaneWeight<S, W> weight;
  typename Lane::Values sums = {};

  __device__ RotaryNormBwdHeads(const RotaryNormArgs& args, int part) : args(args), part(part) {
    weight.read(at, args.weight[part]);
  }

  __device__ void fetch(const HeadWalk& walk, bool live, Row& row) const {
    const RotaryHeads& heads = args.rotary.of[part];
    const RowPlace place(walk, live);
    row.live = live;
    at.template read<S::kAlign>(static_cast<const X*>(args.x[part]) + place.offset(args.x_stride[part]), row.x);
    at.template read<S::kAlign>(static_cast<const X*>(heads.x) + place.offset(heads.x_stride), row.dy);
    row.dx = static_cast<X*>(heads.y) + place.offset(heads.y_stride);
    row.angles.read(at, RotaryToken<S>(args.rotary, place.example, place.token));
  }

  // x, and dy rotated back.
  __device__ void take(const Row& row, Now& now) const {
#pragma unroll
    for (int i = 0; i < Lane::kHeld; ++i) {
      widen_unit(row.x[i], now.x[i]);
      widen_unit(row.dy[i], now.g[i]);
      row.angles.template turn<false>(at, i, now.g[i]);
    }
    now.dx = row.dx;
    now.live = row.live;
  }

  // All lanes of a warp call this.
  __device__ void serve(Now& now) {
    auto& [x, g, dx, live] = now;
    A squares = 0, dot = 0;
    const A offset = static_cast<A>(args.weight_offset);
#pragma unroll
    for (int i = 0; i < Lane::kHeld; ++i) {
      A w[Lane::kWidth];
      weight.get(i, offset, w);
#pragma unroll
      for (int e = 0; e < Lane::kWidth; ++e) {
        squares = fused(x[i][e], x[i][e], squares);
        dot = fused(product(g[i][e], w[e]), x[i][e], dot);
      }
    }
    sum_lanes<Lane::kLanes>(squares, dot);
    if (!live) return;
    const A rstd = rstd_of<S>(squares, args.eps);
    const A mean = product(dot, rstd) * kPerCol<S>;
#pragma unroll
    for (int i = 0; i < Lane::kHeld; ++i) {
      A w[Lane::kWidth], m[Lane::kWidth];
      weight.get(i, offset, w);
#pragma unroll
      for (int e = 0; e < Lane::kWidth; ++e) {
        m[e] = product(x[i][e], rstd);
        x[i][e] = product(rstd, fused(-m[e], mean, product(g[i][e], w[e])));
      }
      if constexpr (S::kSums) {
        round_all<S::kRounds, X>(m);
#pragma unroll
        for (int e = 0; e < Lane::kWidth; ++e) sums[i][e] = fused(g[i][e], m[e], sums[i][e]);
      }
    }
    if (args.rotary.of[part].y) at.template write<S::kAlignOut>(dx, x);
  }

  // A butterfly adds the heads of a warp, and the warps of the block are added in their order.
  __device__ void store_partials() {
    constexpr int kWarps = S::kThreads / 32;
    __shared__ A table[kWarps][S::kCols];
#pragma unroll
    for (int i = 0; i < Lane::kHeld; ++i)
#pragma unroll
      for (int e = 0; e < Lane::kWidth; ++e)
#pragma unroll
        for (int apart = Lane::kLanes; apart < 32; apart *= 2) sums[i][e] += __shfl_xor_sync(~0u, sums[i][e], apart);
    if (threadIdx.x % 32 < Lane::kLanes)
      at.each_column([&](int i, int e, int col) { table[threadIdx.x / 32][col] = sums[i][e]; });
    __syncthreads();
    const i64 partial = blockIdx.x * args.partial_pitch;
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < S::kCols; c += S::kThreads) {
      A sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += table[warp][c];
      static_cast<A*>(args.partials[part])[partial + c] = sum;
      static_cast<A*>(args.partials[1 - part])[partial + c] = 0;
    }
  }

  __device__ void run() {
    walk<S>(args, part, *this);
    if constexpr (S::kSums) store_partials();
  }
};

template <class S> __device__ void rotary_norm_bwd(const RotaryNormArgs& args) { run_part<S, RotaryNormBwdHeads>(args); }

}  // namespace kf
