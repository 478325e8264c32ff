// Row norm, forward:  y = (x - mean) * rstd * (weight_offset + weight) + bias,   rstd = 1 / sqrt(var + eps)
// (RMSNorm: mean = 0 and var = E[x^2]).
//
// Who computes what: tree.cuh. One row per lane group, block or cluster; grid = rows / rows per block.
// Memory: one read of x, one write of y; weight and bias come from L1/L2. With kResident the row stays in registers as
// loaded (kVectors packs per thread); otherwise it is read again, from L2, for the deviations and for the result.
// Statistics: two passes over registers within a warp: a center first, then the deviations from it and their squares,
// which correct the center's own rounding (without that, mean/std = 1e4 loses digits). Then one exchange of (mean,
// squared deviations) between warps, joined by Chan's formula: as stable as two passes over the row, with one barrier.
#pragma once

#include "rows.cuh"
#include "tree.cuh"

namespace kf {

template <class S> __device__ void row_norm_fwd(const RowNormFwdArgs& args) {
  using A = typename S::Acc;
  using P = Place<S>;
  constexpr int kVec = S::kVec, kCols = S::kCols, kVectors = P::kVectors;
  constexpr bool kCovers = P::kCovers;
  constexpr int kUnroll = S::kResident ? kVectors : 4;
  const P at;

  const i64 wanted = static_cast<i64>(blockIdx.x / S::kCluster) * S::kRows + at.row;
  const bool live = S::kRows == 1 || wanted < args.rows;  // lanes of a row past the end still take part in shuffles
  const i64 row = live ? wanted : args.rows - 1;
  const auto* x_row = static_cast<const typename S::X*>(args.x) + row_offset<S::kStridedX>(args.x_rows, row);
  if constexpr (S::kCluster > 1) cluster_arrive();

  Pack<typename S::X, kVec> resident[S::kResident ? kVectors : 1];
  auto fetch = [&](int i) { return load_cols<S::kAlignX, kVec, kCols, kCovers>(x_row, at.col(i)); };
  if constexpr (S::kResident) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) resident[i] = fetch(i);
  }
  auto x_at = [&](int i) {
    if constexpr (S::kResident) return resident[i];
    else return fetch(i);
  };

  A means[S::kPlayed], squares[S::kPlayed];  // per virtual warp: its mean, and the sum of (x - its mean)^2
#pragma unroll
  for (int w = 0; w < S::kPlayed; ++w) {
    const A count = static_cast<A>(max(P::cols_of(at.warp + w), 1));
    A center = 0;
    if constexpr (!S::kRms) {
      A sum = 0;
#pragma unroll kUnroll
      for (int k = 0; k < P::kChunks; ++k) {
        A x[kVec];
        widen_pack(x_at(w * P::kChunks + k), x);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum += x[e];
      }
      center = sum_lanes<S::kLanes>(sum) / count;
    }
    A rest = 0, square = 0;
#pragma unroll kUnroll
    for (int k = 0; k < P::kChunks; ++k) {
      const int i = w * P::kChunks + k;
      A x[kVec];
      widen_pack(x_at(i), x);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const A d = S::kRms || kCovers || at.col(i) + e < kCols ? x[e] - center : A(0);
        rest += d;
        square += d * d;
      }
    }
    squares[w] = sum_lanes<S::kLanes>(square);
    means[w] = 0;
    if constexpr (!S::kRms) {
      rest = sum_lanes<S::kLanes>(rest);
      squares[w] -= rest * rest / count;
      means[w] = center + rest / count;
    }
  }

  A mean = means[0], var = squares[0];
  if constexpr (S::kWarps > 1) {
    __shared__ A slots[S::kWarps][2];
    Exchange<S> exchange{slots};
    if constexpr (S::kCluster > 1) cluster_wait();
#pragma unroll
    for (int w = 0; w < S::kPlayed; ++w) exchange.put(at.warp + w, at.lane, means[w], squares[w]);
    exchange.barrier();
    if constexpr (!S::kRms) {  // relative to the first warp's mean, so that only small numbers are added
      const A base = slots[0][0];
      mean = base + exchange.sum(at.lane, [&](int w) { return static_cast<A>(P::cols_of(w)) * (slots[w][0] - base); }) /
                        static_cast<A>(kCols);
    }
    var = exchange.sum(at.lane, [&](int w) {
      if constexpr (S::kRms) return slots[w][1];
      const A shift = slots[w][0] - mean;
      return slots[w][1] + static_cast<A>(P::cols_of(w)) * shift * shift;
    });
  }
  const A rstd = reciprocal_sqrt(var / static_cast<A>(kCols) + static_cast<A>(args.eps));

  if constexpr (S::kStats) {
    if (live && at.leader()) {
      if constexpr (!S::kRms) static_cast<A*>(args.mean)[row] = mean;
      static_cast<A*>(args.rstd)[row] = rstd;
    }
  }

  const auto* weight = static_cast<const typename S::Weight*>(args.weight);
  const auto* bias = static_cast<const typename S::Bias*>(args.bias);
  auto* y_row = static_cast<typename S::Y*>(args.y) + row * kCols;
#pragma unroll kUnroll
  for (int i = 0; i < kVectors; ++i) {
    const int col = at.col(i);
    A y[kVec];
    widen_pack(x_at(i), y);
#pragma unroll
    for (int e = 0; e < kVec; ++e) y[e] = (S::kRms ? y[e] : y[e] - mean) * rstd;
    if constexpr (kPresent<typename S::Weight>) {
      A w[kVec];
      widen_weight<S>(load_cols<S::kAlignWeight, kVec, kCols, kCovers>(weight, col), args.weight_offset, w);
#pragma unroll
      for (int e = 0; e < kVec; ++e) y[e] *= w[e];
    }
    if constexpr (kPresent<typename S::Bias>) {
      A b[kVec];
      widen_pack(load_cols<S::kAlignWeight, kVec, kCols, kCovers>(bias, col), b);
#pragma unroll
      for (int e = 0; e < kVec; ++e) y[e] += b[e];
    }
    if (live) store_cols<S::kAlignY, kVec, kCols, kCovers>(y_row, col, narrow_pack<typename S::Y>(y));
  }
}

}  // namespace kf
