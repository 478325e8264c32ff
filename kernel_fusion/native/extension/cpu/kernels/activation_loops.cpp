// The loops of the pointwise chains. Compiled once per instruction set.
//
// There is a loop for each activation, direction and compute type. Other differences between chains (dtypes, how operands are
// combined, which are absent) are branches per pair of vectors. Such a branch always goes the same way, is predicted, and
// costs little beside an exponential. *Plain* chains have one dtype and no dropout, scale or addend. They have further loops:
// for every activation in bf16, whose elements then keep their lanes (cpu/simd.h), and for cheap activations in fp16 and fp32.
#include "cpu/activation_loops.h"

#include <bit>
#include <cstring>
#include <limits>

namespace kf::cpu::CPU_CAPABILITY {
namespace {

// What a loop knows about its chain at compile time: nothing,
struct AnyChain {
  using Type = AnyType;
  static constexpr bool kPlain = false;
};

// or that it is plain, with elements of type T.
template <class T> struct PlainChain {
  using Type = Alike<T>;
  static constexpr bool kPlain = true;
};

// The argument of the activation.
template <class A> KF_INLINE Pair<A> combined(Combine combine, const Pair<A>& a, const Pair<A>& b) {
  if (combine == Combine::kAdd) return a + b;
  return combine == Combine::kMul ? a * b : a;
}

// The value of the activation. If it will be rounded to bf16, gelu takes the faster RoughMath.
template <class F, class A> KF_INLINE Pair<A> value_of(const Pair<A>& z, bool to_bf16) {
  if constexpr (std::is_same_v<F, act::gelu> && std::is_same_v<A, float>)
    if (to_bf16) return value_of<F, A, RoughMath>(z);
  return value_of<F>(z);
}

// Whether a loop works on the bits of elements: relu of fp16 and bf16, and its gradient, need no conversions.
template <class F, class K>
inline constexpr bool kOnBits = std::is_same_v<F, act::relu> && K::kPlain && sizeof(typename K::Type) == 2;

// Computes y = x where `by` is positive or NaN, and 0 elsewhere.
template <class T, class A> KF_INLINE void keep_positive(const void* x, const void* by, const Target<A>& y, int64_t n) {
  using Bits = Vectorized<int16_t>;
  const Bits zero(0), negative_infinity(std::is_same_v<T, c10::Half> ? 0xfc00 : 0xff80);  // a negative NaN is a larger number
  for (int64_t i = 0; i < n; i += Bits::size()) {
    const auto v = Bits::loadu(static_cast<const int16_t*>(by) + i);
    const auto keep = (v > zero) | ((v > negative_infinity) & (v < zero));
    y.put(Bits::loadu(static_cast<const int16_t*>(x) + i) & keep, static_cast<int16_t*>(y.data) + i);
  }
}

// x * scale, or zero if dropout drops the element.
template <class K, class A> KF_INLINE Pair<A> scaled(const ChainLoop<A>& c, const Pair<A>& x, int64_t i) {
  if (K::kPlain) return x;
  const auto y = x * both(c.scale);
  if (!c.kept.data) return y;
  return y & c.kept.template load<A>(i);
}

// Computes y = dropout(scale * f(a, b)) + addend. `c` is passed by value, so that the compiler knows that no store changes it.
template <class F, class K, class A> [[gnu::noinline]] void values(const ChainLoop<A> c, int64_t n) {
  using T = typename K::Type;
  if constexpr (kOnBits<F, K>)
    if (c.combine == Combine::kFirst && !c.second.data) return keep_positive<T>(c.a.data, c.a.data, c.first, n);
  const Combine combine = c.combine;
  for (int64_t i = 0; i < n; i += Pair<A>::kStep) {
    const auto a = c.a.template load<T>(i);
    Pair<A> b{a.a, a.b};
    if (combine != Combine::kFirst) b = c.b.template load<T>(i);
    auto y = value_of<F>(combined(combine, a, b), c.to_bf16);
    if (combine == Combine::kGate) y = y * b;
    y = scaled<K>(c, y, i);
    if (!K::kPlain && c.addend.data) y = y + c.addend.template load<T>(i);
    c.first.template store<T>(i, y);
    if (c.second.data) c.second.template store<T>(i, y);
  }
}

// Computes da and db, with g = dropout(scale * dy): for f(a + b) both are g f'(a + b); for f(a b) they are g f'(a b) times the
// other factor; for a gate f(a) b they are g f'(a) b and g f(a).
template <class F, class K, class A> [[gnu::noinline]] void gradients(const ChainLoop<A> c, int64_t n) {
  using T = typename K::Type;
  if constexpr (kOnBits<F, K>)
    if (c.combine == Combine::kFirst) return keep_positive<T>(c.dy.data, c.a.data, c.first, n);
  const Combine combine = c.combine;
  for (int64_t i = 0; i < n; i += Pair<A>::kStep) {
    const auto g = scaled<K>(c, c.dy.template load<T>(i), i), a = c.a.template load<T>(i);
    Pair<A> b{a.a, a.b};
    if (combine != Combine::kFirst) b = c.b.template load<T>(i);
    const auto z = combined(combine, a, b), dz = times_slope<F>(combine == Combine::kGate ? g * b : g, z);
    auto da = dz, db = dz;
    if (combine == Combine::kMul) {
      da = dz * b;
      db = a * dz;
    } else if (combine == Combine::kGate) {
      db = value_of<F>(z) * g;  // a gate's z is a, so that value and slope share an exponential
    }
    if (c.first.data) c.first.template store<T>(i, da);
    if (c.second.data) c.second.template store<T>(i, db);
    if (c.sums) store_pair(c.sums + i, load_pair(c.sums + i) + db);
  }
}

template <class F> inline constexpr bool kCheap = false;
// clang-format off
#define KF_CHEAP(name) template <> inline constexpr bool kCheap<act::name> = true;
KF_CHEAP(identity) KF_CHEAP(sign) KF_CHEAP(from_tanh) KF_CHEAP(from_sigmoid) KF_CHEAP(relu) KF_CHEAP(relu_squared)
KF_CHEAP(leaky_relu) KF_CHEAP(hardswish)
#undef KF_CHEAP
// clang-format on

template <class A> using Loop = void(const ChainLoop<A>, int64_t);

// The loops of one activation in one direction.
template <class A> struct LoopsOf {
  Loop<A>* any;
  Loop<A>* plain[4] = {};  // indexed by Dtype; if null, `any` serves
};

#define KF_LOOPS(direction)                                                                                              \
  template <class F, class A> constexpr LoopsOf<A> loops_of_##direction() {                                              \
    LoopsOf<A> loops{direction<F, AnyChain, A>};                                                                         \
    if constexpr (std::is_same_v<A, float>) {                                                                            \
      const auto add = [&]<class T>(T) { loops.plain[static_cast<int>(kDtypeOf<T>)] = direction<F, PlainChain<T>, A>; }; \
      add(c10::BFloat16{});                                                                                              \
      if constexpr (kCheap<F>) add(float{}), add(c10::Half{});                                                           \
    }                                                                                                                    \
    return loops;                                                                                                        \
  }
KF_LOOPS(values)
KF_LOOPS(gradients)
#undef KF_LOOPS

template <class A> using ChainLoops = LoopsOf<A>[];
#define KF_VALUES(name) loops_of_values<act::name, A>(),
template <class A> inline constexpr ChainLoops<A> kValues = {KF_ACTIVATIONS(KF_VALUES)};
#undef KF_VALUES
#define KF_GRADIENTS(name) loops_of_gradients<act::name, A>(),
template <class A> inline constexpr ChainLoops<A> kGradients = {KF_ACTIVATIONS(KF_GRADIENTS)};
#undef KF_GRADIENTS

template <class A> Loop<A>* loop_for(const LoopsOf<A>& loops, const ChainLoop<A>& c) {
  const Dtype type = c.a.type;
  bool plain = c.scale == 1 && !c.kept.data && !c.addend.data;
  c.each_source(c, [&](const Source<A>& source) { plain = plain && source.type == type; });
  c.each_target(c, [&](const Target<A>& target) { plain = plain && target.type == type; });
  Loop<A>* found = plain ? loops.plain[static_cast<int>(type)] : nullptr;
  return found ? found : loops.any;
}

// Runs a loop over the last elements, which are less than a pair. They are copied into whole pairs, so that the bits of a
// result do not depend on where its element lies.
template <class A> [[gnu::noinline]] void run_rest(Loop<A>* loop, ChainLoop<A> c, int64_t whole, int64_t rest) {
  constexpr int64_t kStep = Pair<A>::kStep;
  alignas(64) A copies[7][kStep] = {};
  char* results[2];
  int count = 0;
  c.each_source(c, [&](Source<A>& source) {
    const int64_t size = size_of(source.type);
    source.data = std::memcpy(copies[count++], static_cast<const char*>(source.data) + whole * size, rest * size);
  });
  int stored = 0;
  c.each_target(c, [&](Target<A>& target) {
    results[stored++] = static_cast<char*>(target.data) + whole * size_of(target.type);
    target.data = copies[count++];
    target.streams = false;
  });
  if (c.sums) c.sums += whole;
  loop(c, kStep);
  stored = 0;
  c.each_target(c, [&](Target<A>& target) { std::memcpy(results[stored++], target.data, rest * size_of(target.type)); });
}

template <class A> void run(const LoopsOf<A>& loops, const ChainLoop<A>& c, int64_t n) {
  const auto loop = loop_for(loops, c);
  const int64_t rest = n % Pair<A>::kStep, whole = n - rest;
  if (whole) loop(c, whole);
  if (rest) run_rest(loop, c, whole, rest);
}

}  // namespace

template <class A> void run_values(const ChainLoop<A>& c, int64_t n) { run<A>(kValues<A>[c.activation], c, n); }
template <class A> void run_gradients(const ChainLoop<A>& c, int64_t n) { run<A>(kGradients<A>[c.activation], c, n); }
template void run_values(const ChainLoop<float>&, int64_t);
template void run_values(const ChainLoop<double>&, int64_t);
template void run_gradients(const ChainLoop<float>&, int64_t);
template void run_gradients(const ChainLoop<double>&, int64_t);

}  // namespace kf::cpu::CPU_CAPABILITY
