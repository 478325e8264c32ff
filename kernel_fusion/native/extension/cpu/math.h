// The elementary functions that shared/activations.h needs, on SIMD vectors.
//
// The functions of float are inlined, because a call costs more than their arithmetic. They are off by at most 1.5 ulp; erf by
// 3 ulp of 1, or by 5 where it is computed together with its power (tests/test_cpu_math.py). A subnormal result may be zero.
// A NaN keeps its bits or comes from arithmetic, as cpu/simd.h needs; at::vec's minimum and maximum do not ensure that. The
// functions of double are those of at::vec (Sleef, 1 ulp).
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <limits>
#include <type_traits>

#include "shared/activations.h"

namespace kf::cpu::CPU_CAPABILITY {

template <class A> struct VectorMath {
  using V = at::vec::Vectorized<A>;
  static V of(double c) { return V(static_cast<A>(c)); }
  static V sqrt(V x) { return x.sqrt(); }
  static V reciprocal(V x) { return x.reciprocal(); }
#if defined(CPU_CAPABILITY_AVX512)  // at::vec would move the comparison's mask to a vector and back
  static KF_INLINE V where_gt(V a, V b, V yes, V no) { return where<_CMP_GT_OQ>(a, b, yes, no); }
  static KF_INLINE V where_ge(V a, V b, V yes, V no) { return where<_CMP_GE_OQ>(a, b, yes, no); }
  static KF_INLINE V where_eq(V a, V b, V yes, V no) { return where<_CMP_EQ_OQ>(a, b, yes, no); }

 private:
  template <int kRelation> static KF_INLINE V where(V a, V b, V yes, V no) {
    if constexpr (std::is_same_v<A, float>) return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, kRelation), no, yes);
    else return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, kRelation), no, yes);
  }
#else
  static V where_gt(V a, V b, V yes, V no) { return V::blendv(no, yes, a > b); }
  static V where_ge(V a, V b, V yes, V no) { return V::blendv(no, yes, a >= b); }
  static V where_eq(V a, V b, V yes, V no) { return V::blendv(no, yes, a == b); }
#endif
};

template <class A> struct Math : VectorMath<A> {
  using V = at::vec::Vectorized<A>;
  static V exp(V x) { return x.exp(); }
  static V expm1(V x) { return x.expm1(); }
  static V log1p(V x) { return x.log1p(); }
  static V tanh(V x) { return x.tanh(); }
  static V erf(V x, V& power) {
    power = (x * x).neg().exp();
    return x.erf();
  }
};

// The coefficients of the polynomials minimise the largest relative error.
template <> struct Math<float> : VectorMath<float> {
  using I = at::vec::Vectorized<int32_t>;

  static KF_INLINE V exp(V x) {
#if defined(CPU_CAPABILITY_AVX512)  // scaling overflows to infinity by itself; min returns its second operand if that is NaN
    return exp_or_zero(_mm512_min_ps(of(104), x));
#else
    return V::blendv(where_gt(x, of(0), of(std::numeric_limits<double>::infinity()), x), exp_or_zero(x), x < of(88.722840));
#endif
  }

  // e^x - 1, for x up to 88.
  static KF_INLINE V expm1(V x) {
    const Power p(x);
    const V two_n = as_float((as_int(p.shifted) << I(23)) + I(kOne));
    return where_gt(of(-30), x, of(-1), at::vec::fmadd(p.e, two_n, two_n - of(1)));
  }

  // log(1 + x), for x >= 0.
  static KF_INLINE V log1p(V x) {
    // 1 + x = 2^n m with m between sqrt(1/2) and sqrt(2). What the sum 1 + x loses by rounding is added to m.
    constexpr int32_t kRootHalf = 0x3f3504f3;
    const V sum = of(1) + x, lost = x - (sum - of(1));
    const I bits = as_int(sum) - I(kRootHalf), n = bits >> I(23);
    const V m = as_float((bits & I(0x7fffff)) + I(kRootHalf)), two_minus_n = as_float(I(kOne) - (n << I(23)));
    const V f = at::vec::fmadd(lost, two_minus_n, m - of(1));
    const V cubic = polynomial(f, -0.5f, 3.333333170e-01f, -2.500082115e-01f, 2.000122733e-01f, -1.662335341e-01f,
                               1.420174375e-01f, -1.316020836e-01f, 1.276169790e-01f, -7.634581471e-02f);
    const V power = at::vec::convert_to_fp_of_same_size<float>(n);
    const V result = at::vec::fmadd(power, of(kLn2High), at::vec::fmadd(power, of(kLn2Low), at::vec::fmadd(f * f, cubic, f)));
    return where_gt(x, of(std::numeric_limits<float>::max()), x, result);
  }

  static KF_INLINE V tanh(V x) {
    const V size = x.abs(), square = x * x;
    const V near = at::vec::fmadd(x,
                                  square * polynomial(square, -3.333331756e-01f, 1.333258614e-01f, -5.385230981e-02f,
                                                      2.107167873e-02f, -6.274239146e-03f),
                                  x);
    const V bounded = where_gt(size, of(10), of(10), size);
    const V far = of(1) - of(2) * reciprocal(exp_bounded(bounded + bounded) + of(1));
    return where_gt(size, of(0.55), with_sign(far, x), near);  // a NaN takes `near`
  }

  // x P(x^2) / Q(x^2), and 1 for large x. All terms have one sign, so nothing cancels.
  static KF_INLINE V erf(V x) {
    const V square = x * x, size = x.abs();
    const V p = polynomial(square, 1.1283791455f, 1.9077820680e-01f, 5.2789503349e-02f, 3.7793561964e-03f, 2.8480102903e-04f,
                           2.0419902875e-06f);
    const V q =
        polynomial(square, 1.0f, 5.0240550478e-01f, 1.1425516210e-01f, 1.4996933693e-02f, 1.1651477471e-03f, 3.8003878720e-05f);
    const V r = size * (p / q);
    return with_sign(where_gt(size, of(3.92), of(1), where_gt(r, of(1), of(1), r)), x);
  }

  // erf(x), and power = e^(-x^2), which the derivative of gelu needs too. Source: Abramowitz, Stegun: Handbook of Mathematical
  // Functions, 7.1.26.
  static KF_INLINE V erf(V x, V& power) {
    const V square = x * x, t = reciprocal(at::vec::fmadd(of(0.3275911), x.abs(), of(1)));
    power = exp_or_zero(square.neg());
    const V series = t * polynomial(t, 0.254829592f, -0.284496736f, 1.421413741f, -1.453152027f, 1.061405429f);
    return with_sign(of(1) - series * power, x);
  }

 protected:
  // c0 + c1 x + c2 x^2 + ...
  static KF_INLINE V polynomial(V, float c) { return V(c); }
  template <class... Rest> static KF_INLINE V polynomial(V x, float c, Rest... rest) {
    return at::vec::fmadd(polynomial(x, rest...), x, V(c));
  }

 private:
  static constexpr int32_t kOne = 127 << 23;                                 // the bits of 1.0f
  static constexpr double kLn2High = 0.693359375, kLn2Low = -2.12194440e-4;  // n * kLn2High is exact

  static KF_INLINE I as_int(V v) { return at::vec::cast<int32_t>(v); }
  static KF_INLINE V as_float(I v) { return at::vec::cast<float>(v); }

  // e^x = 2^n (1 + e), for x between -87 and 88. With AVX-512 x may be up to 104, or NaN.
  static KF_INLINE V exp_bounded(V x) {
    const Power p(x);
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_scalef_ps(of(1) + p.e, p.n());
#else
    return as_float(as_int(of(1) + p.e) + (as_int(p.shifted) << I(23)));
#endif
  }

  // The same, but 0 if the result is below the smallest normal number, because scaling to subnormals is very slow.
  static KF_INLINE V exp_or_zero(V x) {
    const V least = of(-87.336548);
#if defined(CPU_CAPABILITY_AVX512)
    const Power p(x);
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLE_UQ), of(1) + p.e, p.n());
#else
    return exp_bounded(x) & (x > least);
#endif
  }

  static KF_INLINE V with_sign(V size, V x) { return size | (x & of(-0.0)); }

  // x = n ln 2 + r with |r| at most ln(2) / 2; e = e^r - 1.
  struct Power {
    V shifted, e;  // n is in the last bits of `shifted`
    KF_INLINE V n() const { return shifted - of(12582912); }
    explicit KF_INLINE Power(V x) : shifted(at::vec::fmadd(x, of(1.44269504088896341), of(12582912))) {
      const V r = at::vec::fmadd(n(), of(-kLn2Low), at::vec::fmadd(n(), of(-kLn2High), x));
      e = at::vec::fmadd(
          r * r, polynomial(r, 4.999999341e-01f, 1.666652011e-01f, 4.166839422e-02f, 8.368780429e-03f, 1.381446674e-03f), r);
    }
  };
};

// Less exact functions for results that are rounded to bf16. x Phi(x) is off by at most an eighth of half an ulp of bf16, of
// the result or, in the tail, of 1/64 of the argument. native/kernels/math.cuh has the same.
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
struct RoughMath : Math<float> {
  // 1/2 + x P(x^2), whose coefficients minimise that error for |x| up to 4.8. It leaves [0, 1] before |x| = 4.9.
  static KF_INLINE V normal_cdf(V x) {
    const V near = at::vec::clamp(x, of(-4.9), of(4.9)), centred = at::vec::fmadd(near * near, of(2 / (4.8 * 4.8)), of(-1));
    const V p = polynomial(centred, 0.147212625f, -0.0729774311f, 0.052911479f, -0.0406244285f, 0.030689422f, -0.0218282081f,
                           0.0137807187f, -0.00819047634f, 0.0058061718f, -0.00371329067f, 0.00109998928f);
    return at::vec::clamp(at::vec::fmadd(near, p, of(0.5)), of(0), of(1));
  }
};
#else  // without these instruction sets at::vec clamps element by element, which is slower than erf
using RoughMath = Math<float>;
#endif

}  // namespace kf::cpu::CPU_CAPABILITY
