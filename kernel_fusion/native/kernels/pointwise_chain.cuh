// The arithmetic of a pointwise chain, dropout(scale * f(a, b)), on vectors in the compute type, and its derivatives.
//
// f is act(a), act(a + b), act(a * b) or act(a) * b.
#pragma once

#include "dropout.cuh"
#include "math.cuh"
#include "vectors.cuh"

namespace kf {

// The arithmetic may be rounded to Result.
template <class S, class Result> struct Chain {
  using A = typename S::Acc;
  using M = typename ChainMathFor<A, Result>::type;
  using Act = typename Activation<S::kActivation>::type;
  static constexpr int kVec = S::kVec;

  A scale;
  Dropper dropper;

  template <class Args> __device__ explicit Chain(const Args& args) : scale(static_cast<A>(args.scale)) {
    if constexpr (S::kDropout) dropper = Dropper(args.seed, args.dropout_last);
  }

  // Multiplies elements by the scale, or sets them to zero. `position(e)` is that of element e. Aligned positions follow
  // each other from a multiple of kVec on.
  template <class Position> __device__ void scale_and_drop(Position&& position, A (&v)[kVec]) const {
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] *= scale;
    if constexpr (S::kDropout && S::kAlignedPositions) dropper.drop_neighbours(position(0), v);
    if constexpr (S::kDropout && !S::kAlignedPositions) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] = dropper.drop(position(e), v[e]);
    }
  }

  __device__ static A value(A a, A b) {
    if constexpr (S::kCombine == Combine::kAdd) return Act::template value<M>(a + b);
    if constexpr (S::kCombine == Combine::kMul) return Act::template value<M>(a * b);
    if constexpr (S::kCombine == Combine::kGate) return Act::template value<M>(a) * b;
    return Act::template value<M>(a);
  }

  // Whether an element has the activation's slope at 1; backward reads the bit as an argument of 1 or 0.
  __device__ static Pack<b1, kVec> bits(const A (&a)[kVec], const A (&b)[kVec]) {
    static_assert(act::kTwoSlopes<Act>);
    Pack<b1, kVec> pack{0};
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const A slope = Act::template slope<M>(S::kCombine == Combine::kAdd ? a[e] + b[e] : a[e]);
      pack.v |= static_cast<unsigned>(slope == Act::template slope<M>(A(1))) << e;
    }
    return pack;
  }

  // The gradients of a and b, from g, the gradient of f.
  __device__ static void gradients(A g, A a, A b, A& da, A& db) {
    if constexpr (S::kCombine == Combine::kGate) {
      da = act::times_slope<Act, M>(g * b, a);
      db = g * Act::template value<M>(a);
    } else if constexpr (S::kCombine == Combine::kMul) {
      const A inner = act::times_slope<Act, M>(g, a * b);
      da = inner * b;
      db = inner * a;
    } else {
      da = act::times_slope<Act, M>(g, S::kCombine == Combine::kAdd ? a + b : a);
      db = da;
    }
  }
};

}  // namespace kf
