// The column sums of rows too long for row_norm_bwd.cuh to keep them: a second pass over x and dy. Block (t, p) takes
// column tile t and rows p, p + gridDim.y, ..., and writes its part of partial row p, for sum_partials.cuh. Reads x, dy
// and a gate that is a row once; for a residual's dgate also x beside h, and the gradient at h as row_norm_bwd.cuh
// rounded it. With groups blockIdx.y is the group, and blockIdx.x counts tiles and, slower, slabs of rows.
#pragma once

#include "row_norm_bwd.cuh"

namespace kf {

template <class S> __device__ void row_norm_bwd_weight(const RowNormBwdArgs& args) {
  using A = typename S::Acc;
  constexpr int kVec = S::kVec, kCols = S::kCols;
  constexpr bool kCovers = false;
  constexpr unsigned kTiles = (kCols - 1) / (S::kThreads * kVec) + 1;
  wait_for_previous_kernel();
  const unsigned tile = S::kGrouped ? blockIdx.x % kTiles : blockIdx.x, slab = S::kGrouped ? blockIdx.x / kTiles : blockIdx.y;
  const unsigned slabs = S::kGrouped ? gridDim.x / kTiles : gridDim.y;
  const i64 start = (static_cast<i64>(tile) * S::kThreads + threadIdx.x) * kVec;
  if (start >= kCols) return;
  const int col = static_cast<int>(start);
  const Before<S> before(args);
  A dweight[kVec] = {}, dbias[kVec] = {}, dgate[kVec] = {}, weight[kVec], bias[kVec];
  if constexpr (S::kActivation != 0) {
    using Weight = typename S::Weight;
    using Bias = typename S::Bias;
    widen_parameter<S, Weight, true>(load_weight<S>(args, col), args.weight_offset, weight);
    widen_parameter<S, Bias, false>(load_bias<S>(args, col), 0, bias);
  }
#pragma unroll 4
  for (i64 sample = slab; sample < args.rows; sample += slabs) {
    const i64 row = row_of_sample<S>(args, sample);
    const auto* x_row = static_cast<const typename S::Row*>(args.x) + row_offset<S::kStridedX>(args.x_rows, row);
    const auto* dy_row = static_cast<const typename S::DY*>(args.dy) + row_offset<S::kStridedDY>(args.dy_rows, row);
    A x[kVec], dy[kVec];
    widen_row<S>(before, load_cols<S::kAlignX, kVec, kCols, kCovers>(x_row, col), row, col, x);
    widen_pack(load_cols<S::kAlignDY, kVec, kCols, kCovers>(dy_row, col), dy);
    if constexpr (kPresent<Factor<S>>) {
      const auto* factor_row = static_cast<const Factor<S>*>(args.pre_x) + row_offset<S::kStridedPreX>(args.pre_x_rows, row);
      apply_factor<S>(before, load_cols<S::kAlignPreX, kVec, kCols, kCovers>(factor_row, col), x, dy);
    }
    const Normalize<S> normalize{S::kRms ? A(0) : static_cast<const A*>(args.mean)[row], static_cast<const A*>(args.rstd)[row]};
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      dy[e] = incoming<S>(dy[e], normalize(x[e]), weight[e], bias[e]);
      const A centred = normalize.centred(x[e]);
      dweight[e] = fused(normalize.share(dy[e], centred, product(dy[e], centred)), normalize.factor(), dweight[e]);
      dbias[e] += dy[e];
    }
    if constexpr (S::kDGate) {
      const auto* pre_x_row =
          static_cast<const typename S::PreX*>(args.pre_x) + row_offset<S::kStridedPreX>(args.pre_x_rows, row);
      const auto* total_row = static_cast<const typename S::Residual*>(args.dresidual) + row * kCols;
      A u[kVec], total[kVec];
      Outgoing<S>(args, before.dropout, row)
          .before_gate(col, load_cols<S::kAlignPreX, kVec, kCols, kCovers>(pre_x_row, col), u);
      widen_pack(load_cols<16, kVec, kCols, kCovers>(total_row, col), total);
#pragma unroll
      for (int e = 0; e < kVec; ++e) dgate[e] = fused(u[e], total[e], dgate[e]);
    }
  }
  const i64 partial = slab * args.partial_pitch + group_offset<S>(args, S::kCols) + col;
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    if constexpr (S::kDWeight) static_cast<A*>(args.dweight_partials)[partial + e] = dweight[e];
    if constexpr (S::kDBias) static_cast<A*>(args.dbias_partials)[partial + e] = dbias[e];
    if constexpr (S::kDGate) static_cast<A*>(args.dgate_partials)[partial + e] = dgate[e];
  }
}

}  // namespace kf
