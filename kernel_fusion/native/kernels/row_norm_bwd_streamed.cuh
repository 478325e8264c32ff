// Row norm, backward, streamed through shared memory by persistent blocks, or clusters for long rows (row_stream.cuh),
// with the formulas and the tree of row_norm_bwd.cuh.
//
// A thread holds its columns' sums in registers (kColumnSums x kVectors x kVec) and nothing of the row: it reads x and
// dy from shared memory for the sums and again for dx. The slot also carries what stages need, dh and x beside h, or
// the gate. One block per multiprocessor means few partial rows. Memory: as in row_norm_bwd.cuh.
#pragma once

#include "row_norm_bwd.cuh"
#include "row_stream.cuh"

namespace kf {

// Writes a thread's sums to its block's partial row. Several groups add theirs up in shared memory, in order.
template <class S, class Stream, int kVectors>
__device__ void store_sums(const RowNormBwdArgs& args, const Place<S>& at, int group,
                           float (&sums)[kColumnSums<S>][kVectors][S::kVec], char* shared) {
  using A = float;
  constexpr int kGroups = S::kRows, kOwn = Stream::kCols;  // of the block
  const int first_col = Place<S>::block_begin(), cols = Place<S>::block_cols();
  const i64 partial = static_cast<i64>(blockIdx.x / S::kCluster) * args.partial_pitch + group_offset<S>(args, S::kCols);
  A* const out[3] = {static_cast<A*>(args.dweight_partials) + partial, static_cast<A*>(args.dbias_partials) + partial,
                     static_cast<A*>(args.dgate_partials) + partial};
  auto* table = reinterpret_cast<A*>(shared);  // [kColumnSums][kGroups][kOwn]
#pragma unroll
  for (int which = 0; which < kColumnSums<S>; ++which) {
    if (!is_wanted<S>(which)) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kGroups == 1) {
        store_by_pairs<S::kCols, !S::kGrouped>(out[which], at.col(i), at.lane, sums[which][i]);
      } else if (Place<S>::kCovers || at.col(i) < S::kCols) {
#pragma unroll
        for (int e = 0; e < S::kVec; ++e)
          table[(which * kGroups + group) * kOwn + at.col(i) - first_col + e] = sums[which][i][e];
      }
    }
  }
  if constexpr (kGroups > 1) {
    __syncthreads();
#pragma unroll
    for (int which = 0; which < kColumnSums<S>; ++which) {
      if (!is_wanted<S>(which)) continue;
#pragma unroll 1
      for (int c = threadIdx.x; c < cols; c += kGroups * Stream::kThreads) {
        A sum = table[which * kGroups * kOwn + c];
#pragma unroll
        for (int g = 1; g < kGroups; ++g) sum += table[(which * kGroups + g) * kOwn + c];
        out[which][first_col + c] = sum;
      }
    }
  }
}

// The rows of a group of threads in its ring: what a slot has, how it is filled, and how a thread reads it.
template <class S> struct BackwardRing {
  using A = float;
  using Stream = RowStream<S, 2>;  // a row's statistics arrive separately
  using X = StreamedRows<S, Stream, typename S::Row, S::kAlignX, S::kStridedX>;
  using DY = StreamedRows<S, Stream, typename S::DY, S::kAlignDY, S::kStridedDY>;
  using DH = StreamedRows<S, Stream, typename S::DH, S::kAlignDH>;
  using Other = StreamedRows<S, Stream, Second<S>, S::kAlignPreX, S::kStridedPreX>;
  static constexpr int kSlotBytes = X::kBytes + DY::kBytes + DH::kBytes + Other::kBytes;

  const RowNormBwdArgs& args;
  const Stream& stream;
  Normalize<S>* stats_slot;
  int cols;
  X x_rows;
  DY dy_rows;
  DH dh_rows;
  Other others;

  __device__ BackwardRing(const RowNormBwdArgs& args, const Stream& stream, int first_col, int cols, char* ring,
                          Normalize<S>* stats_slot)
      : args(args), stream(stream), stats_slot(stats_slot), cols(cols),
        x_rows{args.x, &args.x_rows, ring, kSlotBytes, first_col},
        dy_rows{args.dy, &args.dy_rows, x_rows.slots + X::kBytes, kSlotBytes, first_col},
        dh_rows{args.dh, nullptr, dy_rows.slots + DY::kBytes, kSlotBytes, first_col},
        others{args.pre_x, &args.pre_x_rows, dh_rows.slots + DH::kBytes, kSlotBytes, first_col} {}

  __device__ void fill(i64 sample, int slot) const {
    const i64 row = row_of_sample<S>(args, sample);
    const bool last = sample == args.rows - 1;
    Mbarrier* full = &stream.shared.full[slot];
    copy_pieces(full, cols, x_rows.copy(row, slot, last), dy_rows.copy(row, slot, last), dh_rows.copy(row, slot, last),
                others.copy(row, slot, last));
    if constexpr (!S::kRms) copy_word(&stats_slot[slot].mean, static_cast<const A*>(args.mean) + row);
    copy_word(&stats_slot[slot].rstd, static_cast<const A*>(args.rstd) + row);
    copy_arrive(full);
  }
  __device__ Normalize<S> stats(int slot) const {
    Normalize<S> normalize = stats_slot[slot];
    if constexpr (S::kRms) normalize.mean = 0;
    return normalize;
  }
  __device__ auto x(i64 row, int slot, int i) const { return x_rows.at(row, slot, stream.at.col(i)); }
  __device__ auto other(i64 row, int slot, int i) const { return others.at(row, slot, stream.at.col(i)); }
  // The argument of the pre-activation, if there is one.
  __device__ auto pre_x(i64 row, int slot, int i) const {
    if constexpr (kPresent<typename S::PreX>) return other(row, slot, i);
    else if constexpr (S::kPreActivation != 0) return x(row, slot, i);
    else return Pack<absent, S::kVec>{};
  }
};

// The two passes of a thread over a row, and the numbers that it keeps for all rows.
template <class S> struct StreamedBackward {
  using A = float;
  using Ring = BackwardRing<S>;
  using Pair = typename Ring::Stream::Pair;
  static constexpr int kVec = S::kVec, kCols = S::kCols, kVectors = Place<S>::kVectors;

  const RowNormBwdArgs& args;
  const Place<S>& at;
  const Ring& ring;
  ColumnWeight<S, kVectors>& weights;
  ColumnBias<S, kVectors>& biases;
  const Before<S>& before;
  A (&sums)[kColumnSums<S>][kVectors][kVec];

  __device__ void read(i64 row, int slot, int i, A (&x)[kVec], A (&dy)[kVec], A (&weight)[kVec], A (&bias)[kVec]) const {
    widen_row<S>(before, ring.x(row, slot, i), row, at.col(i), x);
    widen_pack(ring.dy_rows.at(row, slot, at.col(i)), dy);
    weights.get(i, weight);
    biases.get(i, bias);
  }

  __device__ Pair first_pass(i64 sample, int slot) const {
    const i64 row = row_of_sample<S>(args, sample);
    RowSums<A> row_sums{};
    const Normalize<S> normalize = ring.stats(slot);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A x[kVec], dy[kVec], weight[kVec], bias[kVec];
      read(row, slot, i, x, dy, weight, bias);
      if constexpr (kPresent<Factor<S>>) apply_factor<S>(before, ring.other(row, slot, i), x, dy);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        // Past the row's end dy is zero, and xhat finite until it is rounded.
        const bool inside = Place<S>::kCovers || !kHf<S> || at.col(i) < kCols;
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
  }

  __device__ void second_pass(i64 sample, int slot, const Pair& sums_of_g) const {
    if constexpr (S::kDX || S::kDResidual) {
      const i64 row = row_of_sample<S>(args, sample);
      const Normalize<S> normalize = ring.stats(slot);
      const Derivative<S> derivative(normalize, sums_of_g.first, sums_of_g.second);
      const Outgoing<S> outgoing(args, before.dropout, row);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        A x[kVec], dy[kVec], weight[kVec], bias[kVec], g[kVec];
        read(row, slot, i, x, dy, weight, bias);
        if constexpr (kPresent<Factor<S>>) {
          const auto factor = ring.other(row, slot, i);
          outgoing.last_factor(normalize, at.col(i), dy, x, weight, bias, factor);
          apply_factor<S>(before, factor, x, dy);
        }
        replace_dy<S>(normalize, x, weight, bias, dy);
#pragma unroll
        for (int e = 0; e < kVec; ++e) g[e] = derivative(dy[e], weight[e], x[e]);
        if constexpr (kFactorFirst<S>) outgoing.first_factor(at.col(i), g, ring.x(row, slot, i), ring.other(row, slot, i));
        else {
          A dgate[kVec];
          outgoing(at.col(i), g, ring.dh_rows.at(row, slot, at.col(i)), ring.pre_x(row, slot, i), load_gate<S>(args, at.col(i)),
                   dgate);
          if constexpr (S::kDGate)
#pragma unroll
            for (int e = 0; e < kVec; ++e) sums[2][i][e] += dgate[e];
        }
      }
    }
  }
};

template <class S> __device__ void row_norm_bwd_streamed(const RowNormBwdArgs& args) {
  using P = Place<S>;
  using Ring = BackwardRing<S>;
  using Stream = typename Ring::Stream;
  using Pair = typename Stream::Pair;
  constexpr int kVec = S::kVec, kVectors = P::kVectors, kGroups = S::kRows, kThreads = Stream::kThreads;
  constexpr int kRingBytes = S::kSlots * Ring::kSlotBytes;
  extern __shared__ __align__(128) char slots[];  // [kGroups][kSlots][kSlotBytes], then weight and bias
  __shared__ typename Stream::Shared shared[kGroups];
  __shared__ Normalize<S> stats[kGroups][S::kSlots];
  __shared__ typename Stream::Pacing pacing;

  const int group = threadIdx.x / kThreads, member = threadIdx.x % kThreads;
  const P at(member);
  Stream stream{*settled_shared(&shared[group]), pacing, at, group, member};
  stream.init();
  const int first_col = Place<S>::block_begin(), cols = Place<S>::block_cols();
  char* const own_slots = settled_shared(slots + group * kRingBytes);
  const Ring ring(args, stream, first_col, cols, own_slots, settled_shared(stats[group]));
  const auto fill = [&](i64 sample, int slot) { ring.fill(sample, slot); };
  const i64 first = static_cast<i64>(blockIdx.x / S::kCluster) * kGroups + group;
  const i64 step = static_cast<i64>(gridDim.x / S::kCluster) * kGroups;
  wait_for_previous_kernel(ring.x_rows.piece(row_of_sample<S>(args, first)).source);

  float sums[kColumnSums<S>][kVectors][kVec] = {};
  char* const kept = slots + kGroups * kRingBytes;
  constexpr int kKept = kVectors - S::kUnkept;
  constexpr int kWeightBytes =
      S::kKeeps == KeptParameters::kShared ? kKept * kThreads * sizeof(Pack<typename S::Weight, kVec>) : 0;
  ColumnWeight<S, kVectors> weights(args, at, kept, kThreads, member);
  ColumnBias<S, kVectors> biases(args, at, kept + kWeightBytes, kThreads, member);
  // Parameters go first: loads issued after the rows' would arrive after them.
  stream.start(args.rows, first, step, fill);
  weights.keep(group == 0);
  biases.keep(group == 0);
  if (S::kKeeps == KeptParameters::kShared) __syncthreads();
  const Before<S> before(args);
  const StreamedBackward<S> thread{args, at, ring, weights, biases, before, sums};
  const auto first_pass = [&](i64 sample, int slot) { return thread.first_pass(sample, slot); };
  const auto combine = [&](i64, typename Stream::Sums all) {
    Pair pair{};
    Exchange<S>::sum_pairs(at.lane, all, pair.first, pair.second);
    return pair;
  };
  const auto second_pass = [&](i64 sample, int slot, const Pair& pair) { thread.second_pass(sample, slot, pair); };
  // Rows that all fit into the slots may have a loop without ring and pace.
  const bool are_few = S::kFew && args.rows <= S::kSlots * step;
  if constexpr (S::kFew)
    if (are_few) stream.run_few(args.rows, first, step, first_pass, combine, second_pass);
  if (!are_few) stream.run(args.rows, first, step, fill, first_pass, combine, second_pass);

  if constexpr (S::kRows > 1) __syncthreads();  // the rows have left the slots
  store_sums<S, Stream>(args, at, group, sums, slots);
  stream.join();
}

}  // namespace kf
