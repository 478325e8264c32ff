// The arithmetic of a pointwise chain, dropout(scale * f(a, b)), on vectors in the compute type, and its derivatives.
//
// f is act(a), act(a + b), act(a * b) or act(a) * b. Dropout draws 16 bits for each element from Philox, keyed by a seed and the
// element's position; one draw serves eight neighbours (shared/philox.h).
#pragma once

#include "math.cuh"
#include "shared/philox.h"
#include "types.cuh"

namespace kf {

enum Combine : int { kFirst, kAdd, kMul, kGate };

// Where the positions of a vector's elements are: neighbours, of which the first is a multiple of the vector, or anywhere.
enum Dropout : int { kNoDropout, kAligned, kAnywhere };

// The 16 bits that decide about the element at `position`.
__device__ inline unsigned bits_at(const RandomBits& bits, unsigned long long position) {
  const unsigned low = position & 2 ? bits.word[1] : bits.word[0], high = position & 2 ? bits.word[3] : bits.word[2];
  const unsigned word = position & 4 ? high : low;
  return position & 1 ? word >> 16 : word & 0xffffu;
}

// The bits of kVec neighbours, a divisor of eight, from `position`, a multiple of it.
template <int kVec> __device__ void bits_of(unsigned long long seed, unsigned long long position, unsigned (&out)[kVec]) {
  static_assert(8 % kVec == 0);
  const RandomBits bits = random_bits(seed, position / 8);
#pragma unroll
  for (int e = 0; e < kVec; ++e) out[e] = kVec == 8 ? bits.of(e) : bits_at(bits, position + e);
}

// S is the generated plan, and Result the type that the arithmetic may be rounded to.
template <class S, class Result> struct Chain {
  using A = typename S::Acc;
  using M = typename MathFor<A, Result>::type;
  using Act = typename Activation<S::kActivation>::type;
  static constexpr int kVec = S::kVec;

  A scale;
  unsigned long long seed = 0;
  unsigned threshold;

  template <class Args> __device__ explicit Chain(const Args& args) : scale(static_cast<A>(args.scale)), threshold(args.threshold) {
    if constexpr (S::kDropout != kNoDropout) seed = *static_cast<const unsigned long long*>(args.seed);
  }

  // Multiplies v by the scale, or by zero what dropout drops. `position(e)` is that of element e.
  template <class Position> __device__ void scale_and_drop(Position&& position, A (&v)[kVec]) const {
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] *= scale;
    if constexpr (S::kDropout != kNoDropout) {
      unsigned bits[kVec];
      if constexpr (S::kDropout == kAligned) {
        bits_of(seed, position(0), bits);
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const unsigned long long at = position(e);
          bits[e] = bits_at(random_bits(seed, at / 8), at);
        }
      }
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] = bits[e] < threshold ? A(0) : v[e];
    }
  }

  __device__ static A value(A a, A b) {
    if constexpr (S::kCombine == kAdd) return Act::template value<M>(a + b);
    if constexpr (S::kCombine == kMul) return Act::template value<M>(a * b);
    if constexpr (S::kCombine == kGate) return Act::template value<M>(a) * b;
    return Act::template value<M>(a);
  }

  // Of g, the gradient of f: those of a and b.
  __device__ static void gradients(A g, A a, A b, A& da, A& db) {
    if constexpr (S::kCombine == kGate) {
      da = act::times_slope<Act, M>(g * b, a);
      db = g * Act::template value<M>(a);
    } else if constexpr (S::kCombine == kMul) {
      const A inner = act::times_slope<Act, M>(g, a * b);
      da = inner * b;
      db = inner * a;
    } else {
      da = act::times_slope<Act, M>(g, S::kCombine == kAdd ? a + b : a);
      db = da;
    }
  }
};

}  // namespace kf
