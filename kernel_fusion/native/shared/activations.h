// Value and slope of activations by a policy M on M::V, a scalar (native/kernels/math.cuh) or a SIMD vector
// (native/extension/cpu/math.h). Besides + - * it has
//
//   of(c)                                    a constant
//   exp, expm1, log1p, tanh, sqrt, reciprocal
//   erf(x, power)                            power = e^(-x^2); or
//   normal_cdf(x, power)                     (1 + erf(x / sqrt(2))) / 2, power = e^(-x^2 / 2)
//   erf(x) or normal_cdf(x)                  if faster without the power
//   where_gt(a, b, yes, no)                  a > b ? yes : no; no if a or b is NaN
//   where_ge, where_eq                       likewise
//
// NaN, infinities and slopes at kinks are PyTorch's.
#pragma once

#include "shared/inline.h"
#include "shared/names.h"

namespace kf::act {

#define KF_ACTIVATION(name, value_at_x, slope_at_x)                                                                  \
  struct name {                                                                                                      \
    template <class M> static KF_INLINE typename M::V value(typename M::V x) { return value_at_x; }                  \
    template <class M> static KF_INLINE typename M::V slope([[maybe_unused]] typename M::V x) { return slope_at_x; } \
  }

template <class M> KF_INLINE typename M::V sigmoid_of(typename M::V x) {
  return M::reciprocal(M::of(1) + M::exp(M::of(0) - x));
}

KF_ACTIVATION(identity, x, M::of(1));
// The slope of |x|; NaN: 0, as in PyTorch
KF_ACTIVATION(sign, M::where_gt(x, M::of(0), M::of(1), M::where_gt(M::of(0), x, M::of(-1), M::of(0))), M::of(0));
// The slopes of tanh and sigmoid at their value x.
KF_ACTIVATION(from_tanh, x - x * x * x * M::of(1.0 / 3), M::of(1) - x * x);
KF_ACTIVATION(from_sigmoid, x * x * (M::of(0.5) - x * M::of(1.0 / 3)), x * (M::of(1) - x));
KF_ACTIVATION(relu, M::where_ge(M::of(0), x, M::of(0), x), M::where_ge(M::of(0), x, M::of(0), M::of(1)));
KF_ACTIVATION(relu_squared, relu::value<M>(x) * relu::value<M>(x), M::of(2) * relu::value<M>(x));
KF_ACTIVATION(leaky_relu, M::where_gt(x, M::of(0), x, M::of(0.01) * x), M::where_gt(x, M::of(0), M::of(1), M::of(0.01)));

// x Phi(x), with Phi(x) = (1 + erf(x / sqrt(2))) / 2
struct gelu {
  static constexpr double kRootHalf = 0.70710678118654752440;
  template <class M> static KF_INLINE typename M::V phi(typename M::V x) {
    typename M::V power;
    if constexpr (requires { M::normal_cdf(x); }) return M::normal_cdf(x);
    else if constexpr (requires { M::erf(x); }) return M::of(0.5) + M::of(0.5) * M::erf(x * M::of(kRootHalf));
    else return phi<M>(x, power);
  }
  template <class M> static KF_INLINE typename M::V phi(typename M::V x, typename M::V& power) {
    if constexpr (requires { M::normal_cdf(x, power); }) return M::normal_cdf(x, power);
    else return M::of(0.5) + M::of(0.5) * M::erf(x * M::of(kRootHalf), power);
  }
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return x * phi<M>(x); }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    typename M::V power;  // e^(-x^2 / 2)
    const auto p = phi<M>(x, power);
    return p + x * (M::of(0.39894228040143267794) * power);
  }
};

// x (1 + tanh(u)) / 2 = x sigmoid(2 u); u = sqrt(2 / pi) (x + 0.044715 x^3)
struct gelu_tanh {
  static constexpr double kTwice = 1.59576912160573071176, kCube = 0.044715;  // 2 sqrt(2 / pi)
  template <class M> static KF_INLINE typename M::V twice_u(typename M::V x) {
    return x * (M::of(kTwice) + M::of(kTwice * kCube) * (x * x));
  }
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return x * sigmoid_of<M>(twice_u<M>(x)); }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    const auto v = twice_u<M>(x), e = M::exp(M::where_gt(v, M::of(0), M::of(0) - v, v)), r = M::reciprocal(M::of(1) + e);
    const auto sigmoid = M::where_gt(v, M::of(0), r, e * r);  // 1 - sigmoid, without cancellation
    return sigmoid + x * (e * r * r) * (M::of(kTwice) + M::of(3 * kTwice * kCube) * (x * x));
  }
};

template <class M> KF_INLINE typename M::V quick_gelu_slope(typename M::V x, typename M::V sigmoid) {
  return sigmoid + M::of(1.702) * x * sigmoid * (M::of(1) - sigmoid);
}
KF_ACTIVATION(quick_gelu, x * sigmoid_of<M>(M::of(1.702) * x), quick_gelu_slope<M>(x, sigmoid_of<M>(M::of(1.702) * x)));

template <class M> KF_INLINE typename M::V silu_slope(typename M::V x, typename M::V sigmoid) {
  return sigmoid * (M::of(1) + x * (M::of(1) - sigmoid));
}
KF_ACTIVATION(silu, x * sigmoid_of<M>(x), silu_slope<M>(x, sigmoid_of<M>(x)));

struct tanh {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return M::tanh(x); }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    const auto e = M::exp(M::where_gt(x, M::of(0), M::of(-2) * x, M::of(2) * x)), r = M::reciprocal(M::of(1) + e);
    return M::of(4) * e * r * r;  // 1 - tanh^2 without cancellation
  }
};

KF_ACTIVATION(sigmoid, sigmoid_of<M>(x), from_sigmoid::slope<M>(sigmoid_of<M>(x)));

// x tanh(log(1 + e^x)): with n = e^x (e^x + 2) the tanh is n / (n + 2), 1 from 20 on
struct mish {
  template <class M> static KF_INLINE typename M::V n_of(typename M::V x) {
    const auto e = M::exp(M::where_gt(x, M::of(20), M::of(20), x));
    return e * (e + M::of(2));
  }
  template <class M> static KF_INLINE typename M::V value(typename M::V x) {
    const auto n = n_of<M>(x);
    return x * (n * M::reciprocal(n + M::of(2)));
  }
  // 1 - tanh^2 is 4 (n + 1) / (n + 2)^2; x - x makes infinities NaN.
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    const auto n = n_of<M>(x), r = M::reciprocal(n + M::of(2));
    const auto below = n * r + x * sigmoid_of<M>(x) * (((n + M::of(1)) * r) * (M::of(4) * r));
    return M::where_gt(x, M::of(20), M::of(1), below) + (x - x);
  }
};

KF_ACTIVATION(softplus, M::where_gt(x, M::of(20), x, M::log1p(M::exp(x))),
              M::where_gt(x, M::of(20), M::of(1), sigmoid_of<M>(x)));
KF_ACTIVATION(hardswish,
              x * M::where_gt(M::of(-3), x, M::of(0), M::where_gt(x, M::of(3), M::of(6), x + M::of(3))) * M::of(1.0 / 6),
              M::where_ge(M::of(-3), x, M::of(0), M::where_ge(x, M::of(3), M::of(1), M::of(0.5) + x * M::of(1.0 / 3))));
KF_ACTIVATION(elu, M::where_gt(x, M::of(0), x, M::expm1(x)), M::where_gt(x, M::of(0), M::of(1), M::exp(x)));

// (x + s) / 2 with s = sqrt(x^2 + 4), without cancellation: max(x, 0) + 2 / (s + |x|). From 2^30 on s is |x|.
struct squareplus {
  template <class M> static KF_INLINE typename M::V size(typename M::V x) { return M::where_gt(M::of(0), x, M::of(0) - x, x); }
  template <class M> static KF_INLINE typename M::V root(typename M::V x) {
    return M::where_gt(size<M>(x), M::of(1 << 30), size<M>(x), M::sqrt(x * x + M::of(4)));
  }
  template <class M> static KF_INLINE typename M::V value(typename M::V x) {
    return relu::value<M>(x) + M::reciprocal(M::of(0.5) * root<M>(x) + M::of(0.5) * size<M>(x));
  }
  // Quarters keep the reciprocal normal.
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    return M::of(0.25) * value<M>(x) * M::reciprocal(M::of(0.25) * root<M>(x)) + (x - x);
  }
};

KF_ACTIVATION(selu, M::where_gt(x, M::of(0), M::of(1.0507009873554805) * x, M::of(1.7580993408473769) * M::expm1(x)),
              M::where_gt(x, M::of(0), M::of(1.0507009873554805), M::of(1.7580993408473769) * M::exp(x)));

// A slope of 0 gives 0, whatever dy, as in PyTorch.
template <class F> inline constexpr bool kSelects = false;
template <> inline constexpr bool kSelects<sign> = true;
template <> inline constexpr bool kSelects<relu> = true;
template <> inline constexpr bool kSelects<relu_squared> = true;
template <> inline constexpr bool kSelects<hardswish> = true;

// The slopes at 0 and 1 are all, so a bit tells which.
template <class F> inline constexpr bool kTwoSlopes = false;
template <> inline constexpr bool kTwoSlopes<relu> = true;
template <> inline constexpr bool kTwoSlopes<leaky_relu> = true;

// The gradient at x, from g at F(x).
template <class F, class M> KF_INLINE typename M::V times_slope(typename M::V g, typename M::V x) {
  const auto slope = F::template slope<M>(x);
  if constexpr (kSelects<F>) return M::where_eq(slope, M::of(0), M::of(0), g * slope);
  else return g * slope;
}

}  // namespace kf::act
