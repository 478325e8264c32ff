// y = dropout(scale * f(a, b)) where b is a row that all rows of a share: a thread loads its columns of b once, for several rows.
// Memory: one read of a and of b, one write of y. Block (t, s) takes column tile t and, a group of lines at a time, rows s,
// s + gridDim.y, ...
#pragma once

#include "batched.cuh"
#include "chain.cuh"
#include "column_sums.cuh"
#include "pointwise_chain.cuh"
#include "shared/pointwise_args.h"
#include "vectors.cuh"

namespace kf {

template <class S> __device__ void pointwise_columns(const PointwiseColumnsArgs& args) {
  using A = typename S::Acc;
  using Y = typename S::Y;
  using InA = Pack<typename S::A, S::kVec>;
  wait_for_previous_kernel();
  const Tile<S> tile;
  const i64 col = tile.col(blockIdx.x);
  if (col >= args.cols) return;
  const Chain<S, Y> chain(args);
  A b[S::kVec];
  widen_pack(load<S::kAlignB, S::kVec>(static_cast<const typename S::B*>(args.b) + col), b);
  const auto* a_col = static_cast<const typename S::A*>(args.a) + col;
  auto* y_col = static_cast<Y*>(args.out) + col;
  constexpr int kLines = Tile<S>::kLines;
  const i64 first = static_cast<i64>(blockIdx.y) * kLines + tile.line, step = static_cast<i64>(gridDim.y) * kLines;
  batched<S::kUnroll>(
      first, static_cast<i64>(args.rows), step, [&](i64 row) { return load<S::kAlignA, S::kVec>(a_col + row * args.cols); },
      [&](i64 row, const InA& loaded) {
        A y[S::kVec];
        widen_pack(loaded, y);
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) y[e] = chain.value(y[e], b[e]);
        chain.scale_and_drop([&](int e) { return row * args.cols + col + e; }, y);
        store<S::kAlignY>(y_col + row * args.cols, narrow_pack<Y>(y));
      });
}

}  // namespace kf
