// The policy of elementary functions that shared/activations.h asks for, on at::vec. Errors are those of Sleef's functions
// named u10, at most 1 ULP, but that of erf in float: 1.5e-7 absolute (at::vec's approximation, which PyTorch's gelu has too).
#pragma once

#include <ATen/cpu/vec/vec.h>

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

template <class A> struct Math {
  using V = at::vec::Vectorized<A>;
  static V of(double c) { return V(static_cast<A>(c)); }
  static V exp(V x) { return x.exp(); }
  static V expm1(V x) { return x.expm1(); }
  static V log1p(V x) { return x.log1p(); }
  static V tanh(V x) { return x.tanh(); }
  static V erf(V x) { return x.erf(); }
  static V reciprocal(V x) { return x.reciprocal(); }
  static V where_gt(V a, V b, V yes, V no) { return V::blendv(no, yes, a > b); }
  static V where_ge(V a, V b, V yes, V no) { return V::blendv(no, yes, a >= b); }
};

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
