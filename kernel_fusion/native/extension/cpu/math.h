// The elementary functions that shared/activations.h builds on, for SIMD vectors. Included by files that are compiled once per
// instruction set.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include "shared/activations.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {

// Errors are those of at::vec: about 1 ULP (Sleef), and 1.5e-7 absolute for erf of float.
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
  static V where_eq(V a, V b, V yes, V no) { return V::blendv(no, yes, a == b); }
};

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
