// Pointwise chains in registers: from the operands as they lie in memory to the results, in one loop. Included by files that are
// compiled once per instruction set.
//
// There is a loop for each activation, direction and compute type. What else distinguishes chains (dtypes, how the operands are
// combined, what is absent) is decided for every pair of vectors: branches that fall the same way all through a loop are predicted,
// and a small part of the work of an exponential. Activations that take few instructions themselves have a loop for each dtype.
#pragma once

#include <cstring>

#include "chain.h"
#include "cpu/math.h"
#include "cpu/pairs.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

#define KF_CODE(name) name,
enum class Activation : int32_t { KF_ACTIVATIONS(KF_CODE) };
#undef KF_CODE

// The operands of a loop, each of as many elements, side by side. Absent ones have no data.
template <class A> struct ChainLoop {
  Combine combine = Combine::kFirst;
  int32_t activation = 0;
  A scale = 1;
  Source<A> a, b;
  Source<A> kept;    // of dropout, as A: all bits set where an element is kept, none where it is dropped
  Source<A> addend;  // forward: to what dropout leaves
  Source<A> dy;      // backward
  Target<A> first;   // y, or da
  Target<A> second;  // y once more, or db
  A* sums = nullptr; // backward: db is added to these too; whole pairs of them

  template <class F> void each_source(F&& f) {
    for (auto* source : {&a, &b, &kept, &addend, &dy})
      if (source->data) f(*source);
  }
  template <class F> void each_target(F&& f) {
    for (auto* target : {&first, &second})
      if (target->data) f(*target);
  }
};

// The argument of the activation.
template <class A> KF_INLINE Pair<A> combined(Combine combine, const Pair<A>& a, const Pair<A>& b) {
  if (combine == Combine::kAdd) return a + b;
  return combine == Combine::kMul ? a * b : a;
}

template <class F, class A> KF_INLINE Pair<A> value_of(const Pair<A>& z) {
  return {F::template value<Math<A>>(z.a), F::template value<Math<A>>(z.b)};
}

template <class F, class A> KF_INLINE Pair<A> times_slope(const Pair<A>& g, const Pair<A>& z) {
  return {act::times_slope<F, Math<A>>(g.a, z.a), act::times_slope<F, Math<A>>(g.b, z.b)};
}

// x * scale of what dropout keeps.
template <class A> KF_INLINE Pair<A> scaled(const ChainLoop<A>& c, const Pair<A>& x, int64_t i) {
  const auto y = x * both(c.scale);
  if (!c.kept.data) return y;
  return y & c.kept.template load<A>(i);
}

// y = dropout(scale * f(a, b)) + addend. By value, so that no store can be taken for a change of the operands.
template <class F, class T, class A> [[gnu::noinline]] void values(const ChainLoop<A> c, int64_t n) {
  for (int64_t i = 0; i < n; i += Pair<A>::kStep) {
    const auto a = c.a.template load<T>(i);
    Pair<A> b{a.a, a.b};
    if (c.combine != Combine::kFirst) b = c.b.template load<T>(i);
    auto y = value_of<F>(combined(c.combine, a, b));
    if (c.combine == Combine::kGate) y = y * b;
    y = scaled(c, y, i);
    if (c.addend.data) y = y + c.addend.template load<T>(i);
    c.first.template store<T>(i, y);
    if (c.second.data) c.second.template store<T>(i, y);
  }
}

// Of g = dropout(scale * dy): g f'(a + b) for both operands of a sum, g f'(a b) times the other operand for a product, and
// g f'(a) b and g f(a) for a gate.
template <class F, class T, class A> [[gnu::noinline]] void gradients(const ChainLoop<A> c, int64_t n) {
  for (int64_t i = 0; i < n; i += Pair<A>::kStep) {
    const auto g = scaled(c, c.dy.template load<T>(i), i), a = c.a.template load<T>(i);
    Pair<A> b{a.a, a.b};
    if (c.combine != Combine::kFirst) b = c.b.template load<T>(i);
    const auto dz = times_slope<F>(c.combine == Combine::kGate ? g * b : g, combined(c.combine, a, b));
    auto da = dz, db = dz;
    if (c.combine == Combine::kMul) {
      da = dz * b;
      db = a * dz;
    } else if (c.combine == Combine::kGate) {
      db = value_of<F>(a) * g;
    }
    if (c.first.data) c.first.template store<T>(i, da);
    if (c.second.data) c.second.template store<T>(i, db);
    if (c.sums) store_pair(c.sums + i, load_pair(c.sums + i) + db);
  }
}

template <class F> inline constexpr bool kCheap = false;
#define KF_CHEAP(name) template <> inline constexpr bool kCheap<act::name> = true;
KF_CHEAP(identity) KF_CHEAP(sign) KF_CHEAP(from_tanh) KF_CHEAP(from_sigmoid) KF_CHEAP(relu) KF_CHEAP(relu_squared)
KF_CHEAP(leaky_relu) KF_CHEAP(hardswish)
#undef KF_CHEAP

template <class A> using Loop = void(const ChainLoop<A>, int64_t);

// The loops of one activation in one direction, for operands that are all of one type, or of several.
template <class A> struct LoopsOfTypes {
  Loop<A> *any, *same[4];  // at the position of the Dtype; null: use `any`
};

#define KF_LOOPS(direction)                                                                                           \
  template <class F, class A> constexpr LoopsOfTypes<A> direction##_of_types() {                                      \
    if constexpr (!kCheap<F> || std::is_same_v<A, double>)                                                            \
      return {direction<F, AnyType, A>, {}};                                                                          \
    else                                                                                                              \
      return {direction<F, AnyType, A>, {direction<F, c10::Half, A>, direction<F, c10::BFloat16, A>, direction<F, float, A>}}; \
  }
KF_LOOPS(values)
KF_LOOPS(gradients)
#undef KF_LOOPS

template <class A> using ChainLoops = LoopsOfTypes<A>[];
#define KF_VALUES(name) values_of_types<act::name, A>(),
template <class A> inline constexpr ChainLoops<A> kValues = {KF_ACTIVATIONS(KF_VALUES)};
#undef KF_VALUES
#define KF_GRADIENTS(name) gradients_of_types<act::name, A>(),
template <class A> inline constexpr ChainLoops<A> kGradients = {KF_ACTIVATIONS(KF_GRADIENTS)};
#undef KF_GRADIENTS

template <class A> Loop<A>* loop_for(const LoopsOfTypes<A>& loops, ChainLoop<A>& c) {
  const Dtype type = c.a.type;
  bool same = true;
  c.each_source([&](const Source<A>& source) { same = same && (source.type == type || &source == &c.kept); });
  c.each_target([&](const Target<A>& target) { same = same && target.type == type; });
  Loop<A>* found = same ? loops.same[static_cast<int>(type)] : nullptr;
  return found ? found : loops.any;
}

// Runs a loop over n elements. Those beyond the last whole pair are copied into whole pairs: every element passes through the same
// instructions, and has the same bits wherever it lies.
template <class A> [[gnu::noinline]] void run(const LoopsOfTypes<A>& loops, ChainLoop<A> c, int64_t n) {
  constexpr int64_t kStep = Pair<A>::kStep;
  const auto loop = loop_for(loops, c);
  const int64_t whole = n / kStep * kStep, rest = n - whole;
  if (whole) loop(c, whole);
  if (!rest) return;
  alignas(64) A copies[7][kStep] = {};
  char* results[2];
  int count = 0;
  c.each_source([&](Source<A>& source) {
    const int64_t size = size_of(source.type);
    source.data = std::memcpy(copies[count++], static_cast<const char*>(source.data) + whole * size, rest * size);
  });
  int stored = 0;
  c.each_target([&](Target<A>& target) {
    results[stored++] = static_cast<char*>(target.data) + whole * size_of(target.type);
    target.data = copies[count++];
    target.streams = false;
  });
  if (c.sums) c.sums += whole;
  loop(c, kStep);
  stored = 0;
  c.each_target([&](Target<A>& target) { std::memcpy(results[stored++], target.data, rest * size_of(target.type)); });
}

template <class A> void run_values(const ChainLoop<A>& c, int64_t n) { run<A>(kValues<A>[c.activation], c, n); }
template <class A> void run_gradients(const ChainLoop<A>& c, int64_t n) { run<A>(kGradients<A>[c.activation], c, n); }

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
