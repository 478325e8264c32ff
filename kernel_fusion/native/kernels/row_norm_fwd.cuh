// Row norm, forward:  y = activation((x - mean) * rstd * (weight_offset + weight) + bias),   rstd = 1 / sqrt(var + eps)
// (RMSNorm: mean = 0 and var = E[x^2]). With stages before the norm, h replaces x (stages.cuh).
//
// tree.cuh says who computes what; grid = rows / rows per block. Memory: one read of x, one write of y; weight and bias
// come from L1/L2. A residual adds a read and a write. A gate adds a read, beside x if first, beside the weight if
// last; a residual's comes from L1/L2. The row stays in registers as loaded (kVectors packs per thread), or as S::Row
// with stages; row_norm_fwd_long.cuh takes longer rows.
#pragma once

#include "async_copy.cuh"
#include "codes.cuh"
#include "moments.cuh"
#include "rows.cuh"
#include "stages.cuh"
#include "tree.cuh"

namespace kf {

// Computes y of one vector of a row.
template <class S> struct Affine {
  using A = typename S::Acc;
  A mean, rstd;

  template <int kVec, class Weight, class Bias, class Factor>
  __device__ Pack<typename S::Y, kVec> operator()(const Pack<typename S::Row, kVec>& x, const Weight& weight, const Bias& bias,
                                                  const Factor& factor, double offset) const {
    A y[kVec];
    unrounded(x, weight, bias, factor, offset, y);
    return narrow_pack<typename S::Y>(y);
  }

  template <int kVec, class Weight, class Bias, class Factor>
  __device__ void unrounded(const Pack<typename S::Row, kVec>& x, const Weight& weight, const Bias& bias, const Factor& factor,
                            double offset, A (&y)[kVec]) const {
    widen_pack(x, y);
#pragma unroll
    for (int e = 0; e < kVec; ++e) y[e] = (S::kRms ? y[e] : y[e] - mean) * rstd;
    if constexpr (kHf<S>) Roundings<S>::all(y);
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
    // If nothing follows, the store may round.
    constexpr bool kStored = S::kActivation == 0 && !kFactorLast<S> && kSame<typename S::Y, typename Roundings<S>::Normalized>;
    if constexpr (Roundings<S>::kArgument && !kStored) Roundings<S>::all(y);
    using M = typename MathFor<A, typename S::Y>::type;
    activate<S::kActivation, M>(y);
    if constexpr (kFactorLast<S>) multiply_factor<S, M>(factor, y);
  }
};

template <class S, class A> __device__ void store_stats(const RowNormFwdArgs& args, i64 row, A mean, A rstd) {
  if constexpr (!S::kRms) static_cast<A*>(args.mean)[row] = mean;
  static_cast<A*>(args.rstd)[row] = rstd;
}

// The row that the lanes, the block or the cluster of this thread have: its place in each tensor, and its vectors by their
// first columns.
template <class S> struct ForwardRow {
  using X = typename S::X;
  using Residual = typename S::Residual;
  using P = Place<S>;
  static constexpr int kVec = S::kVec;
  i64 index;
  bool live;  // lanes past the end still take part in shuffles
  const X* x;
  const Beside<S>* beside;
  const RowNormFwdArgs& args;

  template <class At>
  __device__ ForwardRow(const RowNormFwdArgs& args, const At& at)
      : ForwardRow(args, static_cast<i64>(blockIdx.x / S::kCluster) * S::kRows + at.row) {}
  __device__ ForwardRow(const RowNormFwdArgs& args, i64 wanted) : args(args) {
    live = S::kRows == 1 || wanted < args.rows;
    index = row_of_sample<S>(args, live ? wanted : args.rows - 1);
    x = static_cast<const X*>(args.x) + row_offset<S::kStridedX>(args.x_rows, index);
    beside = static_cast<const Beside<S>*>(args.residual) + row_offset<S::kStridedResidual>(args.residual_rows, index);
  }
  // This is computed late, to save registers.
  __device__ Residual* h() const { return static_cast<Residual*>(args.h) + offset(); }
  __device__ typename S::Y* y() const { return static_cast<typename S::Y*>(args.y) + offset(); }
  // This is computed once for narrow vectors. The compiler would compute it for every store.
  __device__ i64 offset() const { return P::kNarrow ? settled(index * S::kCols) : index * S::kCols; }

  template <bool kLast = false> __device__ Pack<X, kVec> load_x(int col) const {
    return load_cols<S::kAlignX, kVec, S::kCols, P::kCovers, kLast>(x, col);
  }
  // The rows of stages that are read before the norm, and those that are read after it.
  __device__ Pack<Addend<S>, kVec> load_addend(int col) const {
    if constexpr (kFactorLast<S>) return {};
    else return load_row<S, S::kAlignResidual>(beside, col);
  }
  __device__ Pack<LastFactor<S>, kVec> load_last_factor(int col) const {
    if constexpr (kFactorLast<S>) return load_row<S, S::kAlignResidual>(beside, col);
    else return {};
  }
  __device__ void store_h(Residual* h, int col, const Pack<typename S::Row, kVec>& pack) const {
    if constexpr (kAddsResidual<S>)
      if (live) store_cols<16, kVec, S::kCols, P::kCovers>(h, col, pack);
  }
  template <bool kLast = false>
  __device__ void store_y(typename S::Y* y, int col, const Pack<typename S::Y, kVec>& pack) const {
    if (live) store_cols<S::kAlignY, kVec, S::kCols, P::kCovers, kLast>(y, col, pack);
  }
};

// The moments of this thread's warp, and how they reach the row's other warps.
template <class S, class X> __device__ Moments<S> moments_of(const Place<S>& at, const X& x_at) {
  return moments_of_warp<S>(at, x_at);
}
template <class S> __device__ void put_moments(Exchange<S>& exchange, const Place<S>& at, const Moments<S>& moments) {
  exchange.put(at.warp, at.lane, moments.mean, moments.squares);
}

// The same for all warps whose work this thread's warp does. If it does all, these are the moments of the row.
template <class S> struct MomentsOfStretches : Moments<S> {
  Moments<S> of[S::kShares];
};
template <class S, class X> __device__ MomentsOfStretches<S> moments_of(const Stretches<S>& at, const X& x_at) {
  MomentsOfStretches<S> moments;
#pragma unroll
  for (int k = 0; k < S::kShares; ++k)
    moments.of[k] = moments_of_warp<S>(at.of[k], [&](int i) { return x_at(k * Place<S>::kVectors + i); });
  moments.mean = moments.of[0].mean;
  moments.squares = moments.of[0].squares;
  return moments;
}
template <class S>
__device__ void put_moments(Exchange<S>& exchange, const Stretches<S>& at, const MomentsOfStretches<S>& moments) {
#pragma unroll
  for (int k = 0; k < S::kShares; ++k) exchange.put(at.of[k].warp, at.lane, moments.of[k].mean, moments.of[k].squares);
}

// The numbers that make y, from the moments. The statistics of the row are stored, too.
template <class S, class At, class M>
__device__ Affine<S> affine_of_row(const RowNormFwdArgs& args, const At& at, const ForwardRow<S>& row, const M& moments) {
  using A = typename S::Acc;
  A mean = moments.mean, squares = moments.squares;
  if constexpr (S::kWarps > 1) {
    __shared__ A slots[S::kWarps][2];
    Exchange<S> exchange{slots};
    if constexpr (S::kCluster > 1) cluster_wait();
    put_moments(exchange, at, moments);
    exchange.barrier();
    const auto joined = join_moments<S>(at.lane, slots);
    mean = joined.mean;
    squares = joined.squares;
  }
  if constexpr (is_first_pass<S>()) {
    const double cols = S::kCols, level = mean;
    if (row.live && at.leader()) store_sums<S>(args.y, row.index, cols * level, squares + cols * level * level);
    return {};
  }
  const A rstd = reciprocal_sqrt(squares * kPerCol<S> + static_cast<A>(args.eps));
  if (S::kStats && row.live && at.leader()) store_stats<S>(args, row.index, mean, rstd);
  return {mean, rstd};
}

// The same from the sums of all pieces of the row.
template <class S, class At>
__device__ Affine<S> affine_of_pieces(const RowNormFwdArgs& args, const At& at, const ForwardRow<S>& row) {
  using A = typename S::Acc;
  const auto means = MeansOfRows(args.h).of<S>(row.index);
  const double variance = means.second - means.first * means.first;
  const A mean = static_cast<A>(means.first), rounded = static_cast<A>(variance < 0 ? 0 : variance);  // NaN stays
  const A rstd = reciprocal_sqrt(rounded + static_cast<A>(args.eps));
  if (S::kStats && row.live && at.leader()) store_stats<S>(args, row.index, mean, rstd);
  return {mean, rstd};
}

// Codes bound a kernel by its instructions: a warp then does several warps' work, which saves some.
template <class S, bool = kHasCodes<S>> struct Executor {
  using type = Place<S>;
};
template <class S> struct Executor<S, true> {
  using type = Stretches<S>;
};

// Brings to L2 what blocks of this group would wait for: its vectors, since all that start together want them after x; and,
// in calls of few waves, x of a later one. More waves read it fast enough, and this slows them down.
template <class S, class At> __device__ void prefetch(const RowNormFwdArgs& args, const At& at) {
  if constexpr (S::kGrouped)
    if (blockIdx.x == 0)
#pragma unroll
      for (int i = 0; i < At::kVectors; ++i) {
        prefetch_row<S>(weight_of<S>(args), at.col(i));
        prefetch_row<S>(bias_of<S>(args), at.col(i));
      }
  if constexpr (S::kRowsAhead > 0) {
    static_assert(S::kRows == 1 && S::kCluster == 1);
    constexpr i64 kFew = 16 * S::kRowsAhead;
    const i64 row = static_cast<i64>(blockIdx.x) + S::kRowsAhead;
    if (threadIdx.x == 0 && row < args.rows && static_cast<i64>(gridDim.x) * gridDim.y <= kFew)
      bulk_prefetch(ForwardRow<S>(args, row).x, S::kCols * sizeof(typename S::X));
  }
}

template <class S> __device__ void row_norm_fwd(const RowNormFwdArgs& args) {
  using A = typename S::Acc;
  using At = typename Executor<S>::type;
  constexpr int kVec = S::kVec, kVectors = At::kVectors;
  const At at;
  const ForwardRow<S> row(args, at);
  if constexpr (S::kCluster > 1 && !is_second_pass<S>()) cluster_arrive();
  wait_for_previous_kernel(row.x + at.first);
  const Before<S> before(args);
  prefetch<S>(args, at);

  Pack<typename S::Row, kVec> resident[kVectors];
  Pack<typename S::X, kVec> xs[kVectors];  // all before the first is used
  Pack<Addend<S>, kVec> addends[kVectors];
  Pack<ResidualGate<S>, kVec> gates[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    xs[i] = row.load_x(at.col(i));
    addends[i] = row.load_addend(at.col(i));
    gates[i] = load_gate<S>(args, at.col(i));
  }
  // Loads of weight, bias and last factor go together, because no load passes an earlier store.
  constexpr int kTogether = S::kAhead ? kVectors : S::kTogether;
  Pack<typename S::Weight, kVec> weights[kTogether];
  Pack<typename S::Bias, kVec> biases[kTogether];
  Pack<LastFactor<S>, kVec> factors[kTogether];
  const auto load_parameters = [&](const At& of, int first) {
#pragma unroll
    for (int i = 0; i < kTogether && first + i < kVectors; ++i) {
      weights[i] = load_weight<S>(args, of.col(first + i));
      biases[i] = load_bias<S>(args, of.col(first + i));
      factors[i] = row.load_last_factor(of.col(first + i));
    }
  };
  if constexpr (S::kAhead) load_parameters(at, 0);
  auto* const h = row.h();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    resident[i] = before(xs[i], addends[i], row.index, at.col(i), gates[i]);
    row.store_h(h, at.col(i), resident[i]);
  }

  // LayerNorm reads the row three times and widens it each time; RMSNorm has registers to widen it once, which is
  // faster.
  const auto moments = [&] {
    if constexpr (is_second_pass<S>()) return Moments<S>{};
    else
      return moments_of<S>(at, [&](int k) {
        if constexpr (!S::kRms) keep_packed(resident[k]);
        return resident[k];
      });
  }();
  if constexpr (S::kEarly) load_parameters(at, 0);
  const Affine<S> affine = [&] {
    if constexpr (is_second_pass<S>()) return affine_of_pieces<S>(args, at, row);
    else return affine_of_row<S>(args, at, row, moments);
  }();
  if constexpr (is_first_pass<S>()) return;
  // With kAnew columns are recomputed for y, because keeping `at` would take registers.
  const At place = [&] {
    if constexpr (S::kAnew) return At::anew();
    return at;
  }();
  auto* const y = row.y();
  const auto y_at = [&](int i, A(&v)[kVec]) {
    const bool loaded = S::kAhead || (S::kEarly && i == 0);
    if (i % kTogether == 0 && !loaded) load_parameters(place, i);
    auto& pack = resident[i];
    if constexpr (!S::kRms) keep_packed(pack);
    affine.unrounded(pack, weights[i % kTogether], biases[i % kTogether], factors[i % kTogether], args.weight_offset, v);
  };
  if constexpr (kHasCodes<S>) {
    const RowCodes<S, typename S::Y, At> codes{args.codes, place, row.index, row.live};
    codes.store([&](int i) {
      A v[kVec];
      y_at(i, v);
      const auto pack = narrow_pack<typename S::Y>(v);
      if constexpr (S::kKeeps) row.store_y(y, place.col(i), pack);
      return pack;
    });
  } else if constexpr (S::kShifted) {
    store_shifted<S>(y, place, y_at);
  } else {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A v[kVec];
      y_at(i, v);
      row.store_y(y, place.col(i), narrow_pack<typename S::Y>(v));
    }
  }
}

}  // namespace kf
