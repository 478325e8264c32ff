// Value and slope of activations, for all value types and kinds of device.
//
// M is a policy of functions on a value type M::V: a scalar in CUDA (native/kernels/math.cuh), a SIMD vector on CPUs
// (native/extension/cpu/math.h). Besides + - * it has
//
//   of(c)                                    a constant
//   exp, expm1, log1p, tanh, sqrt, reciprocal
//   erf(x, power)                            and power = e^(-x^2); or
//   normal_cdf(x, power)                     (1 + erf(x / sqrt(2))) / 2 and power = e^(-x^2 / 2)
//   erf(x) or normal_cdf(x)                  if faster without the power
//   where_gt(a, b, yes, no)                  a > b ? yes : no; no if a or b is NaN
//   where_ge, where_eq                       likewise
//
// NaN, infinities and slopes at kinks are PyTorch's.
#pragma once

#include "shared/inline.h"
#include "shared/names.h"

namespace kf::act {

template <class M> KF_INLINE typename M::V sigmoid_of(typename M::V x) {
  return M::reciprocal(M::of(1) + M::exp(M::of(0) - x));
}

struct identity {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return x; }
  template <class M> static KF_INLINE typename M::V slope(typename M::V) { return M::of(1); }
};

// The slope of |x|.
struct sign {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) {
    return M::where_gt(x, M::of(0), M::of(1), M::where_gt(M::of(0), x, M::of(-1), M::of(0)));  // NaN: 0, as in PyTorch
  }
  template <class M> static KF_INLINE typename M::V slope(typename M::V) { return M::of(0); }
};

// tanh's slope at its value x, 1 - x^2
struct from_tanh {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return x - x * x * x * M::of(1.0 / 3); }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) { return M::of(1) - x * x; }
};

// sigmoid's slope at its value x, x (1 - x)
struct from_sigmoid {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return x * x * (M::of(0.5) - x * M::of(1.0 / 3)); }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) { return x * (M::of(1) - x); }
};

struct relu {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return M::where_ge(M::of(0), x, M::of(0), x); }
  template <class M> static constexpr KF_INLINE typename M::V slope(typename M::V x) {
    return M::where_ge(M::of(0), x, M::of(0), M::of(1));
  }
};

struct relu_squared {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) {
    const auto r = relu::value<M>(x);
    return r * r;
  }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) { return M::of(2) * relu::value<M>(x); }
};

struct leaky_relu {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) {
    return M::where_gt(x, M::of(0), x, M::of(0.01) * x);
  }
  template <class M> static constexpr KF_INLINE typename M::V slope(typename M::V x) {
    return M::where_gt(x, M::of(0), M::of(1), M::of(0.01));
  }
};

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

// x (1 + tanh(u)) / 2 = x sigmoid(2 u), without cancellation; u = sqrt(2 / pi) (x + 0.044715 x^3)
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

struct quick_gelu {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return x * sigmoid_of<M>(M::of(1.702) * x); }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    const auto s = sigmoid_of<M>(M::of(1.702) * x);
    return s + M::of(1.702) * x * s * (M::of(1) - s);
  }
};

struct silu {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return x * sigmoid_of<M>(x); }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    const auto s = sigmoid_of<M>(x);
    return s * (M::of(1) + x * (M::of(1) - s));
  }
};

struct tanh {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return M::tanh(x); }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    const auto e = M::exp(M::where_gt(x, M::of(0), M::of(-2) * x, M::of(2) * x)), r = M::reciprocal(M::of(1) + e);
    return M::of(4) * e * r * r;  // 1 - tanh^2 without cancellation
  }
};

struct sigmoid {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return sigmoid_of<M>(x); }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    const auto s = sigmoid_of<M>(x);
    return s * (M::of(1) - s);
  }
};

// x tanh(log(1 + e^x)): with n = e^x (e^x + 2) the tanh is n / (n + 2), from x = 20 on 1
struct mish {
  template <class M> static KF_INLINE typename M::V n_of(typename M::V x) {
    const auto e = M::exp(M::where_gt(x, M::of(20), M::of(20), x));
    return e * (e + M::of(2));
  }
  template <class M> static KF_INLINE typename M::V value(typename M::V x) {
    const auto n = n_of<M>(x);
    return x * (n * M::reciprocal(n + M::of(2)));
  }
  // 1 - tanh^2 is 4 (n + 1) / (n + 2)^2, and from 20 on the slope 1; x - x makes infinities NaN, as in PyTorch.
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    const auto n = n_of<M>(x), r = M::reciprocal(n + M::of(2));
    const auto below = n * r + x * sigmoid_of<M>(x) * (((n + M::of(1)) * r) * (M::of(4) * r));
    return M::where_gt(x, M::of(20), M::of(1), below) + (x - x);
  }
};

struct softplus {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) {
    return M::where_gt(x, M::of(20), x, M::log1p(M::exp(x)));
  }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    return M::where_gt(x, M::of(20), M::of(1), sigmoid_of<M>(x));
  }
};

struct hardswish {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) {
    const auto ramp = M::where_gt(M::of(-3), x, M::of(0), M::where_gt(x, M::of(3), M::of(6), x + M::of(3)));
    return x * ramp * M::of(1.0 / 6);
  }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    return M::where_ge(M::of(-3), x, M::of(0), M::where_ge(x, M::of(3), M::of(1), x * M::of(1.0 / 3) + M::of(0.5)));
  }
};

struct elu {
  template <class M> static KF_INLINE typename M::V value(typename M::V x) { return M::where_gt(x, M::of(0), x, M::expm1(x)); }
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    return M::where_gt(x, M::of(0), M::of(1), M::exp(x));
  }
};

// (x + s) / 2 with s = sqrt(x^2 + 4), without cancellation: max(x, 0) + 2 / (s + |x|). From 2^30 on s is |x|.
struct squareplus {
  template <class M> static KF_INLINE typename M::V size(typename M::V x) { return M::where_gt(M::of(0), x, M::of(0) - x, x); }
  template <class M> static KF_INLINE typename M::V root(typename M::V x) {
    return M::where_gt(size<M>(x), M::of(1 << 30), size<M>(x), M::sqrt(x * x + M::of(4)));
  }
  template <class M> static KF_INLINE typename M::V value(typename M::V x) {
    return relu::value<M>(x) + M::reciprocal(M::of(0.5) * root<M>(x) + M::of(0.5) * size<M>(x));
  }
  // Quarters keep the reciprocal normal; x - x makes infinities NaN.
  template <class M> static KF_INLINE typename M::V slope(typename M::V x) {
    return M::of(0.25) * value<M>(x) * M::reciprocal(M::of(0.25) * root<M>(x)) + (x - x);
  }
};

// PyTorch's backward selects: a slope of 0 gives 0, whatever dy.
template <class F> inline constexpr bool kSelects = false;
template <> inline constexpr bool kSelects<sign> = true;
template <> inline constexpr bool kSelects<relu> = true;
template <> inline constexpr bool kSelects<relu_squared> = true;
template <> inline constexpr bool kSelects<hardswish> = true;

// The slope has two values, so a bit tells which; it is constexpr.
template <class F> inline constexpr bool kTwoSlopes = false;
template <> inline constexpr bool kTwoSlopes<relu> = true;
template <> inline constexpr bool kTwoSlopes<leaky_relu> = true;

// For the compiler's numbers.
struct Constants {
  using V = double;
  static constexpr KF_INLINE V of(double c) { return c; }
  static constexpr KF_INLINE V where_gt(V a, V b, V yes, V no) { return a > b ? yes : no; }
  static constexpr KF_INLINE V where_ge(V a, V b, V yes, V no) { return a >= b ? yes : no; }
  static constexpr KF_INLINE V where_eq(V a, V b, V yes, V no) { return a == b ? yes : no; }
};

// A bit, as backward's argument 0 or 1, gives its slope.
template <class F> constexpr KF_INLINE bool bits_tell_slopes() {
  if constexpr (kTwoSlopes<F>) return F::template slope<Constants>(0) != F::template slope<Constants>(1);
  else return true;
}
#define KF_CHECK_SLOPES(name) static_assert(bits_tell_slopes<name>(), "of equal slopes at 0 and 1 a bit does not tell: " #name);
KF_ACTIVATIONS(KF_CHECK_SLOPES)
#undef KF_CHECK_SLOPES

// The gradient at x, from g at F(x).
template <class F, class M> KF_INLINE typename M::V times_slope(typename M::V g, typename M::V x) {
  const auto slope = F::template slope<M>(x);
  if constexpr (kSelects<F>) return M::where_eq(slope, M::of(0), M::of(0), g * slope);
  else return g * slope;
}

}  // namespace kf::act
