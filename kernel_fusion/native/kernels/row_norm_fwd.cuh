// Row norm, forward:  y = activation((x - mean) * rstd * (weight_offset + weight) + bias),   rstd = 1 / sqrt(var + eps)
// (RMSNorm: mean = 0 and var = E[x^2]), where h takes the place of x if there are stages before the norm (stages.cuh).
//
// Who computes what: tree.cuh. One row per lane group, block or cluster; grid = rows / rows per block.
// Memory: one read of x, one write of y; weight and bias come from L1/L2. A residual is one read and one write more. With
// kResident the row stays in registers as loaded (kVectors packs per thread), or as S::Row if there are stages; otherwise it is
// read again, from L2, for the deviations and for the result: h, which this thread wrote, or x, which goes through its stages
// again.
#pragma once

#include "chain.cuh"
#include "moments.cuh"
#include "stages.cuh"

namespace kf {

// y of one vector of a row.
template <class S> struct Affine {
  using A = typename S::Acc;
  A mean, rstd;

  template <int kVec, class Weight, class Bias>
  __device__ Pack<typename S::Y, kVec> operator()(const Pack<typename S::Row, kVec>& x, const Weight& weight, const Bias& bias,
                                                  double offset) const {
    A y[kVec];
    widen_pack(x, y);
#pragma unroll
    for (int e = 0; e < kVec; ++e) y[e] = (S::kRms ? y[e] : y[e] - mean) * rstd;
    if constexpr (kPresent<typename S::Weight>) {
      A w[kVec];
      widen_weight<S>(weight, offset, w);
#pragma unroll
      for (int e = 0; e < kVec; ++e) y[e] *= w[e];
    }
    if constexpr (kPresent<typename S::Bias>) {
      A b[kVec];
      widen_pack(bias, b);
#pragma unroll
      for (int e = 0; e < kVec; ++e) y[e] += b[e];
    }
    activate<S::kActivation, typename MathFor<A, typename S::Y>::type>(y);
    return narrow_pack<typename S::Y>(y);
  }
};

template <class S, class A> __device__ void store_stats(const RowNormFwdArgs& args, i64 row, A mean, A rstd) {
  if constexpr (!S::kRms) static_cast<A*>(args.mean)[row] = mean;
  static_cast<A*>(args.rstd)[row] = rstd;
}

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
  wait_for_previous_kernel();

  using Row = typename S::Row;
  using Residual = typename S::Residual;
  const Before<S, typename S::Y> before(args);
  const auto* residual_row =
      static_cast<const Residual*>(args.residual) + row_offset<S::kStridedResidual>(args.residual_rows, row);
  auto* h_row = static_cast<Residual*>(args.h) + row * kCols;

  const auto load_x = [&](int i) { return load_cols<S::kAlignX, kVec, kCols, kCovers>(x_row, at.col(i)); };
  const auto load_residual = [&](int i) { return load_row<S, S::kAlignResidual>(residual_row, at.col(i)); };
  const auto store_h = [&](int i, const Pack<Row, kVec>& h) {
    if constexpr (kAddsResidual<S>)
      if (live) store_cols<16, kVec, kCols, kCovers>(h_row, at.col(i), h);
  };
  Pack<Row, kVec> resident[S::kResident ? kVectors : 1];
  Pack<typename S::Weight, kVec> weights[S::kAhead ? kVectors : 1];
  Pack<typename S::Bias, kVec> biases[S::kAhead ? kVectors : 1];
  Pack<typename S::X, kVec> xs[S::kResident ? kVectors : 1];  // all loads are on their way before the first is used
  Pack<Residual, kVec> residuals[S::kResident ? kVectors : 1];
  if constexpr (S::kResident) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      xs[i] = load_x(i);
      residuals[i] = load_residual(i);
    }
  }
  if constexpr (S::kAhead) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      weights[i] = load_parameter<S, typename S::Weight>(args.weight, at.col(i));
      biases[i] = load_parameter<S, typename S::Bias>(args.bias, at.col(i));
    }
  }
  if constexpr (S::kResident) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      resident[i] = before(xs[i], residuals[i], row, at.col(i));
      store_h(i, resident[i]);
    }
  } else if constexpr (kAddsResidual<S>) {
#pragma unroll kUnroll
    for (int i = 0; i < kVectors; ++i) store_h(i, before(load_x(i), load_residual(i), row, at.col(i)));
  }
  const auto x_at = [&](int i) {
    if constexpr (S::kResident) return resident[i];
    else if constexpr (kAddsResidual<S>) return load_cols<16, kVec, kCols, kCovers>(h_row, at.col(i));
    else return before(load_x(i), {}, row, at.col(i));
  };

  Moments<S> moments[S::kPlayed];
#pragma unroll
  for (int w = 0; w < S::kPlayed; ++w)
    moments[w] = moments_of_warp<S, kUnroll>(at, at.warp + w, [&](int k) { return x_at(w * P::kChunks + k); });
  A mean = moments[0].mean, squares = moments[0].squares;
  if constexpr (S::kWarps > 1) {
    __shared__ A slots[S::kWarps][2];
    Exchange<S> exchange{slots};
    if constexpr (S::kCluster > 1) cluster_wait();
#pragma unroll
    for (int w = 0; w < S::kPlayed; ++w) exchange.put(at.warp + w, at.lane, moments[w].mean, moments[w].squares);
    exchange.barrier();
    const auto joined = join_moments<S>(at.lane, slots);
    mean = joined.mean;
    squares = joined.squares;
  }
  const A rstd = reciprocal_sqrt(squares / static_cast<A>(kCols) + static_cast<A>(args.eps));
  if (S::kStats && live && at.leader()) store_stats<S>(args, row, mean, rstd);

  const Affine<S> affine{mean, rstd};
  auto* y_row = static_cast<typename S::Y*>(args.y) + row * kCols;
#pragma unroll kUnroll
  for (int i = 0; i < kVectors; ++i) {
    const auto weight = S::kAhead ? weights[S::kAhead ? i : 0] : load_parameter<S, typename S::Weight>(args.weight, at.col(i));
    const auto bias = S::kAhead ? biases[S::kAhead ? i : 0] : load_parameter<S, typename S::Bias>(args.bias, at.col(i));
    const auto y = affine(x_at(i), weight, bias, args.weight_offset);
    if (live) store_cols<S::kAlignY, kVec, kCols, kCovers>(y_row, at.col(i), y);
  }
}

}  // namespace kf
