// Row norm, backward, streamed through shared memory by persistent blocks, or clusters for long rows (row_stream.cuh). The
// formulas and the tree are those of row_norm_bwd.cuh; here is another executor of them.
//
// A thread holds the dweight and dbias of its columns in registers (2 x kVectors x kVec of them) and nothing of the row: it
// reads x and dy from shared memory once for the sums and once for dx. One block per multiprocessor also means few partial
// rows for the finish to add. Memory: one read of x and of dy, one write of dx.
#pragma once

#include "row_norm_bwd.cuh"
#include "row_stream.cuh"

namespace kf {

template <class S> __device__ void row_norm_bwd_staged(const RowNormBwdArgs& args) {
  using A = float;
  using P = Place<S>;
  using Stream = RowStream<S>;
  using X = Piece<typename S::X, S::kAlignX, Stream::kCols>;
  using DY = Piece<typename S::DY, S::kAlignDY, Stream::kCols>;
  using Weight = typename S::Weight;
  constexpr int kVec = S::kVec, kCols = S::kCols, kVectors = P::kVectors, kGroups = S::kRows, kThreads = Stream::kThreads;
  constexpr int kSlotBytes = X::kBytes + DY::kBytes;
  extern __shared__ __align__(128) char slots[];  // [kGroups][kStages][kSlotBytes], then the weight
  __shared__ typename Stream::Shared shared[kGroups];

  const int group = threadIdx.x / kThreads, member = threadIdx.x % kThreads;
  const P at(member);
  Stream stream{shared[group], at, member};
  stream.init();
  wait_for_previous_kernel();

  const int first_col = Stream::first_col(), cols = Stream::cols();
  const auto x_slot = [&](int s) { return slots + (group * S::kStages + s) * kSlotBytes; };
  const auto dy_slot = [&](int s) { return x_slot(s) + X::kBytes; };
  const auto x_of = [&](i64 row) {
    return X{static_cast<const typename S::X*>(args.x) + row_offset<S::kStridedX>(args.x_rows, row) + first_col};
  };
  const auto dy_of = [&](i64 row) {
    return DY{static_cast<const typename S::DY*>(args.dy) + row_offset<S::kStridedDY>(args.dy_rows, row) + first_col};
  };
  const auto fill = [&](i64 row, int slot) {
    const X x = x_of(row);
    const DY dy = dy_of(row);
    Mbarrier* full = &shared[group].full[slot];
    mbarrier_arrive_expect(full, x.copied_bytes(cols) + dy.copied_bytes(cols));
    x.copy(x_slot(slot), cols, full);
    dy.copy(dy_slot(slot), cols, full);
  };
  const i64 first = static_cast<i64>(blockIdx.x / S::kCluster) * kGroups + group;
  const i64 step = static_cast<i64>(gridDim.x / S::kCluster) * kGroups;
  stream.start(args.rows, first, step, fill);

  A sums[2][kVectors][kVec] = {};  // dweight, dbias
  ColumnWeight<S, kVectors> weights(args, at, slots + kGroups * S::kStages * kSlotBytes, kThreads, member,
                                    group == 0);
  if (S::kKeeping == kShared) __syncthreads();
  const auto stats_of = [&](i64 row) {
    Normalize<S> stats{0, 0};
    if (row >= args.rows) return stats;
    if constexpr (!S::kRms) stats.mean = static_cast<const A*>(args.mean)[row];
    stats.rstd = static_cast<const A*>(args.rstd)[row];
    return stats;
  };
  Normalize<S> ahead = stats_of(first);  // one row ahead, as they do not come through the ring
  struct State {
    Normalize<S> normalize;
    A first, second;  // the warp's sums of g and of g * xhat
  };
  const auto read = [&](i64 row, int slot, int i, A (&x)[kVec], A (&dy)[kVec], A (&weight)[kVec]) {
    const auto* x_row = x_of(row).row_in(x_slot(slot), first_col);
    const auto* dy_row = dy_of(row).row_in(dy_slot(slot), first_col);
    widen_pack(load_cols<S::kAlignX, kVec, kCols, P::kCovers>(x_row, at.col(i)), x);
    widen_pack(load_cols<S::kAlignDY, kVec, kCols, P::kCovers>(dy_row, at.col(i)), dy);
    weights.get(i, weight);
  };
  const auto first_pass = [&](i64 row, int slot) {
    State state{ahead, 0, 0};
    ahead = stats_of(row + step);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A x[kVec], dy[kVec], weight[kVec];
      read(row, slot, i, x, dy, weight);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const A xhat = state.normalize(x[e]), g = product(dy[e], weight[e]);
        state.first += g;
        state.second = fused(g, xhat, state.second);
        if constexpr (S::kDWeight) sums[0][i][e] += dy[e] * xhat;
        if constexpr (S::kDBias) sums[1][i][e] += dy[e];
      }
    }
    state.first = S::kRms ? A(0) : sum_lanes<32>(state.first);
    state.second = sum_lanes<32>(state.second);
    return state;
  };
  const auto second_pass = [&](i64 row, int slot, const State& state, typename Stream::Sums row_sums) {
    A sum_g = state.first, sum_gx = state.second;
    if constexpr (S::kWarps > 1) {
      if constexpr (!S::kRms) sum_g = Exchange<S>::sum(at.lane, [&](int w) { return row_sums[w][0]; });
      sum_gx = Exchange<S>::sum(at.lane, [&](int w) { return row_sums[w][1]; });
    }
    if constexpr (S::kDX) {
      const Derivative<S> derivative(state.normalize, sum_g, sum_gx);
      auto* dx_row = static_cast<typename S::X*>(args.dx) + row * kCols;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        A x[kVec], dy[kVec], weight[kVec], dx[kVec];
        read(row, slot, i, x, dy, weight);
#pragma unroll
        for (int e = 0; e < kVec; ++e) dx[e] = derivative(dy[e], weight[e], x[e]);
        store_cols<S::kAlignDX, kVec, kCols, P::kCovers>(dx_row, at.col(i), narrow_pack<typename S::X>(dx));
      }
    }
  };
  stream.run(args.rows, first, step, fill, first_pass, second_pass);

  // One partial row per block. Several groups add up theirs, in order, in shared memory that the rows have left.
  const i64 partial = static_cast<i64>(blockIdx.x / S::kCluster) * args.partial_pitch;
  A* const out[2] = {static_cast<A*>(args.dweight_partials) + partial, static_cast<A*>(args.dbias_partials) + partial};
  auto* table = reinterpret_cast<A*>(slots);  // [2][kGroups][kCols]
  if constexpr (kGroups > 1) __syncthreads();
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    if (!(which == 0 ? S::kDWeight : S::kDBias)) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!P::kCovers && at.col(i) >= kCols) break;
      if constexpr (kGroups == 1) {
        Pack<A, kVec> pack;
#pragma unroll
        for (int e = 0; e < kVec; ++e) pack.v[e] = sums[which][i][e];
        store<16>(out[which] + at.col(i), pack);
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) table[(which * kGroups + group) * kCols + at.col(i) + e] = sums[which][i][e];
      }
    }
  }
  if constexpr (kGroups > 1) {
    __syncthreads();
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      if (!(which == 0 ? S::kDWeight : S::kDBias)) continue;
#pragma unroll 1
      for (int c = threadIdx.x; c < kCols; c += kGroups * kThreads) {
        A sum = table[which * kGroups * kCols + c];
#pragma unroll
        for (int g = 1; g < kGroups; ++g) sum += table[(which * kGroups + g) * kCols + c];
        out[which][c] = sum;
      }
    }
  }
  stream.join();
}

}  // namespace kf
