// dx = scale * (dy - sum(dy * y)) * y over rows of run-time length. Left out elements have y = 0, so dx = 0; with
// kLeavesOut even in a row with NaN. Memory: one read of dy and y, one write of dx; rows longer than a block's
// registers are read twice.
#pragma once

#include "shared/reduce_args.h"
#include "softmax_rows.cuh"

namespace kf {

template <class S> struct SoftmaxBwdRow {
  using A = typename S::Acc;
  using DX = typename S::DX;
  static constexpr int kVec = S::kVec;
  struct Loaded {
    Pack<typename S::DY, kVec> dy;
    Pack<typename S::Y, kVec> y;
  };

  const typename S::DY* dy;
  const typename S::Y* y;
  DX* dx;
  A scale;

  __device__ SoftmaxBwdRow(const SoftmaxBwdArgs& args, i64 row)
      : dy(static_cast<const typename S::DY*>(args.dy) + offset_of_row<S::kStridedDY>(args.dy_rows, row)),
        y(static_cast<const typename S::Y*>(args.y) + offset_of_row<S::kStridedY>(args.y_rows, row)),
        dx(static_cast<DX*>(args.dx) + row * args.cols), scale(static_cast<A>(args.scale)) {}

  __device__ Loaded load(int col) const { return {kf::load<S::kAlignDY, kVec>(dy + col), kf::load<S::kAlignY, kVec>(y + col)}; }
  __device__ static void add(const Loaded& loaded, A (&sums)[kVec]) {
    A g[kVec], p[kVec];
    widen_pack(loaded.dy, g);
    widen_pack(loaded.y, p);
#pragma unroll
    for (int e = 0; e < kVec; ++e) sums[e] = fused(g[e], p[e], sums[e]);
  }
  __device__ void finish(int col, const Loaded& loaded, A sum) const {
    A g[kVec], p[kVec];
    widen_pack(loaded.dy, g);
    widen_pack(loaded.y, p);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      g[e] = scale * ((g[e] - sum) * p[e]);
      if constexpr (S::kLeavesOut) g[e] = p[e] == A(0) ? A(0) : g[e];
    }
    store<S::kAlignDX>(dx + col, narrow_pack<DX>(g));
  }
};

// kVectors > 0: the row stays in registers; 0: it is read twice, kUnroll vectors at a time.
template <class S> __device__ void softmax_bwd(const SoftmaxBwdArgs& args) {
  using A = typename S::Acc;
  constexpr int kVec = S::kVec, kLanes = S::kLanes, kRows = S::kThreads / kLanes;
  __shared__ A slots[kLanes > 32 ? kLanes / 32 : 1];
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kLanes, cols = static_cast<int>(args.cols);
  const i64 own = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  const bool inside = own < args.rows;  // else the last row again: all lanes of a warp take part
  const SoftmaxBwdRow<S> row(args, inside ? own : args.rows - 1);
  A sums[kVec] = {};
  if constexpr (S::kVectors > 0) {
    const auto col_of = [&](int i) { return (i * kLanes + lane) * kVec; };
    typename SoftmaxBwdRow<S>::Loaded loaded[S::kVectors];
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i)
      if (col_of(i) < cols) loaded[i] = row.load(col_of(i));
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i)
      if (col_of(i) < cols) row.add(loaded[i], sums);
    const A sum = sum_of_threads<kLanes>(sum_elements(sums), slots);
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i)
      if (inside && col_of(i) < cols) row.finish(col_of(i), loaded[i], sum);
  } else {
    using Loaded = typename SoftmaxBwdRow<S>::Loaded;
    const auto load_at = [&](int col) { return row.load(col); };
    batched<S::kUnroll, false>(lane * kVec, cols, kLanes * kVec, load_at, [&](int, const Loaded& l) { row.add(l, sums); });
    const A sum = sum_of_threads<kLanes>(sum_elements(sums), slots);
    batched<S::kUnroll, false>(lane * kVec, cols, kLanes * kVec, load_at,
                               [&](int col, const Loaded& l) { row.finish(col, l, sum); });
  }
}

}  // namespace kf
