// The statistics of a row: two passes over registers within a warp, a center first, then the deviations from it and their
// squares, which correct the center's own rounding (without that, mean/std = 1e4 loses digits). Then one exchange of (mean,
// squared deviations) between warps, joined by Chan's formula: as stable as two passes over the row, with one barrier.
#pragma once

#include "tree.cuh"
#include "vectors.cuh"

namespace kf {

// Of one virtual warp, or of the row: its mean (RMSNorm: 0) and the sum of (x - mean)^2.
template <class S> struct Moments {
  typename S::Acc mean, squares;
};

// Of virtual warp `warp`, whose k-th vector is x_at(k).
template <class S, int kUnroll, class X> __device__ Moments<S> moments_of_warp(const Place<S>& at, int warp, X&& x_at) {
  using A = typename S::Acc;
  using P = Place<S>;
  const A count = static_cast<A>(max(P::cols_of(warp), 1));
  A center = 0;
  if constexpr (!S::kRms) {
    A sum = 0;
#pragma unroll kUnroll
    for (int k = 0; k < P::kChunks; ++k) {
      A x[S::kVec];
      widen_pack(x_at(k), x);
#pragma unroll
      for (int e = 0; e < S::kVec; ++e) sum += x[e];
    }
    center = sum_lanes<S::kLanes>(sum) / count;
  }
  A rest = 0, squares = 0;
#pragma unroll kUnroll
  for (int k = 0; k < P::kChunks; ++k) {
    A x[S::kVec];
    widen_pack(x_at(k), x);
    const bool inside = S::kRms || P::kCovers || (k * S::kLanes + at.lane) * S::kVec < P::cols_of(warp);
#pragma unroll
    for (int e = 0; e < S::kVec; ++e) {
      const A d = inside ? x[e] - center : A(0);
      rest += d;
      squares += d * d;
    }
  }
  squares = sum_lanes<S::kLanes>(squares);
  if constexpr (S::kRms) return {0, squares};
  rest = sum_lanes<S::kLanes>(rest);
  return {center + rest / count, squares - rest * rest / count};
}

// Of the row, from those of its virtual warps, relative to the first one's mean so that only small numbers are added.
template <class S> __device__ Moments<S> join_moments(int lane, const typename S::Acc (*slots)[2]) {
  using A = typename S::Acc;
  using P = Place<S>;
  A mean = 0;
  if constexpr (!S::kRms) {
    const A base = slots[0][0];
    mean = base + Exchange<S>::sum(lane, [&](int w) { return static_cast<A>(P::cols_of(w)) * (slots[w][0] - base); }) /
                      static_cast<A>(S::kCols);
  }
  const A squares = Exchange<S>::sum(lane, [&](int w) {
    if constexpr (S::kRms) return slots[w][1];
    const A shift = slots[w][0] - mean;
    return slots[w][1] + static_cast<A>(P::cols_of(w)) * shift * shift;
  });
  return {mean, squares};
}

}  // namespace kf
