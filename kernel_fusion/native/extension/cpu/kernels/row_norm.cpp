// CPU row norm, forward and backward, on at::vec. Compiled once per instruction set (-DCPU_CAPABILITY=...).
//
// A row is read in chunks of kStatisticsChunk elements that stay in L1. Forward: one pass for the statistics (per chunk its mean
// and the squared deviations from it, joined over chunks in double by Chan's formula, so mean/std = 1e4 and long rows
// lose nothing), one pass for the result. Backward: one pass for the two sums and the weight gradients, one for dx.
// The order of every sum depends on the row length alone.
#include "cpu/chunk.h"
#include "cpu/kernels.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <type_traits>

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

using at::vec::Vectorized;

constexpr int64_t kStatisticsChunk = 2048;

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

// Calls vector(i) for each full pair of [0, n) and scalar(i) for the rest.
template <class A, class Vector, class Scalar> inline void sweep(int64_t n, Vector&& vector, Scalar&& scalar) {
  int64_t i = 0;
  for (; i + Pair<A>::kStep <= n; i += Pair<A>::kStep) vector(i);
  for (; i < n; ++i) scalar(i);
}

// Sum of f over [0, n). f takes a Pair or an element, loaded from x. Two chains hide the latency of the additions.
template <class T, class F> inline AccOf<T> sum_of(const T* x, int64_t n, F&& f) {
  using A = AccOf<T>;
  constexpr int64_t kStep = Pair<A>::kStep;
  Pair<A> first = both<A>(0), second = both<A>(0);
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    first = f(load_pair(x + i), first);
    second = f(load_pair(x + i + kStep), second);
  }
  if (i + kStep <= n) {
    first = f(load_pair(x + i), first);
    i += kStep;
  }
  A rest = 0;
  for (; i < n; ++i) rest = f(load_one(x + i), rest);
  return total(first + second) + rest;
}

// Sums of x - center and of its square over [0, n).
template <class T> inline std::pair<double, double> sums_around(const T* x, int64_t n, AccOf<T> center) {
  using A = AccOf<T>;
  const auto centers = both(center);
  Pair<A> sums = both<A>(0), squares = both<A>(0);
  A sum = 0, square = 0;
  sweep<A>(
      n,
      [&](int64_t i) {
        const auto d = load_pair(x + i) - centers;
        sums = sums + d;
        squares = fma(d, d, squares);
      },
      [&](int64_t i) {
        const A d = load_one(x + i) - center;
        sum += d;
        square = fma(d, d, square);
      });
  return {total(sums) + sum, total(squares) + square};
}

struct Moments {
  double mean, variance;
};

template <class T> Moments moments(const T* x, int64_t n, bool rms) {
  using A = AccOf<T>;
  double base = 0, mean = 0, squares = 0;  // the mean counts from base, so that joining chunks rounds small numbers
  for (int64_t start = 0; start < n; start += kStatisticsChunk) {
    const int64_t count = std::min(kStatisticsChunk, n - start);
    if (rms) {
      squares += sum_of(x + start, count, [](auto v, auto acc) { return fma(v, v, acc); });
      continue;
    }
    const A center = sum_of(x + start, count, [](auto v, auto acc) { return acc + v; }) / static_cast<A>(count);
    // The rounded center leaves a small rest, which corrects both moments: without it mean / std = 1e4 loses digits.
    const auto [rest, deviations] = sums_around(x + start, count, center);
    if (start == 0) base = center;
    const double local = (center - base) + rest / static_cast<double>(count);
    // Chan: join (start elements, mean, squares) and (count elements, local, deviations).
    const double shift = local - mean, joined = static_cast<double>(start + count);
    mean += shift * static_cast<double>(count) / joined;
    squares += deviations - rest * rest / static_cast<double>(count) +
               shift * shift * static_cast<double>(start) * static_cast<double>(count) / joined;
  }
  return {base + mean, squares / static_cast<double>(n)};
}

template <class X, class Y> void forward_rows(const Forward& c, int64_t begin, int64_t end) {
  using A = AccOf<X>;
  const auto* weight = static_cast<const A*>(c.weight);
  const auto* bias = static_cast<const A*>(c.bias);
  for (int64_t row = begin; row < end; ++row) {
    const X* x = static_cast<const X*>(c.x) + row_offset(c.x_rows, row);
    Y* y = static_cast<Y*>(c.y) + row * c.cols;
    const Moments m = moments(x, c.cols, c.rms);
    const A mean = static_cast<A>(m.mean), rstd = static_cast<A>(1 / std::sqrt(m.variance + c.eps));
    if (c.mean) static_cast<A*>(c.mean)[row] = mean;
    if (c.rstd) static_cast<A*>(c.rstd)[row] = rstd;
    const auto means = both(mean), rstds = both(rstd);
    const auto write = [&](auto&& scale_shift) {
      sweep<A>(
          c.cols, [&](int64_t i) { store_pair(y + i, scale_shift((load_pair(x + i) - means) * rstds, i)); },
          [&](int64_t i) { y[i] = static_cast<Y>(scale_shift((load_one(x + i) - mean) * rstd, i)); });
    };
    // Loads from an accumulator array, as a pair or as one element, like `like`.
    const auto at = [](const A* p, int64_t i, auto like) {
      if constexpr (std::is_same_v<decltype(like), A>) return p[i];
      else return load_pair(p + i);
    };
    if (weight && bias) write([&](auto n, int64_t i) { return fma(n, at(weight, i, n), at(bias, i, n)); });
    else if (weight) write([&](auto n, int64_t i) { return n * at(weight, i, n); });
    else if (bias) write([&](auto n, int64_t i) { return n + at(bias, i, n); });
    else write([](auto n, int64_t) { return n; });
  }
}

// kRows rows together: they share the loads of weight and of dweight and dbias, to which they are added one by one.
template <class X, class DY, int kRows> void backward_together(const Backward& c, int64_t first) {
  using A = AccOf<X>;
  using P = Pair<A>;
  const auto* weight = static_cast<const A*>(c.weight);
  auto* dweight = static_cast<A*>(c.dweight);
  auto* dbias = static_cast<A*>(c.dbias);
  const X* x[kRows];
  const DY* dy[kRows];
  A mean[kRows], rstd[kRows];
  double sum_g[kRows] = {}, sum_gx[kRows] = {};
  for (int r = 0; r < kRows; ++r) {
    x[r] = static_cast<const X*>(c.x) + row_offset(c.x_rows, first + r);
    dy[r] = static_cast<const DY*>(c.dy) + row_offset(c.dy_rows, first + r);
    mean[r] = c.rms ? A(0) : static_cast<const A*>(c.mean)[first + r];
    rstd[r] = static_cast<const A*>(c.rstd)[first + r];
  }
  for (int64_t start = 0; start < c.cols; start += kStatisticsChunk) {
    const int64_t stop = std::min(start + kStatisticsChunk, c.cols);
    P gs[kRows], gxs[kRows];
    A g_rest[kRows] = {}, gx_rest[kRows] = {};
    for (int r = 0; r < kRows; ++r) gs[r] = gxs[r] = both<A>(0);
    int64_t i = start;
    for (; i + P::kStep <= stop; i += P::kStep) {
      const P w = weight ? load_pair(weight + i) : both<A>(1);
      P dw = dweight ? load_pair(dweight + i) : both<A>(0), db = dbias ? load_pair(dbias + i) : both<A>(0);
      for (int r = 0; r < kRows; ++r) {
        const P d = load_pair(dy[r] + i), xhat = (load_pair(x[r] + i) - both(mean[r])) * both(rstd[r]), g = d * w;
        dw = fma(d, xhat, dw);
        db = db + d;
        gs[r] = gs[r] + g;
        gxs[r] = fma(g, xhat, gxs[r]);
      }
      if (dweight) store_pair(dweight + i, dw);
      if (dbias) store_pair(dbias + i, db);
    }
    for (; i < stop; ++i) {
      A dw = dweight ? dweight[i] : A(0), db = dbias ? dbias[i] : A(0);
      for (int r = 0; r < kRows; ++r) {
        const A d = load_one(dy[r] + i), xhat = (load_one(x[r] + i) - mean[r]) * rstd[r], g = weight ? d * weight[i] : d;
        dw = fma(d, xhat, dw);
        db += d;
        g_rest[r] += g;
        gx_rest[r] += g * xhat;
      }
      if (dweight) dweight[i] = dw;
      if (dbias) dbias[i] = db;
    }
    for (int r = 0; r < kRows; ++r) {
      sum_g[r] += total(gs[r]) + g_rest[r];
      sum_gx[r] += total(gxs[r]) + gx_rest[r];
    }
  }
  if (!c.dx) return;
  for (int r = 0; r < kRows; ++r) {
    X* dx = static_cast<X*>(c.dx) + (first + r) * c.cols;
    const A mean_g = c.rms ? A(0) : static_cast<A>(sum_g[r] / c.cols), mean_gx = static_cast<A>(sum_gx[r] / c.cols);
    const P means = both(mean[r]), rstds = both(rstd[r]), mean_gs = both(mean_g), mean_gxs = both(mean_gx);
    sweep<A>(
        c.cols,
        [&](int64_t i) {
          const P xhat = (load_pair(x[r] + i) - means) * rstds;
          const P g = weight ? load_pair(dy[r] + i) * load_pair(weight + i) : load_pair(dy[r] + i);
          store_pair(dx + i, (g - mean_gs - xhat * mean_gxs) * rstds);
        },
        [&](int64_t i) {
          const A xhat = (load_one(x[r] + i) - mean[r]) * rstd[r];
          const A g = weight ? load_one(dy[r] + i) * weight[i] : load_one(dy[r] + i);
          dx[i] = static_cast<X>((g - mean_g - xhat * mean_gx) * rstd[r]);
        });
  }
}

template <class X, class DY> void backward_rows(const Backward& c, int64_t begin, int64_t end) {
  int64_t row = begin;
  for (; row + 2 <= end; row += 2) backward_together<X, DY, 2>(c, row);
  if (row < end) backward_together<X, DY, 1>(c, row);
}

// `with_type` for the pairs that occur: fp64 with itself, the others with each other.
template <class F> void with_types(Dtype first, Dtype second, F&& f) {
  with_type(first, [&](auto* a) {
    with_type(second, [&](auto* b) {
      using X = std::remove_pointer_t<decltype(a)>;
      using Y = std::remove_pointer_t<decltype(b)>;
      if constexpr (std::is_same_v<X, double> == std::is_same_v<Y, double>) f(a, b);
    });
  });
}

}  // namespace

void forward(const Forward& c, int64_t begin, int64_t end) {
  with_types(c.x_type, c.y_type, [&](auto* x, auto* y) {
    forward_rows<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(y)>>(c, begin, end);
  });
}

void backward(const Backward& c, int64_t begin, int64_t end) {
  with_types(c.x_type, c.dy_type, [&](auto* x, auto* dy) {
    backward_rows<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(dy)>>(c, begin, end);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
