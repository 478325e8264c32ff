// Row norm, backward. With xhat = (x - mean) * rstd, g = dy * (weight_offset + weight) and N columns:
//
//   dx      = rstd * (g - sum(g) / N - xhat * sum(g * xhat) / N)          (RMSNorm: without the first sum)
//   dweight = sum over rows of dy * xhat          dbias = sum over rows of dy
//
// Stages (stages.cuh) change three places (gradients.cuh). x is the normalised row: h as stored, or without a residual
// u, recomputed. With an activation, dy * activation'(xhat * weight + bias) replaces dy. The dx above is the gradient
// at h: dh is added, then it passes dropout and pre-activation. A last gate replaces dy by dy * act(gate), and dgate =
// dy * (xhat * weight + bias) * act'(gate). A first gate makes x = u = x * act(gate), dx = du * act(gate) and dgate =
// du * x * act'(gate). A residual's gate multiplies the gradient at h before dropout, and dgate is a third sum over
// rows, of the gradient at h * dropout(pre_activation(x)). kHf rounds the xhat of dweight and of the activation's
// argument, and that argument; dx has xhat itself.
//
// tree.cuh says who computes what. The grid is persistent: block (or cluster) b takes rows b, b + grid, ... So a thread
// adds up dweight and dbias of its columns, in registers or in shared memory (private, up to 16 bytes wide, conflict
// free). Each block then writes one partial row; sum_partials.cuh adds these in a fixed order. Memory: one read of x
// and dy, one write of dx; with stages one read of dh, one write of dresidual, and with both residual and
// pre-activation, or for dgate, one read of x itself; with a gate one read of it and one write of dgate. With kPrefetch
// the next row is loaded before this row's sums are exchanged. The exchange alternates between two buffers, so one
// barrier per row is enough.
#pragma once

#include "gradients.cuh"

namespace kf {

// The factor of a sample, kept as x is. Past the end it is that of the last sample.
template <class S, class T = Factor<S>> struct FactorOfRow {
  const Place<S>& at;
  const T* row;
  Pack<T, S::kVec> kept[S::kResident ? Place<S>::kVectors : 1];

  __device__ FactorOfRow(const RowNormBwdArgs& args, const Place<S>& at, i64 sample) : at(at) {
    static_assert(!S::kPrefetch);
    const i64 index = row_of_sample<S>(args, min(sample, args.rows - 1));
    row = static_cast<const T*>(args.pre_x) + row_offset<S::kStridedPreX>(args.pre_x_rows, index);
    if constexpr (S::kResident)
#pragma unroll
      for (int i = 0; i < Place<S>::kVectors; ++i) kept[i] = load(i);
  }
  __device__ Pack<T, S::kVec> load(int i) const { return load_row<S, S::kAlignPreX>(row, at.col(i)); }
  __device__ Pack<T, S::kVec> operator()(int i) const {
    if constexpr (S::kResident) return kept[i];
    else return load(i);
  }
};
template <class S> struct FactorOfRow<S, absent> {
  __device__ FactorOfRow(const RowNormBwdArgs&, const Place<S>&, i64) {}
};

// Whether a warp has a row to itself and stops after its rows. Others go on with their block, and repeat the last row
// without effect. Rows of single elements go on, too: the registers that they would save would let another block in, which
// slows RMSNorm down.
template <class S> inline constexpr bool kAlone = S::kWarps == 1 && S::kLanes == 32 && S::kVec > 1;

// The part of a row that a thread has, in registers if S::kResident.
template <class S> struct BackwardRow {
  using A = typename S::Acc;
  using X = typename S::Row;
  using DY = typename S::DY;
  using DH = typename S::DH;
  using PreX = typename S::PreX;
  static constexpr int kVec = S::kVec, kCols = S::kCols, kHeld = S::kResident ? Place<S>::kVectors : 1;
  static constexpr bool kCovers = Place<S>::kCovers;

  Pack<X, kVec> held_x[kHeld];
  Pack<DY, kVec> held_dy[kHeld];
  Pack<DH, kVec> held_dh[kHeld];
  const X* x_row;
  const DY* dy_row;
  A mean, rstd;
  bool live;

  // The row of a sample. Past the end it is the last one.
  __device__ void fetch(const RowNormBwdArgs& args, const Place<S>& at, i64 wanted) {
    live = wanted < args.rows;
    const i64 row = row_of_sample<S>(args, live ? wanted : args.rows - 1);
    x_row = static_cast<const X*>(args.x) + row_offset<S::kStridedX>(args.x_rows, row);
    dy_row = static_cast<const DY*>(args.dy) + row_offset<S::kStridedDY>(args.dy_rows, row);
    if constexpr (S::kResident) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        held_x[i] = load_cols<S::kAlignX, kVec, kCols, kCovers>(x_row, at.col(i));
        held_dy[i] = load_cols<S::kAlignDY, kVec, kCols, kCovers>(dy_row, at.col(i));
        if constexpr (kPresent<DH>) held_dh[i] = load_dh(args, at, row, i);
      }
    }
    mean = S::kRms ? A(0) : static_cast<const A*>(args.mean)[row];
    rstd = static_cast<const A*>(args.rstd)[row];
  }

  // Whether the row exists, so that its gradients are stored and added up.
  __device__ bool is_live() const { return kAlone<S> || S::kRows == 1 || live; }

  __device__ Pack<X, kVec> x(const Place<S>& at, int i) const {
    if constexpr (S::kResident) return held_x[i];
    else return load_cols<S::kAlignX, kVec, kCols, kCovers>(x_row, at.col(i));
  }
  __device__ Pack<DY, kVec> dy(const Place<S>& at, int i) const {
    if constexpr (S::kResident) return held_dy[i];
    else return load_cols<S::kAlignDY, kVec, kCols, kCovers>(dy_row, at.col(i));
  }
  __device__ Pack<DH, kVec> dh(const RowNormBwdArgs& args, const Place<S>& at, i64 row, int i) const {
    if constexpr (S::kResident) return held_dh[i];
    else return load_dh(args, at, row, i);
  }
  // The argument of the pre-activation, if there is one.
  __device__ auto pre_x(const RowNormBwdArgs& args, const Place<S>& at, i64 row, int i) const {
    if constexpr (kPresent<PreX>) {
      const auto* pre_x_row = static_cast<const PreX*>(args.pre_x) + row_offset<S::kStridedPreX>(args.pre_x_rows, row);
      return load_row<S, S::kAlignPreX>(pre_x_row, at.col(i));
    } else if constexpr (S::kPreActivation != 0) {
      return x(at, i);
    } else {
      return Pack<absent, kVec>{};
    }
  }

 private:
  static __device__ Pack<DH, kVec> load_dh(const RowNormBwdArgs& args, const Place<S>& at, i64 row, int i) {
    if constexpr (kPresent<DH>) return load_row<S, S::kAlignDH>(static_cast<const DH*>(args.dh) + row * kCols, at.col(i));
    else return {};
  }
};

// The partial row of a block or a cluster, from the sums of its threads.
template <class S>
__device__ void store_partial_row(const RowNormBwdArgs& args, const Place<S>& at, Accumulators<S>& sums, char* shared) {
  using A = typename S::Acc;
  constexpr int kCols = S::kCols, kVectors = Place<S>::kVectors, kUnroll = S::kResident ? kVectors : 2;
  constexpr bool kCovers = Place<S>::kCovers;
  const i64 partial = static_cast<i64>(blockIdx.x / S::kCluster) * args.partial_pitch + group_offset<S>(args, S::kCols);
  A* const out[3] = {static_cast<A*>(args.dweight_partials) + partial, static_cast<A*>(args.dbias_partials) + partial,
                     static_cast<A*>(args.dgate_partials) + partial};
#pragma unroll
  for (int which = 0; which < kColumnSums<S>; ++which) {
    if (!is_wanted<S>(which)) continue;
    if constexpr (S::kRows == 1) {
#pragma unroll kUnroll
      for (int i = 0; i < kVectors; ++i)
#pragma unroll
        for (int e = 0; e < S::kVec; ++e)
          if (kCovers || at.col(i) < kCols) out[which][at.col(i) + e] = sums.get(which, i, e);
    } else {  // add the block's rows pairwise
      static_assert(S::kSums == KeptSums::kRegisters, "the table takes the place of sums in shared memory");
      auto* table = reinterpret_cast<A*>(shared);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
#pragma unroll
        for (int e = 0; e < S::kVec; ++e)
          if (kCovers || at.col(i) < kCols) table[at.row * kCols + at.col(i) + e] = sums.get(which, i, e);
#pragma unroll 1
      for (int half = S::kRows / 2; half > 0; half /= 2) {
        __syncthreads();
        for (int c = threadIdx.x; c < half * kCols; c += blockDim.x) table[c] += table[half * kCols + c];
      }
      __syncthreads();
      for (int c = threadIdx.x; c < kCols; c += blockDim.x) out[which][c] = table[c];
    }
  }
}

// Stores v times `factor` in a gradient of type T. These are columns of the only row of a group.
template <class S, class T, class A>
__device__ void store_gradient(const RowNormBwdArgs& args, void* gradients, int col, const A (&v)[S::kVec], A factor) {
  constexpr int kBytes = S::kCols * sizeof(T), kAlign = kBytes % 16 == 0 ? 16 : kBytes & -kBytes;
  A products[S::kVec];
#pragma unroll
  for (int e = 0; e < S::kVec; ++e) products[e] = v[e] * factor;
  T* const row = static_cast<T*>(gradients) + group_offset<S>(args, S::kCols);
  store_cols<kAlign, S::kVec, S::kCols, Place<S>::kCovers>(row, col, narrow_pack<T>(products));
}

// The parameters and the column sums that a thread keeps for all its rows.
template <class S> struct BackwardColumns {
  using A = typename S::Acc;
  using Row = BackwardRow<S>;
  static constexpr int kVec = S::kVec, kCols = S::kCols, kVectors = Place<S>::kVectors;
  static constexpr int kUnroll = S::kResident ? kVectors : 2;
  static constexpr bool kSums = S::kSums == KeptSums::kRegisters || S::kSums == KeptSums::kShared;

  const RowNormBwdArgs& args;
  const Place<S>& at;
  Accumulators<S>& sums;
  ColumnWeight<S, kVectors>& weights;
  ColumnBias<S, kVectors>& biases;
  const Before<S>& before;

  __device__ void read(const Row& now, i64 row, int i, A (&x)[kVec], A (&dy)[kVec], A (&weight)[kVec], A (&bias)[kVec]) {
    widen_row<S>(before, now.x(at, i), row, at.col(i), x);
    widen_pack(now.dy(at, i), dy);
    weights.get(i, weight);
    biases.get(i, bias);
  }

  // Adds v times `factor` to a column sum, or stores what is all of it.
  template <int kWhich> __device__ void add(const Row& now, int i, const A (&v)[kVec], A factor) {
    if constexpr (kSums) {
      sums.add(kWhich, i, v, factor);
    } else if constexpr (S::kSums == KeptSums::kStored) {
      if (!now.is_live()) return;
      if constexpr (kWhich == 0) store_gradient<S, typename S::Weight>(args, args.dweight_partials, at.col(i), v, factor);
      if constexpr (kWhich == 1) store_gradient<S, typename S::DBias>(args, args.dbias_partials, at.col(i), v, factor);
      if constexpr (kWhich == 2) store_gradient<S, typename S::ResidualGate>(args, args.dgate_partials, at.col(i), v, factor);
    }
  }

  // The sums of a row over the columns of this thread. The row is also added to the column sums.
  __device__ RowSums<A> first_pass(const Row& now, const FactorOfRow<S>& factor, const Normalize<S>& normalize, i64 row) {
    RowSums<A> row_sums{};
#pragma unroll kUnroll
    for (int i = 0; i < kVectors; ++i) {
      A x[kVec], dys[kVec], weight[kVec], bias[kVec], dyx[kVec];
      widen_row<S>(before, now.x(at, i), row, at.col(i), x);
      widen_pack(now.dy(at, i), dys);
      if constexpr (kPresent<Factor<S>>) apply_factor<S>(before, factor(i), x, dys);
      weights.get(i, weight);
      biases.get(i, bias);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        // Past the row's end dy is zero, so nothing counts if x is finite.
        const bool inside = Place<S>::kCovers || at.col(i) < kCols;
        const A centred = inside && now.is_live() ? normalize.centred(x[e]) : A(0);
        if (!now.is_live()) dys[e] = 0;
        dys[e] = incoming<S>(dys[e], centred * normalize.rstd, weight[e], bias[e]);
        dyx[e] = normalize.share(dys[e], centred, row_sums.add(dys[e], centred, weight[e]));
      }
      if constexpr (S::kDWeight) add<0>(now, i, dyx, normalize.factor());
      if constexpr (S::kDBias) add<1>(now, i, dys, A(1));
    }
    return row_sums;
  }

  // Stores the gradients of a row, from its sums.
  __device__ void second_pass(const Row& now, const FactorOfRow<S>& factor, const Normalize<S>& normalize, i64 row, A total_g,
                              A total_gx) {
    const Derivative<S> derivative(normalize, total_g, total_gx);
    const Outgoing<S> outgoing(args, before.dropout, row);
#pragma unroll kUnroll
    for (int i = 0; i < kVectors; ++i) {
      A x[kVec], dy[kVec], weight[kVec], bias[kVec], g[kVec];
      read(now, row, i, x, dy, weight, bias);
      if constexpr (kPresent<Factor<S>>) {
        if (now.is_live()) outgoing.last_factor(normalize, at.col(i), dy, x, weight, bias, factor(i));
        apply_factor<S>(before, factor(i), x, dy);
      }
      replace_dy<S>(normalize, x, weight, bias, dy);
#pragma unroll
      for (int e = 0; e < kVec; ++e) g[e] = derivative(dy[e], weight[e], x[e]);
      if constexpr (kFactorFirst<S>) {
        if (now.is_live()) outgoing.first_factor(at.col(i), g, now.x(at, i), factor(i));
      } else {
        if (now.is_live()) {
          A dgate[kVec];
          outgoing(at.col(i), g, now.dh(args, at, row, i), now.pre_x(args, at, row, i), load_gate<S>(args, at.col(i)), dgate);
          if constexpr (S::kDGate) add<2>(now, i, dgate, A(1));
        }
      }
    }
  }
};

template <class S> __device__ void row_norm_bwd(const RowNormBwdArgs& args) {
  using A = typename S::Acc;
  using P = Place<S>;
  using Columns = BackwardColumns<S>;
  const P at;
  wait_for_previous_kernel();
  extern __shared__ __align__(16) char shared[];
  Accumulators<S> sums(shared);
  alignas(16) __shared__ A pairs[2][S::kWarps][2];  // pairs are read two at a time
  if constexpr (S::kCluster > 1) {                  // a block must run before others write to its shared memory
    cluster_arrive();
    cluster_wait();
  }
  ColumnWeight<S, P::kVectors> weights(args, at);
  ColumnBias<S, P::kVectors> biases(args, at);
  weights.keep();
  biases.keep();
  const Before<S> before(args);
  Columns columns{args, at, sums, weights, biases, before};
  const auto means = [&] {
    if constexpr (is_second_pass<S>()) return MeansOfRows(args.dweight_partials);
    else return 0;
  }();

  const int behind = kAlone<S> ? 0 : at.row;  // of the first row that goes on with this one
  const i64 step = static_cast<i64>(gridDim.x / S::kCluster) * S::kRows;
  const i64 first = static_cast<i64>(blockIdx.x / S::kCluster) * S::kRows + (kAlone<S> ? at.row : 0);
  int buffer = 0;
  BackwardRow<S> next;
  if (S::kPrefetch && first < args.rows) next.fetch(args, at, first + behind);
  for (i64 base = first; base < args.rows; base += step, buffer ^= 1) {  // the same count for all that go on together
    const i64 sample = base + behind, row = row_of_sample<S>(args, sample);
    BackwardRow<S> now;
    if constexpr (S::kPrefetch) {
      now = next;
      if (base + step < args.rows) next.fetch(args, at, sample + step);
    } else {
      now.fetch(args, at, sample);
    }
    const FactorOfRow<S> factor(args, at, sample);
    // Past the last row, another row's rstd may be infinite or NaN, even times zero.
    const Normalize<S> normalize{now.mean, now.is_live() ? now.rstd : A(0)};
    if constexpr (is_second_pass<S>()) {
      const auto all = means.template of<S>(now.is_live() ? row : 0);
      columns.second_pass(now, factor, normalize, row, static_cast<A>(all.first), static_cast<A>(all.second));
      continue;
    }
    RowSums<A> row_sums = columns.first_pass(now, factor, normalize, row);
    if constexpr (S::kDX || S::kDResidual || is_first_pass<S>()) {
      if constexpr (S::kRms) row_sums = {0, sum_lanes<S::kLanes>(row_sums.gx)};
      else sum_lanes<S::kLanes>(row_sums.g, row_sums.gx);
      if constexpr (S::kWarps > 1) {
        Exchange<S> exchange{pairs[buffer]};
        exchange.put(at.warp, at.lane, row_sums.g, row_sums.gx);
        exchange.barrier();
        exchange.sum_pairs(at.lane, pairs[buffer], row_sums.g, row_sums.gx);
      }
      if constexpr (is_first_pass<S>()) {
        if (now.is_live() && at.leader()) store_sums<S>(args.dx, row, row_sums.g, row_sums.gx);
      } else {
        columns.second_pass(now, factor, normalize, row, row_sums.g, row_sums.gx);
      }
    }
  }

  if constexpr (Columns::kSums) store_partial_row<S>(args, at, sums, shared);
  if constexpr (S::kCluster > 1) {  // no block leaves while another may write to its shared memory
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace kf
