// Row norm, forward, for short rows of narrow vectors: a block copies its rows into shared memory as one piece, and y
// back. In place, such rows take an instruction per element and touch 32-byte sectors that neighbours share.
//
// The grid says how many rows a block has, up to kRows, and a lane group takes some in turn. y replaces x if it is as
// wide. Formulas and tree are row_norm_fwd.cuh's. With kAhead a lane keeps its columns' weight and bias. Memory: one
// read of x, one write of y.
#pragma once

#include "row_norm_fwd.cuh"
#include "row_stream.cuh"

namespace kf {

template <class S> __device__ void row_norm_fwd_tile(const RowNormFwdArgs& args) {
  using P = Place<S>;
  using X = typename S::X;
  using Y = typename S::Y;
  using XRows = Piece<X, S::kAlignX, S::kRows * S::kCols>;
  using YRows = Piece<Y, S::kAlignY, S::kRows * S::kCols>;
  static_assert(!kPresent<Beside<S>> && !S::kGrouped);
  constexpr bool kInPlace = sizeof(X) == sizeof(Y);
  constexpr int kAlign = kInPlace ? S::kAlignX : S::kAlignY, kStoreAlign = kAlign < 4 ? kAlign : 4;  // wider stores are global
  constexpr int kVec = S::kVec, kVectors = P::kVectors, kGroups = S::kThreads / S::kLanes;
  extern __shared__ __align__(128) char tile[];  // XRows::kBytes, and YRows::kBytes if y has another width
  __shared__ Mbarrier full;

  const P at;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();

  int rounds = 1;
  while (static_cast<i64>(gridDim.x) * (rounds * kGroups) < args.rows) rounds *= 2;
  const i64 first = static_cast<i64>(blockIdx.x) * rounds * kGroups;
  const int rows = static_cast<int>(min(args.rows - first, static_cast<i64>(rounds * kGroups)));
  if (rows <= 0) return;
  const XRows x{static_cast<const X*>(args.x) + row_offset<S::kStridedX>(args.x_rows, first)};
  const YRows y{static_cast<const Y*>(args.y) + first * S::kCols};
  const bool contiguous = !S::kStridedX && args.x_rows.stride[2] == S::kCols;
  X* const x_rows = const_cast<X*>(x.row_in(tile, 0));
  Y* const y_rows = kInPlace ? reinterpret_cast<Y*>(x_rows) : const_cast<Y*>(y.row_in(tile + XRows::kBytes, 0));
  if (contiguous && threadIdx.x == 0) {
    copy_pieces(&full, rows * S::kCols, PieceCopy<XRows>{x, tile, first + rows == args.rows});
  }
  const Before<S> before(args);
  Pack<typename S::Weight, kVec> weights[S::kAhead ? kVectors : 1];
  Pack<typename S::Bias, kVec> biases[S::kAhead ? kVectors : 1];
  const auto load_parameters = [&](int i, int col) {
    weights[i] = load_weight<S>(args, col);
    biases[i] = load_bias<S>(args, col);
  };
  if constexpr (S::kAhead)
#pragma unroll
    for (int i = 0; i < kVectors; ++i) load_parameters(i, at.col(i));
  if (contiguous) {
    mbarrier_wait(&full, 0);
  } else {
    for (int i = threadIdx.x; i < rows * S::kCols; i += S::kThreads)
      x_rows[i] = static_cast<const X*>(args.x)[row_offset<S::kStridedX>(args.x_rows, first + i / S::kCols) + i % S::kCols];
    __syncthreads();
  }

#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    // Lane groups would hit the same banks in neighbouring rows of, say, 65 elements; rows apart do not.
    const int in_tile = S::kLanes > 2 ? at.row * rounds + round : round * kGroups + at.row;
    const ForwardRow<S> row(args, first + in_tile);
    const int begin = in_tile * S::kCols;
    Pack<typename S::Row, kVec> resident[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      resident[i] = before(load_row<S, S::kAlignX>(x_rows + begin, at.col(i)), {}, row.index, at.col(i));
    const Moments<S> moments = moments_of_warp<S>(at, [&](int i) { return resident[i]; });
    const Affine<S> affine = affine_of_row<S>(args, at, row, moments);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int kept = S::kAhead ? i : 0;
      if constexpr (!S::kAhead) load_parameters(0, at.col(i));
      const auto y_pack = affine(resident[i], weights[kept], biases[kept], Pack<absent, kVec>{}, args.weight_offset);
      store_cols<kStoreAlign, kVec, S::kCols, P::kCovers>(y_rows + begin, at.col(i), y_pack);
    }
  }
  bulk_store_fence();
  __syncthreads();
  bulk_store(const_cast<Y*>(y.source), y_rows, rows * S::kCols);
}

}  // namespace kf
