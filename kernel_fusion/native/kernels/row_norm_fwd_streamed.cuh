// Row norm, forward, for rows too long for a block's registers: a persistent cluster streams them through shared memory
// (row_stream.cuh), with the formulas and the tree of row_norm_fwd.cuh.
//
// Each block owns a piece of the columns. A thread keeps its columns' weight and bias in registers: reading them for
// every row would take twice as much L2 bandwidth as x itself. A slot also holds a piece of the residual, which each
// pass adds, or of the gate; a residual's gate comes from L1/L2. Memory: one read of x, one write of y; a residual adds
// a read and a write, a gate a read.
#pragma once

#include "row_norm_fwd.cuh"
#include "row_stream.cuh"

namespace kf {

// The weight and the bias of this thread's columns.
template <class S> struct ColumnParameters {
  Pack<typename S::Weight, S::kVec> weights[Place<S>::kVectors];
  Pack<typename S::Bias, S::kVec> biases[Place<S>::kVectors];

  __device__ ColumnParameters(const RowNormFwdArgs& args, const Place<S>& at) {
#pragma unroll
    for (int i = 0; i < Place<S>::kVectors; ++i) {
      weights[i] = load_weight<S>(args, at.col(i));
      biases[i] = load_bias<S>(args, at.col(i));
    }
  }
};

// Stores y of a row. y_at(i, y) makes this thread's i-th vector.
template <class S, class YAt> __device__ void store_y(typename S::Y* y_row, const Place<S>& at, YAt&& y_at) {
  if constexpr (S::kShifted) {
    store_shifted<S>(y_row, at, y_at);
  } else {
#pragma unroll
    for (int i = 0; i < Place<S>::kVectors; ++i) {
      typename S::Acc y[S::kVec];
      y_at(i, y);
      store_cols<S::kAlignY, S::kVec, S::kCols, Place<S>::kCovers>(y_row, at.col(i), narrow_pack<typename S::Y>(y));
    }
  }
}

template <class S> __device__ void row_norm_fwd_streamed(const RowNormFwdArgs& args) {
  using A = float;
  using P = Place<S>;
  using Stream = RowStream<S, 1, S::kHelpers>;
  using Pair = typename Stream::Pair;
  using X = StreamedRows<S, Stream, typename S::X, S::kAlignX, S::kStridedX>;
  using Other = StreamedRows<S, Stream, Beside<S>, S::kAlignResidual, S::kStridedResidual>;
  constexpr int kVec = S::kVec, kVectors = P::kVectors;
  constexpr int kSlotBytes = X::kBytes + Other::kBytes;
  extern __shared__ __align__(128) char slots[];  // [kSlots][kSlotBytes]
  __shared__ typename Stream::Shared shared;
  __shared__ typename Stream::Pacing pacing;

  const int member = threadIdx.x;
  const P at(member);
  const Stream stream{*settled_shared(&shared), pacing, at, 0, member};
  stream.init();
  const int first_col = P::block_begin(), cols = P::block_cols();
  char* const ring = settled_shared(slots);
  const X x{args.x, &args.x_rows, ring, kSlotBytes, first_col};
  const Other other{args.residual, &args.residual_rows, ring + X::kBytes, kSlotBytes, first_col};
  const auto row_of = [&](i64 sample) { return row_of_sample<S>(args, sample); };
  const auto fill = [&](i64 sample, int slot) {
    const i64 row = row_of(sample);
    const bool last = sample == args.rows - 1;
    copy_pieces(&stream.shared.full[slot], cols, x.copy(row, slot, last), other.copy(row, slot, last));
  };
  const auto combine = [&](i64 sample, typename Stream::Sums sums) {
    const Moments<S> moments = join_moments<S>(at.lane, sums);
    const A rstd = reciprocal_sqrt(moments.squares * kPerCol<S> + static_cast<A>(args.eps));
    if (S::kStats && stream.leader()) store_stats<S>(args, row_of(sample), moments.mean, rstd);
    return Pair{moments.mean, rstd};
  };
  const i64 first = blockIdx.x / S::kCluster, step = gridDim.x / S::kCluster;
  wait_for_previous_kernel(x.piece(row_of(first)).source);
  // One branch for all helpers makes the code of odd rows much longer.
  if (Stream::is_combiner()) {
    stream.combine_all(args.rows, first, step, combine);
    stream.join();
    return;
  }
  if (Stream::is_producer()) {
    stream.produce(args.rows, first, step, fill);
    stream.join();
    return;
  }
  stream.start(args.rows, first, step, fill);

  const Before<S> before(args);
  const auto row_at = [&](i64 row, int slot, int i) {
    const int col = at.col(i);
    if constexpr (kFactorLast<S>) return before(x.at(row, slot, col), {}, row, col);
    else return before(x.at(row, slot, col), other.at(row, slot, col), row, col, load_gate<S>(args, col));
  };
  ColumnParameters<S> of(args, at);

  const auto first_pass = [&](i64 sample, int slot) {
    const i64 row = row_of(sample);
    Moments<S> moments;
    if constexpr (kAddsResidual<S> || kChangesX<S>) {  // expensive to read twice
      Pack<typename S::Row, kVec> values[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) values[i] = row_at(row, slot, i);
      moments = moments_of_warp<S>(at, [&](int i) { return values[i]; });
    } else {
      moments = moments_of_warp<S>(at, [&](int i) { return row_at(row, slot, i); });
    }
    return Pair{moments.mean, moments.squares};
  };
  const auto second_pass = [&](i64 sample, int slot, const Pair& mean_and_rstd) {
    const i64 row = row_of(sample);
    const Affine<S> affine{mean_and_rstd.first, mean_and_rstd.second};
    auto* y_row = static_cast<typename S::Y*>(args.y) + row * S::kCols;
    auto* h_row = static_cast<typename S::Residual*>(args.h) + row * S::kCols;
    const auto y_at = [&](int i, A(&y)[kVec]) {
      if constexpr (kPresent<typename S::Weight>) keep_packed(of.weights[i]);
      if constexpr (kPresent<typename S::Bias>) keep_packed(of.biases[i]);
      const auto h = row_at(row, slot, i);
      if constexpr (kAddsResidual<S>) store_cols<16, kVec, S::kCols, P::kCovers>(h_row, at.col(i), h);
      Pack<LastFactor<S>, kVec> factor{};
      if constexpr (kFactorLast<S>) factor = other.at(row, slot, at.col(i));
      affine.unrounded(h, of.weights[i], of.biases[i], factor, args.weight_offset, y);
    };
    store_y<S>(y_row, at, y_at);
  };
  stream.run(args.rows, first, step, fill, first_pass, combine, second_pass);
  stream.join();
}

}  // namespace kf
