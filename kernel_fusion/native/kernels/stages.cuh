// The stages around a row norm; each is compiled in only if the plan has it:
//
//   u = dropout(pre_activation(x))
//   h = residual + gate * u, rounded to the residual's type; the gate has columns, like w and b
//   y = activation(norm(h) * w + b)
//
// or with a factor, a row, first or last: u = x * act(gate) or y = (norm(x) * w + b) * act(gate).
//
// kHf<S> rounds norm(h) and, with a weight, the activation's argument (`Roundings`). Constants and types of S are named
// after the fields of `Stages` (core/spec.py): activations are codes (0: none). A gate that is a row excludes a
// residual. Without one u is normalised, unrounded. All works on one vector of a row.
#pragma once

#include "dropout.cuh"
#include "math.cuh"
#include "rows.cuh"
#include "shared/names.h"

namespace kf {

// Kernels only know a factor's formulas `factor_of` and `times_factor_slope`.
template <class S> using Factor = typename S::Gate;
template <class S> inline constexpr bool kFactorFirst = kPresent<Factor<S>> && S::kGateFirst;
template <class S> inline constexpr bool kFactorLast = kPresent<Factor<S>> && !kFactorFirst<S>;

// Whether h is the tensor that is normalised, and whether it differs from x.
template <class S> inline constexpr bool kAddsResidual = kPresent<typename S::Residual>;
template <class S> inline constexpr bool kChangesX = S::kPreActivation != 0 || S::kDropout != 0 || kFactorFirst<S>;

template <class S> using ResidualGate = typename S::ResidualGate;
template <class S> inline constexpr bool kGatesResidual = kPresent<ResidualGate<S>>;

// The types of a first and of a last factor, of the row that forward reads beside x before the norm, and of the one that
// it reads anywhere. A row that is absent has the type `absent`.
template <class S> using FirstFactor = If<kFactorFirst<S>, Factor<S>>;
template <class S> using LastFactor = If<kFactorLast<S>, Factor<S>>;
template <class S> using Addend = typename PresentOr<typename S::Residual, FirstFactor<S>>::type;
template <class S> using Beside = typename PresentOr<typename S::Residual, Factor<S>>::type;

// For what several results share, and for u: it is as exact as its rounding to h needs, or without one as all results.
template <class S> using SharedMath = typename SharedMathFor<typename S::Acc, typename S::X, typename S::Finest>::type;
template <class S, class H = typename S::Residual> struct MathBefore : MathFor<typename S::Acc, H> {};
template <class S> struct MathBefore<S, absent> {
  using type = SharedMath<S>;
};

// Keeps the operation before v from being contracted: (u - mean) of equal elements must be 0, and h the same wherever
// it is computed.
__device__ inline void settle(float& v) { asm("" : "+f"(v)); }
__device__ inline void settle(double& v) { asm("" : "+d"(v)); }

// v = activation(v)
template <int kCode, class M, class A, int kVec> __device__ void activate(A (&v)[kVec]) {
  if constexpr (kCode != 0) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] = Activation<kCode>::type::template value<M>(v[e]);
  }
}

// g * activation'(at), with the same bits whatever is added.
template <int kCode, class M, class A> __device__ A times_slope(A g, A at) {
  A product = act::times_slope<typename Activation<kCode>::type, M>(g, at);
  settle(product);
  return product;
}

// g = g * activation'(at)
template <int kCode, class M, class A, int kVec> __device__ void multiply_slope(A (&g)[kVec], const A (&at)[kVec]) {
  if constexpr (kCode != 0) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) g[e] = times_slope<kCode, M>(g[e], at[e]);
  }
}

// act(gate)
template <class S, class M, class A, int kVec> __device__ void factor_of(A (&v)[kVec]) { activate<S::kGateActivation, M>(v); }

// Turns the gradient g at the factor into the gradient of the factor's row `at`.
template <class S, class M, class A, int kVec> __device__ void times_factor_slope(A (&g)[kVec], const A (&at)[kVec]) {
  multiply_slope<S::kGateActivation, M>(g, at);
}

// v * factor, with the same bits whatever follows.
template <class S, class M, class T, class A, int kVec>
__device__ void multiply_factor(const Pack<T, kVec>& row, A (&v)[kVec]) {
  A factor[kVec];
  widen_pack(row, factor);
  factor_of<S, M>(factor);
#pragma unroll
  for (int e = 0; e < kVec; ++e) v[e] = product(v[e], factor[e]);
}

template <class S> inline constexpr bool kHf = S::kRounding == Rounding::kHf;

// Where Hugging Face's norms round: norm(h) to the type of h (without a residual, of x); its product with the weight,
// and the sum with the bias, to the promoted type of that and the weight's.
template <class S> struct Roundings {
  using A = typename S::Acc;
  using Normalized = typename PresentOr<typename S::Residual, typename S::X>::type;
  static constexpr bool kArgument = kHf<S> && kSame<Normalized, typename S::Weight>;

  static __device__ A normalized(A v) {
    if constexpr (kHf<S>) return widen<A>(narrow<Normalized>(v));
    else return v;
  }
  static __device__ A argument(A v) {
    if constexpr (kArgument) return widen<A>(narrow<Normalized>(v));
    else return v;
  }

  // The same for a vector, two elements at a time.
  template <int kVec> static __device__ void all(A (&v)[kVec]) { widen_pack(narrow_pack<Normalized>(v), v); }
};

template <class S> struct Dropout {
  using A = typename S::Acc;
  Dropper dropper;
  A scale = 0;

  template <class Args> __device__ explicit Dropout(const Args& args) {
    if constexpr (S::kDropout) {
      dropper = Dropper(args.seed, args.dropout_last);
      scale = static_cast<A>(args.dropout_scale);
    }
  }

  // kVec divides `position`.
  template <int kVec> __device__ void apply(i64 position, A (&v)[kVec]) const {
    if constexpr (S::kDropout) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] = product(v[e], scale);
      dropper.drop_neighbours(static_cast<unsigned long long>(position), v);
    }
  }
};

// The row that is normalised, from x and a residual or a factor.
template <class S> struct Before {
  using A = typename S::Acc;
  using Row = typename S::Row;
  using M = typename MathBefore<S>::type;
  static constexpr int kVec = S::kVec;
  Dropout<S> dropout;

  template <class Args> __device__ explicit Before(const Args& args) : dropout(args) {}

  // v = dropout(pre_activation(v)) from `col`.
  __device__ void change(i64 row, int col, A (&v)[kVec]) const {
    if constexpr (kChangesX<S>) {
      activate<S::kPreActivation, M>(v);
      dropout.apply(row * S::kCols + col, v);
#pragma unroll
      for (int e = 0; e < kVec; ++e) settle(v[e]);
    }
  }

  // Multiplies v by a first factor.
  template <class T> __device__ void multiply(const Pack<T, kVec>& pack, A (&v)[kVec]) const {
    if constexpr (kFactorFirst<S>) multiply_factor<S, M>(pack, v);
  }

  // Past the end of the row this is zero, as the sums expect.
  __device__ Pack<Row, kVec> operator()(const Pack<typename S::X, kVec>& x, const Pack<Addend<S>, kVec>& beside, i64 row,
                                        int col, const Pack<ResidualGate<S>, kVec>& gate = {}) const {
    if constexpr (!kAddsResidual<S> && !kChangesX<S>) {
      return x;
    } else {
      if (!Place<S>::kCovers && col >= S::kCols) return {};
      A h[kVec];
      widen_pack(x, h);
      change(row, col, h);
      multiply(beside, h);
      if constexpr (kAddsResidual<S>) {
        A r[kVec];
        widen_pack(beside, r);
        if constexpr (kGatesResidual<S>) {
          A g[kVec];
          widen_pack(gate, g);
#pragma unroll
          for (int e = 0; e < kVec; ++e) h[e] = fused(g[e], h[e], r[e]);
        } else {
#pragma unroll
          for (int e = 0; e < kVec; ++e) h[e] += r[e];
        }
      }
      return narrow_pack<Row>(h);
    }
  }
};

}  // namespace kf
