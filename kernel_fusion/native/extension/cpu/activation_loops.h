// The loops of pointwise chains. One loop reads the operands, computes in registers and stores the results.
#pragma once

#include "stages.h"
#include "cpu/math.h"
#include "cpu/typed_row.h"

namespace kf::cpu::CPU_CAPABILITY {

#define KF_CODE(name) name,
enum class Activation : int32_t { KF_ACTIVATIONS(KF_CODE) };
#undef KF_CODE

// The operands of a loop, all contiguous. An absent operand has no data.
template <class A> struct ChainLoop {
  Combine combine = Combine::kFirst;
  int32_t activation = 0;
  bool to_bf16 = false;  // forward: y will be rounded to bf16, so its activation may be computed less exactly
  A scale = 1;
  Source<A> a, b;
  Source<A> kept;     // dropout's mask as elements of A: all bits are set if an element is kept
  Source<A> addend;   // forward: is added after dropout
  Source<A> dy;       // backward
  Target<A> first;    // y, or da
  Target<A> second;   // a second copy of y, or db
  A* sums = nullptr;  // backward: db is also added to these sums, in whole pairs

  template <class Loop, class F> static void each_source(Loop& c, F&& f) {
    for (auto* source : {&c.a, &c.b, &c.kept, &c.addend, &c.dy})
      if (source->data) f(*source);
  }
  template <class Loop, class F> static void each_target(Loop& c, F&& f) {
    for (auto* target : {&c.first, &c.second})
      if (target->data) f(*target);
  }
};

// Compute y, or the gradients, of n elements (cpu/kernels/activation_loops.cpp).
template <class A> void run_values(const ChainLoop<A>& c, int64_t n);
template <class A> void run_gradients(const ChainLoop<A>& c, int64_t n);

namespace {

template <class F, class A, class M = Math<A>> KF_INLINE Pair<A> value_of(const Pair<A>& z) {
  return {F::template value<M>(z.a), F::template value<M>(z.b)};
}

template <class F, class A> KF_INLINE Vectorized<A> times_slope(const Vectorized<A>& g, const Vectorized<A>& z) {
  return act::times_slope<F, Math<A>>(g, z);
}
template <class F, class A> KF_INLINE Pair<A> times_slope(const Pair<A>& g, const Pair<A>& z) {
  return {times_slope<F>(g.a, z.a), times_slope<F>(g.b, z.b)};
}

}  // namespace
}  // namespace kf::cpu::CPU_CAPABILITY
