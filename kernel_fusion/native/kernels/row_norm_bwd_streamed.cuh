// Row norm, backward, streamed through shared memory by persistent blocks, or clusters for long rows (row_stream.cuh). The
// formulas and the tree are those of row_norm_bwd.cuh; here is another executor of them.
//
// A thread holds the dweight and dbias of its columns in registers (2 x kVectors x kVec of them) and nothing of the row: it
// reads x and dy from shared memory once for the sums and once for dx. What only stages need, dh and x beside h, comes through
// the slot too, so that its loads are ahead. One block per multiprocessor also means few partial rows for the finish to add.
// Memory: as in row_norm_bwd.cuh.
#pragma once

#include "row_norm_bwd.cuh"
#include "row_stream.cuh"

namespace kf {

template <class S> __device__ void row_norm_bwd_streamed(const RowNormBwdArgs& args) {
  using A = float;
  using P = Place<S>;
  using Stream = RowStream<S, 2>;  // the statistics of a row arrive by themselves
  using Pair = typename Stream::Pair;
  using X = Piece<typename S::Row, S::kAlignX, Stream::kCols, S::kCols>;
  using DY = Piece<typename S::DY, S::kAlignDY, Stream::kCols, S::kCols>;
  using DH = Piece<typename S::DH, S::kAlignDH, Stream::kCols, S::kCols>;
  using PreX = Piece<typename S::PreX, S::kAlignPreX, Stream::kCols, S::kCols>;
  constexpr int kVec = S::kVec, kCols = S::kCols, kVectors = P::kVectors, kGroups = S::kRows, kThreads = Stream::kThreads;
  constexpr int kSlotBytes = X::kBytes + DY::kBytes + DH::kBytes + PreX::kBytes;
  extern __shared__ __align__(128) char slots[];  // [kGroups][kSlots][kSlotBytes], then weight and bias
  __shared__ typename Stream::Shared shared[kGroups];
  __shared__ Normalize<S> stats[kGroups][S::kSlots];
  __shared__ typename Stream::Pacing pacing;

  const int group = threadIdx.x / kThreads, member = threadIdx.x % kThreads;
  const P at(member);
  Stream stream{*settled_shared(&shared[group]), pacing, at, group, member};
  stream.init();
  const int first_col = Stream::first_col(), cols = Stream::cols();
  char* const ring = settled_shared(slots + group * S::kSlots * kSlotBytes);
  Normalize<S>* const stats_slot = settled_shared(stats[group]);
  const auto x_slot = [&](int s) { return ring + s * kSlotBytes; };
  const auto dy_slot = [&](int s) { return x_slot(s) + X::kBytes; };
  const auto dh_slot = [&](int s) { return dy_slot(s) + DY::kBytes; };
  const auto pre_x_slot = [&](int s) { return dh_slot(s) + DH::kBytes; };
  const auto x_of = [&](i64 row) {
    return X{static_cast<const typename S::Row*>(args.x) + row_offset<S::kStridedX>(args.x_rows, row) + first_col};
  };
  const auto dy_of = [&](i64 row) {
    return DY{static_cast<const typename S::DY*>(args.dy) + row_offset<S::kStridedDY>(args.dy_rows, row) + first_col};
  };
  const auto dh_of = [&](i64 row) { return DH{static_cast<const typename S::DH*>(args.dh) + row * kCols + first_col}; };
  const auto pre_x_of = [&](i64 row) {
    const i64 offset = row_offset<S::kStridedPreX>(args.pre_x_rows, row) + first_col;
    return PreX{static_cast<const typename S::PreX*>(args.pre_x) + offset};
  };
  const auto fill = [&](i64 row, int slot) {
    const i64 end = args.rows - 1;
    Mbarrier* full = &stream.shared.full[slot];
    copy_pieces(full, cols, PieceCopy<X>{x_of(row), x_of(end), x_slot(slot)},
                PieceCopy<DY>{dy_of(row), dy_of(end), dy_slot(slot)}, PieceCopy<DH>{dh_of(row), dh_of(end), dh_slot(slot)},
                PieceCopy<PreX>{pre_x_of(row), pre_x_of(end), pre_x_slot(slot)});
    if constexpr (!S::kRms) copy_word(&stats_slot[slot].mean, static_cast<const A*>(args.mean) + row);
    copy_word(&stats_slot[slot].rstd, static_cast<const A*>(args.rstd) + row);
    copy_arrive(full);
  };
  const i64 first = static_cast<i64>(blockIdx.x / S::kCluster) * kGroups + group;
  const i64 step = static_cast<i64>(gridDim.x / S::kCluster) * kGroups;
  wait_for_previous_kernel(x_of(first).source);

  A sums[2][kVectors][kVec] = {};  // dweight, dbias
  char* const kept = slots + kGroups * S::kSlots * kSlotBytes;
  constexpr int kKept = kVectors - S::kUnkept;
  constexpr int kWeightBytes =
      S::kKeeps == KeptParameters::kShared ? kKept * kThreads * sizeof(Pack<typename S::Weight, kVec>) : 0;
  ColumnWeight<S, kVectors> weights(args, at, kept, kThreads, member);
  ColumnBias<S, kVectors> biases(args, at, kept + kWeightBytes, kThreads, member);
  // Not before: what is asked for behind so many rows comes after them. 1024x8192 bf16 took 21.5 us on an H200 and takes
  // 20.5 so (torch 2.11.0+cu130, in no result file).
  stream.start(args.rows, first, step, fill);
  weights.keep(group == 0);
  biases.keep(group == 0);
  if (S::kKeeps == KeptParameters::kShared) __syncthreads();
  const Before<S, typename S::DY> before(args);
  const auto stats_of = [&](int slot) {
    Normalize<S> normalize = stats_slot[slot];
    if constexpr (S::kRms) normalize.mean = 0;
    return normalize;
  };
  const auto read = [&](i64 row, int slot, int i, A(&x)[kVec], A(&dy)[kVec], A(&weight)[kVec], A(&bias)[kVec]) {
    const auto* x_row = x_of(row).row_in(x_slot(slot), first_col);
    const auto* dy_row = dy_of(row).row_in(dy_slot(slot), first_col);
    widen_row<S>(before, load_row<S, S::kAlignX>(x_row, at.col(i)), row, at.col(i), x);
    widen_pack(load_row<S, S::kAlignDY>(dy_row, at.col(i)), dy);
    weights.get(i, weight);
    biases.get(i, bias);
  };
  const auto dh_at = [&](i64 row, int slot, int i) {
    if constexpr (kPresent<typename S::DH>)
      return load_row<S, S::kAlignDH>(dh_of(row).row_in(dh_slot(slot), first_col), at.col(i));
    else return Pack<absent, kVec>{};
  };
  const auto pre_x_at = [&](i64 row, int slot, int i) {
    if constexpr (kPresent<typename S::PreX>)
      return load_row<S, S::kAlignPreX>(pre_x_of(row).row_in(pre_x_slot(slot), first_col), at.col(i));
    else if constexpr (S::kPreActivation != 0)
      return load_row<S, S::kAlignX>(x_of(row).row_in(x_slot(slot), first_col), at.col(i));
    else return Pack<absent, kVec>{};
  };
  const auto first_pass = [&](i64 row, int slot) {
    RowSums<A> row_sums{};
    const Normalize<S> normalize = stats_of(slot);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A x[kVec], dy[kVec], weight[kVec], bias[kVec];
      read(row, slot, i, x, dy, weight, bias);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        // Past the row's end dy is zero, and xhat finite until it is rounded.
        const bool inside = P::kCovers || !S::kHf || at.col(i) < kCols;
        const A centred = inside ? normalize.centred(x[e]) : A(0);
        dy[e] = incoming<S>(dy[e], centred * normalize.rstd, weight[e], bias[e]);
        const A dyx = row_sums.add(dy[e], centred, weight[e]);
        if constexpr (S::kDWeight)
          sums[0][i][e] = fused(normalize.share(dy[e], centred, dyx), normalize.factor(), sums[0][i][e]);
        if constexpr (S::kDBias) sums[1][i][e] += dy[e];
      }
    }
    Pair own{S::kRms ? A(0) : row_sums.g, row_sums.gx};
    if constexpr (S::kRms) own.second = sum_lanes<32>(own.second);
    else sum_lanes<32>(own.first, own.second);
    return own;
  };
  const auto combine = [&](i64, typename Stream::Sums all) {
    Pair pair{};
    Exchange<S>::sum_pairs(at.lane, all, pair.first, pair.second);
    return pair;
  };
  const auto second_pass = [&](i64 row, int slot, const Pair& sums_of_g) {
    if constexpr (S::kDX || S::kDResidual) {
      const Normalize<S> normalize = stats_of(slot);
      const Derivative<S> derivative(normalize, sums_of_g.first, sums_of_g.second);
      const Outgoing<S> outgoing(args, before.dropout, row);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        A x[kVec], dy[kVec], weight[kVec], bias[kVec], g[kVec];
        read(row, slot, i, x, dy, weight, bias);
        replace_dy<S>(normalize, x, weight, bias, dy);
#pragma unroll
        for (int e = 0; e < kVec; ++e) g[e] = derivative(dy[e], weight[e], x[e]);
        outgoing(at.col(i), g, dh_at(row, slot, i), pre_x_at(row, slot, i));
      }
    }
  };
  // No more rows than are in the slots at once have a loop without ring and pace, where the plan has one.
  const bool are_few = S::kFew && args.rows <= S::kSlots * step;
  if constexpr (S::kFew)
    if (are_few) stream.run_few(args.rows, first, step, first_pass, combine, second_pass);
  if (!are_few) stream.run(args.rows, first, step, fill, first_pass, combine, second_pass);

  // One partial row per block. Several groups add up theirs, in order, in shared memory that the rows have left.
  const i64 partial = static_cast<i64>(blockIdx.x / S::kCluster) * args.partial_pitch;
  A* const out[2] = {static_cast<A*>(args.dweight_partials) + partial, static_cast<A*>(args.dbias_partials) + partial};
  constexpr int kOwn = Stream::kCols;         // of the block
  auto* table = reinterpret_cast<A*>(slots);  // [2][kGroups][kOwn]
  if constexpr (kGroups > 1) __syncthreads();
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    if (!(which == 0 ? S::kDWeight : S::kDBias)) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kGroups == 1) {
        store_by_pairs<kCols>(out[which], at.col(i), at.lane, sums[which][i]);
      } else if (P::kCovers || at.col(i) < kCols) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) table[(which * kGroups + group) * kOwn + at.col(i) - first_col + e] = sums[which][i][e];
      }
    }
  }
  if constexpr (kGroups > 1) {
    __syncthreads();
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      if (!(which == 0 ? S::kDWeight : S::kDBias)) continue;
#pragma unroll 1
      for (int c = threadIdx.x; c < cols; c += kGroups * kThreads) {
        A sum = table[which * kGroups * kOwn + c];
#pragma unroll
        for (int g = 1; g < kGroups; ++g) sum += table[(which * kGroups + g) * kOwn + c];
        out[which][first_col + c] = sum;
      }
    }
  }
  stream.join();
}

}  // namespace kf
