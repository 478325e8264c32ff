// da and db of y = dropout(scale * f(a, b)) for a b that is one row. Its gradient, a sum over rows, is collected in
// registers in the same pass. The kernel reads dy and a (or bits, as in pointwise_bwd.cuh) once, writes da once, and
// writes a partial row of db for each blockIdx.y; sum_partials.cuh adds these up. Block (t, s) takes column tile t and,
// as many lines of threads at a time, rows s, s + gridDim.y, ...
#pragma once

#include "pointwise_chain.cuh"
#include "shared/pointwise_args.h"
#include "sums.cuh"

namespace kf {

template <class S> struct BwdColumns {
  using A = typename S::Acc;
  using DA = typename S::DA;
  static constexpr int kVec = S::kVec;
  struct Loaded {
    Pack<typename S::DY, kVec> dy;
    Pack<typename S::A, kVec> a;
  };

  const PointwiseColumnsArgs& args;
  Chain<S, typename S::Result> chain;
  i64 col;
  A b[kVec], sums[kVec] = {};

  __device__ BwdColumns(const PointwiseColumnsArgs& args, i64 col) : args(args), chain(args), col(col) {
    widen_pack(load_at<typename S::B, S::kAlignB, kVec>(args.b, col), b);
  }

  __device__ Loaded load_row(i64 row) const {
    const i64 at = row * args.cols + col;
    return {load_at<typename S::DY, S::kAlignDY, kVec>(args.dy, at), load_at<typename S::A, S::kAlignA, kVec>(args.a, at)};
  }

  __device__ void add_row(i64 row, const Loaded& loaded) {
    const i64 at = row * args.cols + col;
    A g[kVec], a[kVec], da[kVec], db;
    widen_pack(loaded.dy, g);
    widen_pack(loaded.a, a);
    chain.scale_and_drop([&](int e) { return at + e; }, g);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      chain.gradients(g[e], a[e], b[e], da[e], db);
      sums[e] += db;
    }
    if constexpr (kPresent<DA>) store<S::kAlignDA>(static_cast<DA*>(args.da) + at, narrow_pack<DA>(da));
  }

  __device__ void add_rows(i64 first, i64 step) {
    batched<S::kUnroll>(
        first, static_cast<i64>(args.rows), step, [&](i64 row) { return load_row(row); },
        [&](i64 row, const Loaded& loaded) { add_row(row, loaded); });
  }
};

template <class S> __device__ void pointwise_bwd_columns(const PointwiseColumnsArgs& args) {
  using A = typename S::Acc;
  wait_for_previous_kernel();
  const Tile<S> tile;
  const i64 col = tile.col(blockIdx.x);
  A sums[S::kVec] = {};
  if (col < args.cols) {
    BwdColumns<S> columns(args, col);
    columns.add_rows(static_cast<i64>(blockIdx.y) * Tile<S>::kLines + tile.line, static_cast<i64>(gridDim.y) * Tile<S>::kLines);
#pragma unroll
    for (int e = 0; e < S::kVec; ++e) sums[e] = columns.sums[e];
  }
  tile.add_lines(sums);
  if (tile.line > 0 || col >= args.cols) return;
  A* partials = static_cast<A*>(args.partials) + blockIdx.y * args.pitch + col;
#pragma unroll
  for (int e = 0; e < S::kVec; ++e) partials[e] = sums[e];
}

}  // namespace kf
