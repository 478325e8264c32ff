// Policies of functions on scalars, for shared/activations.h. `Math` has CUDA's own functions. `RoughMath` takes fewer
// instructions for results that are rounded to fp16, and `RoughestMath` still fewer for bf16. `MathFor` chooses.
//
// SingleMath, for pointwise chains in fp32, has another normal_cdf, off by 2^-22, and a power off by 2^-21, absolutely.
// MixedMath has these and the hardware's reciprocal, for what an fp16 or bf16 norm computes for an fp32 result, too.
//
// RoughMath is off by far less than half an ulp of fp16, at least 2^-12 of the value:
//
//   exp, sqrt, reciprocal 2^-18 of the value for |x| < 32, then the argument's own rounding; below 2^-126 zero
//   tanh, expm1, log1p    2^-17 of the value: near 0, where 1 would cancel, by polynomials
//   normal_cdf            2^-20, absolutely
//
// RoughestMath has another normal_cdf: gelu is off by far less than half an ulp of bf16, or in the tail of 1/64 of its
// argument.
//
// NaN and infinities pass as through the exact functions. tests/test_cuda_math.py measures all fp16 and bf16 arguments,
// with instructions as inexact as documented.
#pragma once

#include "shared/activations.h"

namespace kf {

// The functions that every policy on scalars shares.
template <class A> struct ScalarMath {
  using V = A;
  static KF_INLINE A of(double c) { return static_cast<A>(c); }
  static KF_INLINE A where_gt(A a, A b, A yes, A no) { return a > b ? yes : no; }
  static KF_INLINE A where_ge(A a, A b, A yes, A no) { return a >= b ? yes : no; }
  static KF_INLINE A where_eq(A a, A b, A yes, A no) { return a == b ? yes : no; }
};

template <class A> struct Math;

template <> struct Math<float> : ScalarMath<float> {
  static KF_INLINE float exp(float x) { return ::expf(x); }
  static KF_INLINE float expm1(float x) { return ::expm1f(x); }
  static KF_INLINE float log1p(float x) { return ::log1pf(x); }
  static KF_INLINE float tanh(float x) { return ::tanhf(x); }
  static KF_INLINE float erf(float x, float& power) {
    power = ::expf(-x * x);
    return ::erff(x);
  }
  static KF_INLINE float sqrt(float x) { return ::sqrtf(x); }
  static KF_INLINE float reciprocal(float x) { return 1.0f / x; }
};

template <> struct Math<double> : ScalarMath<double> {
  static KF_INLINE double exp(double x) { return ::exp(x); }
  static KF_INLINE double expm1(double x) { return ::expm1(x); }
  static KF_INLINE double log1p(double x) { return ::log1p(x); }
  static KF_INLINE double tanh(double x) { return ::tanh(x); }
  static KF_INLINE double erf(double x, double& power) {
    power = ::exp(-x * x);
    return ::erf(x);
  }
  static KF_INLINE double sqrt(double x) { return ::sqrt(x); }
  static KF_INLINE double reciprocal(double x) { return 1.0 / x; }
};

// The hardware's approximations; subnormal numbers count as zero. Errors by the PTX ISA: exp2 2^-22 of the value, log2
// 2^-22 of the value (between 0.5 and 2 absolutely), square root 2^-23 of the value, reciprocal 1 ulp.
struct Hardware {
  static KF_INLINE float exp2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
  }
  static KF_INLINE float log2(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
  }
  static KF_INLINE float sqrt(float x) {
    float r;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
  }
  static KF_INLINE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
  }
};

// erff is relatively exact near 0, where normal_cdf is 1/2; that doubles its instructions.
template <class Instructions> struct SingleMathOn : Math<float> {
  // Phi(-|x|) = 2^p: p has the least error against max(normal_cdf(-|x|), 1/128), 4e-9. It falls without bound.
  static KF_INLINE float normal_cdf(float x) {
    const float a = ::fabsf(x);
    float p = 1.29081127e-6f - 5.10451876e-8f * a;
    p = 9.11423267e-5f + a * (-1.44248415e-5f + a * p);
    p = 4.93071748e-5f + a * (-3.15259502e-4f + a * p);
    p = -5.24283461e-2f + a * (6.90995483e-3f + a * p);
    p = -1.0f + a * (-1.15110433f + a * (-0.459222138f + a * p));
    const float tail = Instructions::exp2(p);
    return x > 0.0f ? 1.0f - tail : tail;
  }
  static KF_INLINE float normal_cdf(float x, float& power) {
    const float root = 0.84932180f * x;  // its square is x^2 / 2 log2(e)
    power = Instructions::exp2(-root * root);
    return normal_cdf(x);
  }
};

// An exact reciprocal has a slow path, a call, around which registers are saved.
template <class Instructions> struct MixedMathOn : SingleMathOn<Instructions> {
  static KF_INLINE float reciprocal(float x) { return Instructions::reciprocal(x); }
};

template <class Instructions> struct RoughMathOn : ScalarMath<float> {
  static constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

  static KF_INLINE float sqrt(float x) { return Instructions::sqrt(x); }
  static KF_INLINE float reciprocal(float x) { return Instructions::reciprocal(x); }
  static KF_INLINE float exp(float x) { return Instructions::exp2(kLog2E * x); }

  // The polynomials have the least relative error on their interval (5e-7, 6e-6, 2e-7).
  static KF_INLINE float tanh(float x) {
    const float square = x * x;
    const float near = x + x * square * (-0.33324571f + 0.12876421f * square);
    const float far = 1.0f - 2.0f * reciprocal(1.0f + Instructions::exp2(2 * kLog2E * ::fabsf(x)));
    return ::fabsf(x) < 0.25f ? near : ::copysignf(far, x);
  }
  static KF_INLINE float expm1(float x) {
    const float near = x + x * x * (0.50000448f + x * (0.16709825f + x * 0.04163704f));
    return ::fabsf(x) < 0.25f ? near : exp(x) - 1.0f;
  }
  static KF_INLINE float log1p(float x) {
    const float near = x + x * x * (-0.49997256f + x * (0.33223368f + x * (-0.23597744f + x * 0.12546029f)));
    // Between -0.25 and 0 it would be less exact.
    return x >= 0.0f && x < 0.25f ? near : kLn2 * Instructions::log2(1.0f + x);
  }
  // (1 + erf(x / sqrt(2))) / 2, and power = e^(-x^2 / 2); erf by Abramowitz, Stegun: Handbook of Mathematical
  // Functions, 7.1.26, with halved coefficients.
  static KF_INLINE float normal_cdf(float x, float& power) {
    const float t = reciprocal(1.0f + (0.3275911f * 0.70710678f) * ::fabsf(x));
    const float series =
        t * (0.127414796f + t * (-0.142248368f + t * (0.7107068705f + t * (-0.7265760135f + t * 0.5307027145f))));
    const float root = 0.84932180f * x;  // its square is x^2 / 2 log2(e)
    power = Instructions::exp2(-root * root);
    return 0.5f + ::copysignf(0.5f - series * power, x);
  }
};

template <class Instructions> struct RoughestMathOn : RoughMathOn<Instructions> {
  using RoughMathOn<Instructions>::normal_cdf;
  // A sigmoid of its odd logit: of polynomials with five terms (times log2(e)), the one by which x Phi(x) has the least
  // error against max(|x Phi(x)|, min(|x|, 1) / 64), 2^-13.5. It grows without bound, which saves a clamp.
  static KF_INLINE float normal_cdf(float x) {
    const float s = x * x;
    const float logit =
        x * (2.30164892f + s * (0.105772619f + s * (-5.58366848e-4f + s * (-6.29507079e-5f + s * 2.21579879e-6f))));
    return Instructions::reciprocal(1.0f + Instructions::exp2(-logit));
  }
};

using SingleMath = SingleMathOn<Hardware>;
using MixedMath = MixedMathOn<Hardware>;
using RoughMath = RoughMathOn<Hardware>;
using RoughestMath = RoughestMathOn<Hardware>;

// The policy for a result that is computed in A and rounded to T.
struct bf16;
template <class A, class T> struct MathFor {
  using type = Math<A>;
};
template <class T>
  requires(sizeof(T) == 2)
struct MathFor<float, T> {
  using type = RoughMath;
};
template <> struct MathFor<float, bf16> {
  using type = RoughestMath;
};

// The policy for results that no norm divides by a tiny deviation.
template <class A, class T> struct ChainMathFor : MathFor<A, T> {};
template <> struct ChainMathFor<float, float> {
  using type = SingleMath;
};

// The policy for numbers that a norm of X computes once for several results, of which T is the most precise type.
template <class A, class X, class T> struct SharedMathFor : MathFor<A, T> {};
template <class X>
  requires(sizeof(X) == 2)
struct SharedMathFor<float, X, float> {
  using type = MixedMath;
};

// ---- Activations by their code, the position in KF_ACTIVATIONS -------------------------------------------------------------

template <int kCode> struct Activation;
namespace activation_codes {
#define KF_CODE(name) k_##name,
enum { KF_ACTIVATIONS(KF_CODE) };
#undef KF_CODE
}  // namespace activation_codes
#define KF_BY_CODE(name)                                      \
  template <> struct Activation<activation_codes::k_##name> { \
    using type = act::name;                                   \
  };
KF_ACTIVATIONS(KF_BY_CODE)
#undef KF_BY_CODE

}  // namespace kf
