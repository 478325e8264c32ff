// The mean and variance of rows, in one pass over stretches that stay in the L1 cache.
//
// Chan's formula joins the stretches in double, so rows of mean/std = 1e4 and long rows lose no accuracy. The row length
// alone decides the order of every sum.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/kernels.h"
#include "cpu/sums.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

template <class T> inline AccOf<T> mean_of(const T* x, int64_t n) {
  using A = AccOf<T>;
  const auto [sum] = sums_over<A, 1>(n, [&](int64_t i, auto& sums, auto part) { sums[0] = sums[0] + load_pair(x + i, part); });
  return static_cast<A>(sum / static_cast<double>(n));
}

template <class T> KF_INLINE Sums<AccOf<T>, 1> squares_of(const T* x, int64_t n) {
  return lanes_over<AccOf<T>, 1>(n, [&](int64_t i, auto& sums, auto part) {
    const auto v = load_pair(x + i, part);
    sums[0] = fma(v, v, sums[0]);
  });
}

template <class T> KF_INLINE Sums<AccOf<T>, 2> sums_around(const T* x, int64_t n, AccOf<T> center) {
  const auto centers = both(center);
  return lanes_over<AccOf<T>, 2>(n, [&](int64_t i, auto& sums, auto part) {
    const auto d = first_of(load_pair(x + i, part) - centers, part);
    sums[0] = sums[0] + d;
    sums[1] = fma(d, d, sums[1]);
  });
}

struct Moments {
  double mean, variance;
};

// The number of elements at the beginning whose mean is taken as the center.
template <class A> inline int64_t sample_of(int64_t count) { return std::min(count, Pair<A>::kStep); }

template <class T> inline Vectorized<AccOf<T>> sampled(const T* x, int64_t count) {
  const auto sample = count < Pair<AccOf<T>>::kStep ? load_pair(x, Part{count}) : load_pair(x);
  return sample.a + sample.b;
}

template <class T> inline AccOf<T> center_of(const T* x, int64_t count) {
  using A = AccOf<T>;
  return static_cast<A>(total(sampled(x, count)) / static_cast<double>(sample_of<A>(count)));
}

// Whether the center is near enough to the mean for the squared deviations around it to lose no digits.
inline bool is_near(double rest, double squares, double share) { return rest * (rest * share) <= squares / 2; }

// The moments of a stretch, from its sums around a rounded `center`. `share` is 1 / n. The mean's small distance from the
// center is kept, because it matters at mean / std = 1e4.
template <class A> KF_INLINE StretchMoments deviations_from(A center, const std::array<double, 2>& sums, double share) {
  const double rest = sums[0] * share;
  return {center, rest, sums[1] - sums[0] * rest};
}

// The moments around the mean, in two passes. It is not inlined, because it would push the sums of neighbouring loops to
// memory.
template <class T> [[gnu::noinline, gnu::cold]] StretchMoments deviations_from_mean(const T* x, int64_t count) {
  const auto center = mean_of(x, count);
  return deviations_from(center, joined(sums_around(x, count, center)), 1 / static_cast<double>(count));
}

// The moments in one pass around `center`. If the center turns out to be far from the mean, two more passes use the mean.
template <class T> KF_INLINE StretchMoments deviations_of(const T* x, int64_t count, AccOf<T> center) {
  const double share = 1 / static_cast<double>(count);
  const auto sums = joined(sums_around(x, count, center));
  return is_near(sums[0], sums[1], share) ? deviations_from(center, sums, share) : deviations_from_mean(x, count);
}

template <class T> KF_INLINE StretchMoments moments_of(const T* x, int64_t count, bool rms, AccOf<T> center) {
  if (rms) return {0, 0, joined(squares_of(x, count))[0]};
  return deviations_of(x, count, center);
}

class JoinedMoments {
 public:
  KF_INLINE void add(const StretchMoments& stretch, int64_t count, bool rms) {
    if (rms) {
      squares += stretch.squares;
    } else if (seen == 0) {
      base = stretch.center;
      mean = stretch.rest;
      squares = stretch.squares;
    } else {  // Chan: join (seen elements, mean, squares) and (count elements, local, stretch.squares)
      const double before = static_cast<double>(seen), added = static_cast<double>(count), joined = before + added;
      const double local = (stretch.center - base) + stretch.rest, shift = local - mean;
      const double share = added / joined;
      mean += shift * share;
      squares += stretch.squares + shift * shift * (before * share);
    }
    seen += count;
  }

  // The row's moments. `share` is 1 / n, given by the caller so that no division waits for the sums.
  KF_INLINE Moments total(double share) const { return {base + mean, squares * share}; }

 private:
  int64_t seen = 0;
  double base = 0, mean = 0, squares = 0;  // mean is relative to base, because smaller numbers have smaller rounding errors
};

// The moments of a row of n elements. `center` is that of its first stretch.
template <class T> [[gnu::noinline]] Moments moments(const T* x, int64_t n, bool rms, AccOf<T> center) {
  const double share = 1 / static_cast<double>(n);
  JoinedMoments row;
  for (int64_t start = 0; start < n; start += kStretch) {
    const int64_t count = std::min(kStretch, n - start);
    row.add(moments_of(x + start, count, rms, start == 0 || rms ? center : center_of(x + start, count)), count, rms);
  }
  return row.total(share);
}

constexpr int64_t kMostRows = 16;  // the most rows whose moments are computed together

// Whether `moments_together` is faster than row by row. It takes rows of one stretch.
inline bool are_joined(int64_t count, int64_t n) { return n <= kStretch && count >= Vectorized<double>::size(); }

// Whether rows are read twice. Joining the lanes of sums takes longest in such short rows, and reading them twice joins two
// sums instead of three. fp32 sums of so few fp16 or bf16 elements have no visible error.
template <class T> bool are_read_twice(int64_t n, bool rms) { return sizeof(T) == 2 && !rms && n <= 128; }

// The moments of `count` rows, each read twice: for the mean, then for the deviations. Both results have room for kMostRows
// numbers and are zero on entry.
template <class T>
[[gnu::noinline]] void moments_read_twice(const T* const* x, int64_t count, int64_t n, double* mean, double* variance) {
  using A = AccOf<T>;
  const double share = 1 / static_cast<double>(n);
  double rest[kMostRows];
  A center[kMostRows];
  SumsOfRows<A, kMostRows> sums;
  for (int64_t r = 0; r < count; ++r) {
    auto sum = both<A>(0);
    sweep<A>(n, [&](int64_t i, auto part) { sum = sum + load_pair(x[r] + i, part); });
    sums.put(r, sum.a + sum.b);
  }
  sums.join(count, mean);
  for (int64_t r = 0; r < kMostRows; ++r) {
    mean[r] *= share;
    center[r] = static_cast<A>(mean[r]);
    rest[r] = mean[r] - static_cast<double>(center[r]);
  }
  for (int64_t r = 0; r < count; ++r) {
    const auto centers = both(center[r]);
    auto squares = both<A>(0);
    sweep<A>(n, [&](int64_t i, auto part) {
      const auto d = first_of(load_pair(x[r] + i, part) - centers, part);
      squares = fma(d, d, squares);
    });
    sums.put(r, squares.a + squares.b);
  }
  sums.join(count, variance);
  bool is_finite = true;
  for (int64_t r = 0; r < kMostRows; ++r) {
    const double v = variance[r] * share - rest[r] * rest[r];
    variance[r] = v < 0 ? 0 : v;  // a NaN stays
    is_finite &= v < std::numeric_limits<double>::infinity();
  }
  if (is_finite) return;
  for (int64_t r = 0; r < count; ++r) {  // as long rows do: whether a sum overflows must not depend on the length
    const auto row = deviations_from_mean(x[r], n);
    mean[r] = row.center + row.rest;
    variance[r] = row.squares * share;
  }
}

// The moments of `count` rows, the same bits as `moments` gives, with the lanes of all rows joined together.
template <class T>
void moments_together(const T* const* x, int64_t count, int64_t n, bool rms, double* mean, double* variance) {
  using A = AccOf<T>;
  const double share = 1 / static_cast<double>(n), sample = static_cast<double>(sample_of<A>(n));
  A center[kMostRows];
  SumsOfRows<A, kMostRows> sums, squares;
  if (rms) {
    for (int64_t r = 0; r < count; ++r) squares.put(r, squares_of(x[r], n)[0]);
    squares.join(count, variance);
    for (int64_t r = 0; r < count; ++r) variance[r] *= share;
    return;
  }
  for (int64_t r = 0; r < count; ++r) sums.put(r, sampled(x[r], n));
  sums.join(count, mean);
  for (int64_t r = 0; r < count; ++r) center[r] = static_cast<A>(mean[r] / sample);
  for (int64_t r = 0; r < count; ++r) {
    const auto row = sums_around(x[r], n, center[r]);
    sums.put(r, row[0]);
    squares.put(r, row[1]);
  }
  sums.join(count, mean);
  squares.join(count, variance);
  for (int64_t r = 0; r < count; ++r) {
    const bool near = is_near(mean[r], variance[r], share);
    const auto row = near ? deviations_from(center[r], {mean[r], variance[r]}, share) : deviations_from_mean(x[r], n);
    mean[r] = row.center + row.rest;
    variance[r] = row.squares * share;
  }
}

}  // namespace
}  // namespace kf::cpu::CPU_CAPABILITY
