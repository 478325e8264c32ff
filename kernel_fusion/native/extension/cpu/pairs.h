// Elements of any type, loaded and stored as vectors of the accumulator type; for the kernels, once per instruction set.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <type_traits>

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

using at::vec::Vectorized;

template <class T> using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Two vectors of accumulators at a time: one full vector of a 16-bit type.
template <class A> struct Pair {
  using V = Vectorized<A>;
  static constexpr int64_t kStep = 2 * V::size();
  V a, b;
};

template <class T> inline Pair<AccOf<T>> load_pair(const T* p) {
  using V = Vectorized<AccOf<T>>;
  if constexpr (std::is_same_v<T, AccOf<T>>) {
    return {V::loadu(p), V::loadu(p + V::size())};
  } else {
    const auto [a, b] = at::vec::convert_to_float<T>(Vectorized<T>::loadu(p));
    return {a, b};
  }
}

template <class T> inline void store_pair(T* p, const Pair<AccOf<T>>& v) {
  using V = Vectorized<AccOf<T>>;
  if constexpr (std::is_same_v<T, AccOf<T>>) {
    v.a.store(p);
    v.b.store(p + V::size());
  } else {
    at::vec::convert_from_float<T>(v.a, v.b).store(p);
  }
}

template <class A> inline Pair<A> operator+(const Pair<A>& x, const Pair<A>& y) { return {x.a + y.a, x.b + y.b}; }
template <class A> inline Pair<A> operator-(const Pair<A>& x, const Pair<A>& y) { return {x.a - y.a, x.b - y.b}; }
template <class A> inline Pair<A> operator*(const Pair<A>& x, const Pair<A>& y) { return {x.a * y.a, x.b * y.b}; }
template <class A> inline Pair<A> both(A v) { return {Vectorized<A>(v), Vectorized<A>(v)}; }
template <class A> inline Pair<A> fma(const Pair<A>& x, const Pair<A>& y, const Pair<A>& z) {
  return {at::vec::fmadd(x.a, y.a, z.a), at::vec::fmadd(x.b, y.b, z.b)};
}
inline float fma(float x, float y, float z) { return std::fma(x, y, z); }
inline double fma(double x, double y, double z) { return std::fma(x, y, z); }

// One element, in the same notation, for the end of a row.
template <class T> inline AccOf<T> load_one(const T* p) { return static_cast<AccOf<T>>(*p); }

template <class A> inline A total(const Pair<A>& v) {
  const auto sum = v.a + v.b;
  A lanes[Vectorized<A>::size()], result = 0;
  sum.store(lanes);
  for (const A lane : lanes) result += lane;
  return result;
}

// A sum in two levels: its error grows with the length of a block, not of the row. Elements that are equal, such as the zeros that
// relu leaves, would all round the same way in one long chain.
template <class A> struct Cascade {
  static constexpr int64_t kBlock = 16 * Pair<A>::kStep;
  Pair<A> block = both<A>(0), blocks = both<A>(0);

  // To be called before what lies at i, from 0 on, is added to `block`.
  void next(int64_t i) {
    if (i % kBlock != 0) return;
    blocks = blocks + block;
    block = both<A>(0);
  }
};
template <class A> inline A total(const Cascade<A>& sum) { return total(sum.blocks + sum.block); }

// Calls vector(i) for each full pair of [0, n) and scalar(i) for the rest.
template <class A, class Vector, class Scalar> inline void sweep(int64_t n, Vector&& vector, Scalar&& scalar) {
  int64_t i = 0;
  for (; i + Pair<A>::kStep <= n; i += Pair<A>::kStep) vector(i);
  for (; i < n; ++i) scalar(i);
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
