// Row norm, backward, for rows that a block reads through shared memory (pipeline.cuh). The formulas and the tree are
// those of row_norm_bwd.cuh; here is another executor of them.
//
// A block (or the cluster, for long rows) is persistent. Each of its kRows groups of threads takes a row at a time and has
// a ring of kStages slots, into which the rows to come are copied whatever the threads do. A slot is free again once the
// group has exchanged the sums of the next row: every thread has then written its dx of this one. So the ring needs no
// barrier of its own for that, and no warp to serve it. A thread holds the dweight and dbias of its columns in registers
// (2 x kVectors x kVec of them) and nothing of the row: it reads x and dy from shared memory once for the sums and once for
// dx. One block per multiprocessor also means few partial rows for the finish to add.
// Memory: one read of x and of dy, one write of dx.
#pragma once

#include "pipeline.cuh"
#include "row_norm_bwd.cuh"

namespace kf {

// The slots of one group and the copies into them.
template <class S> struct RowRing {
  using P = Place<S>;
  using X = typename S::X;
  using DY = typename S::DY;
  static constexpr int kThreads = S::kWarps / S::kCluster * 32, kCols = kThreads * S::kVec;  // of a group, in one chunk
  static constexpr int kXBytes = kCols * sizeof(X), kDYBytes = kCols * sizeof(DY);
  static constexpr int kSlotBytes = P::kVectors * (kXBytes + kDYBytes);

  char* slots;    // shared, [kStages][kSlotBytes]: the vectors of x, then those of dy
  Mbarrier* full;  // shared, [kStages]
  int slot = 0;
  unsigned parity = 0;

  // One thread starts copying `row`, if there is one, into slot `target`.
  __device__ void fill(const RowNormBwdArgs& args, i64 row, int target, int first_col) const {
    if (row >= args.rows) return;
    const X* x = static_cast<const X*>(args.x) + row_offset<S::kStridedX>(args.x_rows, row) + first_col;
    const DY* dy = static_cast<const DY*>(args.dy) + row_offset<S::kStridedDY>(args.dy_rows, row) + first_col;
    char* to = slots + target * kSlotBytes;
    const auto cols_at = [&](int k) { return P::kCovers ? kCols : max(0, min(kCols, S::kCols - first_col - k * P::kSpan)); };
    int cols = 0;
#pragma unroll
    for (int k = 0; k < P::kVectors; ++k) cols += cols_at(k);
    mbarrier_arrive_expect(&full[target], cols * (sizeof(X) + sizeof(DY)));
#pragma unroll
    for (int k = 0; k < P::kVectors; ++k) {
      if (cols_at(k) == 0) break;
      bulk_load(to + k * kXBytes, x + k * P::kSpan, cols_at(k) * sizeof(X), &full[target]);
      bulk_load(to + P::kVectors * kXBytes + k * kDYBytes, dy + k * P::kSpan, cols_at(k) * sizeof(DY), &full[target]);
    }
  }

  __device__ void wait() const { mbarrier_wait(&full[slot], parity); }
  __device__ int previous() const { return slot == 0 ? S::kStages - 1 : slot - 1; }
  __device__ void advance() {
    if (++slot == S::kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
  __device__ Pack<X, S::kVec> x(int i, int member) const {
    const auto* p = reinterpret_cast<const X*>(slots + slot * kSlotBytes + i * kXBytes);
    return load<16, S::kVec>(p + member * S::kVec);
  }
  __device__ Pack<DY, S::kVec> dy(int i, int member) const {
    const auto* p = reinterpret_cast<const DY*>(slots + slot * kSlotBytes + P::kVectors * kXBytes + i * kDYBytes);
    return load<16, S::kVec>(p + member * S::kVec);
  }
};

template <class S> __device__ void row_norm_bwd_staged(const RowNormBwdArgs& args) {
  using A = float;
  using P = Place<S>;
  using R = RowRing<S>;
  using X = typename S::X;
  using Weight = typename S::Weight;
  constexpr int kVec = S::kVec, kCols = S::kCols, kVectors = P::kVectors, kGroups = S::kRows, kThreads = R::kThreads;
  extern __shared__ __align__(128) char shared[];
  __shared__ Mbarrier full[kGroups][S::kStages], exchanged[kGroups][2];
  __shared__ A slots[2][kGroups][S::kWarps][2];

  const int group = threadIdx.x / kThreads, member = threadIdx.x % kThreads;
  const P at(member);
  R ring{shared + group * (S::kStages * R::kSlotBytes), full[group]};
  const i64 first = static_cast<i64>(blockIdx.x / S::kCluster) * kGroups + group;
  const i64 step = static_cast<i64>(gridDim.x / S::kCluster) * kGroups;
  const int first_col = at.warp * 32 * kVec;  // of the group's first thread, which alone uses it
  if (member == 0) {
    for (int s = 0; s < S::kStages; ++s) mbarrier_init(&full[group][s], 1);
    // In a block each warp announces its sums; in a cluster they are counted as they arrive.
    for (int b = 0; b < 2; ++b) mbarrier_init(&exchanged[group][b], S::kCluster > 1 ? 1 : S::kWarps);
    mbarrier_init_fence();
    for (int s = 0; s < S::kStages - 1; ++s) ring.fill(args, first + s * step, s, first_col);
  }
  __syncthreads();
  if constexpr (S::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }

  A sums[2][kVectors][kVec] = {};  // dweight, dbias
  // A short weight stays in registers as loaded. A longer one waits in shared memory, 16 bytes of a thread beside those of
  // the next: in registers the compiler would widen it once, before the loop, into more of them than there are.
  constexpr bool kInRegisters = kPresent<Weight> && sizeof(Pack<Weight, kVec>) * kVectors <= 32;
  constexpr int kPieces = sizeof(Pack<Weight, kVec>) <= 16 ? 1 : sizeof(Pack<Weight, kVec>) / 16, kPieceVec = kVec / kPieces;
  using Piece = Pack<Weight, kPieceVec>;
  auto* weights = reinterpret_cast<Piece*>(shared + kGroups * S::kStages * R::kSlotBytes);  // [kVectors][kPieces][kThreads]
  Pack<Weight, kVec> kept[kInRegisters ? kVectors : 1];
  if constexpr (kInRegisters) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      kept[i] = load_cols<S::kAlignWeight, kVec, kCols, P::kCovers>(static_cast<const Weight*>(args.weight), at.col(i));
  } else if constexpr (kPresent<Weight>) {
    if (group == 0)
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
#pragma unroll
        for (int j = 0; j < kPieces; ++j)
          weights[(i * kPieces + j) * kThreads + member] = load_cols<S::kAlignWeight, kPieceVec, kCols, P::kCovers>(
              static_cast<const Weight*>(args.weight), at.col(i) + j * kPieceVec);
    __syncthreads();
  }
  const auto weight_at = [&](int i, A (&w)[kVec]) {
    if constexpr (kInRegisters) {
      keep_packed(kept[i]);
      return widen_weight<S>(kept[i], args.weight_offset, w);
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      A piece[kPieceVec];
      if constexpr (kPresent<Weight>) widen_weight<S>(weights[(i * kPieces + j) * kThreads + member], args.weight_offset, piece);
#pragma unroll
      for (int e = 0; e < kPieceVec; ++e) w[j * kPieceVec + e] = kPresent<Weight> ? piece[e] : A(1);
    }
  };
  A next_mean = 0, next_rstd = 0;
  const auto fetch_stats = [&](i64 row) {
    if (row >= args.rows) return;
    if constexpr (!S::kRms) next_mean = static_cast<const A*>(args.mean)[row];
    next_rstd = static_cast<const A*>(args.rstd)[row];
  };

  int buffer = 0;
  unsigned exchange_parity = 0;
  fetch_stats(first);
  for (i64 row = first; row < args.rows; row += step, ring.advance()) {
    const Normalize<S> normalize{next_mean, next_rstd};
    fetch_stats(row + step);
    ring.wait();
    A sum_g = 0, sum_gx = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!P::kCovers && at.col(i) >= kCols) break;
      A x[kVec], dy[kVec], weight[kVec];
      widen_pack(ring.x(i, member), x);
      widen_pack(ring.dy(i, member), dy);
      weight_at(i, weight);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const A xhat = normalize(x[e]), g = rounded_product(dy[e], weight[e]);
        sum_g += g;
        sum_gx += g * xhat;
        if constexpr (S::kDWeight) sums[0][i][e] += dy[e] * xhat;
        if constexpr (S::kDBias) sums[1][i][e] += dy[e];
      }
    }
    sum_g = S::kRms ? A(0) : sum_lanes<32>(sum_g);
    sum_gx = sum_lanes<32>(sum_gx);
    if constexpr (S::kWarps > 1) {
      auto& mine = slots[buffer][group];
      Mbarrier* all = &exchanged[group][buffer];
      if constexpr (S::kCluster > 1) {
        if (threadIdx.x == 0) mbarrier_arrive_expect(all, S::kWarps * 2 * sizeof(A));
        if (at.lane < S::kCluster) store_cluster_counted(mine[at.warp], at.lane, sum_g, sum_gx, all);
      } else if (at.lane == 0) {
        mine[at.warp][0] = sum_g;
        mine[at.warp][1] = sum_gx;
        mbarrier_arrive(all);
      }
      mbarrier_wait(all, exchange_parity);
      exchange_parity ^= buffer;
      if constexpr (!S::kRms) sum_g = Exchange<S>::sum(at.lane, [&](int w) { return mine[w][0]; });
      sum_gx = Exchange<S>::sum(at.lane, [&](int w) { return mine[w][1]; });
      buffer ^= 1;
    }
    if (member == 0) ring.fill(args, row + (S::kStages - 1) * step, ring.previous(), first_col);

    const Derivative<S> derivative(normalize.rstd, sum_g, sum_gx);
    X* dx_row = static_cast<X*>(args.dx) + row * kCols;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!P::kCovers && at.col(i) >= kCols) break;
      A x[kVec], dy[kVec], weight[kVec], dx[kVec];
      widen_pack(ring.x(i, member), x);
      widen_pack(ring.dy(i, member), dy);
      weight_at(i, weight);
#pragma unroll
      for (int e = 0; e < kVec; ++e) dx[e] = derivative(rounded_product(dy[e], weight[e]), normalize(x[e]));
      if constexpr (S::kDX) store<16>(dx_row + at.col(i), narrow_pack<X>(dx));
    }
  }

  // The groups of the block add up their sums, in order, in shared memory behind the rows and the weight.
  const i64 partial = static_cast<i64>(blockIdx.x / S::kCluster) * args.partial_pitch;
  constexpr int kWeightBytes = kPresent<Weight> ? kVectors * kThreads * sizeof(Pack<Weight, kVec>) : 0;
  auto* table =  // [kGroups - 1][kVectors][kVec][kThreads]
      reinterpret_cast<A*>(shared + kGroups * S::kStages * R::kSlotBytes + kWeightBytes);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    if (!(which == 0 ? S::kDWeight : S::kDBias)) continue;
    A* out = static_cast<A*>(which == 0 ? args.dweight_partials : args.dbias_partials) + partial;
    const auto entry = [&](int g, int i, int e) -> A& {
      return table[(((g - 1) * kVectors + i) * kVec + e) * kThreads + member];
    };
    if constexpr (kGroups > 1) {
      __syncthreads();
      if (group > 0)
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
#pragma unroll
          for (int e = 0; e < kVec; ++e) entry(group, i, e) = sums[which][i][e];
      __syncthreads();
    }
    if (group > 0) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!P::kCovers && at.col(i) >= kCols) break;
      Pack<A, kVec> pack;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        pack.v[e] = sums[which][i][e];
        for (int g = 1; g < kGroups; ++g) pack.v[e] += entry(g, i, e);
      }
      store<16>(out + at.col(i), pack);
    }
  }
  if constexpr (S::kCluster > 1) {  // no block leaves while another may still write to its shared memory
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace kf
