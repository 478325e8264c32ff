// A row's statistics. A warp adds up deviations from a center and their squares; the deviations then correct the
// center, whose rounding would cost digits at mean/std = 1e4. One exchange of (mean, squared deviations) and Chan's
// formula join the warps: as stable as two passes, with one barrier.
//
// The center is the mean of each lane's first kCenter vectors: all of a row in registers, fewer of one that passes by.
// If they are a share f of the warp's columns, squares about it are at most 1/f times those about the warp's mean.
#pragma once

#include "shared/names.h"
#include "tree.cuh"
#include "vectors.cuh"

namespace kf {

// The mean of the columns of a warp or of a row, which is 0 for RMSNorm, and the sum of (x - mean)^2.
template <class S> struct Moments {
  typename S::Acc mean, squares;
};

// Adds a pack to a lane's sum.
template <class S> __device__ void add_pack(const Pack<typename S::Row, S::kVec>& pack, typename S::Acc& sum) {
  typename S::Acc x[S::kVec];
  widen_pack(pack, x);
#pragma unroll
  for (int e = 0; e < S::kVec; ++e) sum += x[e];
}

template <class S> inline constexpr bool kHasCodes = S::kCode != CodeType::kAbsent;

// The mean of some columns (RMSNorm: 0). Compilers contract its product with what uses it, but not all do so beside codes,
// whose statistics must have the same bits.
template <class S> struct Center {
  using A = typename S::Acc;
  A sum = 0, per_col = 0, mean = sum * per_col;

  __device__ A from(A v) const { return kHasCodes<S> && !S::kRms ? fused(sum, -per_col, v) : v - mean; }
  __device__ A plus(A shift) const { return kHasCodes<S> ? fused(sum, per_col, shift) : mean + shift; }
};

// The sums of a lane's deviations from a center, and of their squares.
template <class S> struct Deviations {
  using A = typename S::Acc;
  using P = Place<S>;
  int lane, warp;
  Center<S> center;
  A rest = 0, squares = 0;

  // `known` says that vector k surely lies within the row.
  __device__ void add(int k, const Pack<typename S::Row, S::kVec>& pack, bool known = false) {
    A x[S::kVec];
    widen_pack(pack, x);
    const bool inside = S::kRms || P::kCovers || known || k < P::kFull || k * P::kChunk + lane * S::kVec < P::cols_of(warp);
#pragma unroll
    for (int e = 0; e < S::kVec; ++e) {
      const A d = inside ? center.from(x[e]) : A(0);
      rest += d;
      squares += d * d;
    }
  }

  // The moments of the warp, from the sums of all its lanes.
  __device__ Moments<S> moments() const {
    if constexpr (S::kRms) return {0, sum_lanes<S::kLanes>(squares)};
    A all = rest, all_squares = squares;
    sum_lanes<S::kLanes>(all, all_squares);
    const A shift = all * P::template per_col_of<A>(warp);
    const bool finite = all_squares - all_squares == A(0);  // else the correction may be infinite
    return {center.plus(shift), finite ? all_squares - all * shift : all_squares};
  }
};

// The center of warp `warp`, whose first vectors are x_at(k).
template <class S, class X> __device__ Center<S> center_of(int warp, X&& x_at) {
  if constexpr (S::kRms) return {};
  typename S::Acc sum = 0;
#pragma unroll
  for (int k = 0; k < S::kCenter; ++k) add_pack<S>(x_at(k), sum);
  return {sum_lanes<S::kLanes>(sum), Place<S>::template per_col_of<typename S::Acc, S::kCenter>(warp)};
}

// The moments of this thread's warp. x_at(k) may be called twice.
template <class S, class X> __device__ Moments<S> moments_of_warp(const Place<S>& at, X&& x_at) {
  using P = Place<S>;
  Deviations<S> deviations{at.lane, at.warp, center_of<S>(at.warp, x_at)};
#pragma unroll
  for (int k = 0; k < P::kVectors; ++k) deviations.add(k, x_at(k));
  return deviations.moments();
}

// use(k, load(k, inside), inside) for a lane's vectors from kFirst, kBatch at a time. `inside`: surely within the row,
// as in all batches but the last, which saves a test.
template <class S, int kBatch, int kFirst, class Load, class Use>
__device__ void batched_chunks(const Load& load, const Use& use) {
  using P = Place<S>;
  constexpr int kSure = P::kCovers ? P::kVectors : P::kFull;
  constexpr int kRest = kSure > kFirst ? kSure - (kSure - kFirst) % kBatch : kFirst;
  using Loaded = decltype(load(0, true));
  batched<kBatch, false>(
      kFirst, kRest, 1, [&](int k) { return load(k, true); }, [&](int k, const Loaded& each) { use(k, each, true); });
  batched<kBatch, false>(
      kRest, P::kVectors, 1, [&](int k) { return load(k, false); }, [&](int k, const Loaded& each) { use(k, each, false); });
}

// This thread's warp's, reading each vector, value(k, load(k, inside), inside), once.
template <class S, int kBatch, class Load, class Value>
__device__ Moments<S> moments_in_passing(const Place<S>& at, Load&& load, Value&& value) {
  using P = Place<S>;
  using Loaded = decltype(load(0, false));
  Loaded loaded[S::kCenter];
  Pack<typename S::Row, S::kVec> first[S::kCenter];
#pragma unroll
  for (int k = 0; k < S::kCenter; ++k) loaded[k] = load(k, false);
#pragma unroll
  for (int k = 0; k < S::kCenter; ++k) first[k] = value(k, loaded[k], false);
  Deviations<S> deviations{at.lane, at.warp, center_of<S>(at.warp, [&](int k) { return first[k]; })};
#pragma unroll
  for (int k = 0; k < S::kCenter; ++k) deviations.add(k, first[k]);
  batched_chunks<S, kBatch, S::kCenter>(
      load, [&](int k, const Loaded& each, bool inside) { deviations.add(k, value(k, each, inside), inside); });
  return deviations.moments();
}

// The moments of the row. They are added relative to the mean of the first warp, so that small numbers are added.
template <class S> __device__ Moments<S> join_moments(int lane, const typename S::Acc (*slots)[2]) {
  using A = typename S::Acc;
  using P = Place<S>;
  A mean = 0;
  if constexpr (!S::kRms) {
    const A base = slots[0][0];
    mean =
        base + kPerCol<S> * Exchange<S>::sum(lane, [&](int w) { return static_cast<A>(P::cols_of(w)) * (slots[w][0] - base); });
  }
  const A squares = Exchange<S>::sum(lane, [&](int w) {
    if constexpr (S::kRms) return slots[w][1];
    const A shift = slots[w][0] - mean;
    return slots[w][1] + static_cast<A>(P::cols_of(w)) * shift * shift;
  });
  return {mean, squares};
}

}  // namespace kf
