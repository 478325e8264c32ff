// Codes and scales of the rows of v = activation(x) * other, or of v = x. A row of v stays in registers, or is computed
// twice: once for its scale. The kernel reads x and other once or twice. It writes a byte for each element, and v if that
// is kept.
#pragma once

#include "codes.cuh"
#include "pointwise_chain.cuh"
#include "rows.cuh"
#include "shared/row_norm_args.h"

namespace kf {

template <class S> __device__ void quantize(const QuantizeArgs& args) {
  using X = typename S::X;
  using Other = typename S::Other;
  using P = Place<S>;
  constexpr int kVec = S::kVec, kAhead = S::kAhead;
  const P at;
  const i64 wanted = static_cast<i64>(blockIdx.x) * S::kRows + at.row;
  const bool live = S::kRows == 1 || wanted < args.rows;
  const i64 row = live ? wanted : args.rows - 1;
  const auto* const x = static_cast<const X*>(args.x) + row_offset<S::kStridedX>(args.x_rows, row);
  const auto* const other = static_cast<const Other*>(args.other) + row_offset<S::kStridedOther>(args.other_rows, row);
  auto* const kept = static_cast<X*>(args.v) + row * S::kCols;
  wait_for_previous_kernel(x + at.first);

  Pack<X, kVec> xs[kAhead];
  Pack<Other, kVec> others[kAhead];
  const auto load = [&](int i, int to) {
    xs[to] = load_row<S, S::kAlignX>(x, at.col(i));
    others[to] = load_row<S, S::kAlignOther>(other, at.col(i));
  };
  const RowCodes<S, X, P> codes{args.codes, at, row, live};
  codes.store([&](int i) {
    const int from = i % kAhead;
    if (from == 0) {
#pragma unroll
      for (int k = 0; k < kAhead && i + k < P::kVectors; ++k) load(i + k, k);
    }
    Pack<X, kVec> v = xs[from];
    if constexpr (kPresent<Other>) {
      typename S::Acc a[kVec], b[kVec];
      widen_pack(v, a);
      widen_pack(others[from], b);
#pragma unroll
      for (int e = 0; e < kVec; ++e) a[e] = Chain<S, X>::value(a[e], b[e]);
      v = narrow_pack<X>(a);
    }
    if constexpr (S::kKeeps)
      if (live) store_cols<16, kVec, S::kCols, P::kCovers>(kept, at.col(i), v);
    return v;
  });
}

}  // namespace kf
