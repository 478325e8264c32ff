// Mean and variance of a row in one pass over chunks that stay in the L1 cache; for the kernels, once per instruction set.
//
// Of each chunk its mean and the squared deviations from it, joined over chunks in double by Chan's formula, so that mean/std = 1e4
// and long rows lose nothing. The order of every sum depends on the length of the row alone.
#pragma once

#include <algorithm>

#include "cpu/pairs.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kStatisticsChunk = 2048;

template <class T> inline AccOf<T> mean_of(const T* x, int64_t n) {
  using A = AccOf<T>;
  const auto [sum] = sums_over<A, 1>(
      n, [&](int64_t i, auto& sums) { sums[0] = sums[0] + load_pair(x + i); },
      [&](int64_t i, auto& sums) { sums[0] += load_one(x + i); });
  return static_cast<A>(sum / static_cast<double>(n));
}

template <class T> inline double squares_of(const T* x, int64_t n) {
  const auto add = [&](auto v, auto& sum) { sum = fma(v, v, sum); };
  const auto [squares] = sums_over<AccOf<T>, 1>(
      n, [&](int64_t i, auto& sums) { add(load_pair(x + i), sums[0]); },
      [&](int64_t i, auto& sums) { add(load_one(x + i), sums[0]); });
  return squares;
}

// Sums of x - center and of its square over [0, n).
template <class T> KF_INLINE std::array<double, 2> sums_around(const T* x, int64_t n, AccOf<T> center) {
  using A = AccOf<T>;
  const auto centers = both(center);
  const auto add = [](auto d, auto& sums) {
    sums[0] = sums[0] + d;
    sums[1] = fma(d, d, sums[1]);
  };
  return sums_over<A, 2>(
      n, [&](int64_t i, auto& sums) { add(load_pair(x + i) - centers, sums); },
      [&](int64_t i, auto& sums) { add(load_one(x + i) - center, sums); });
}

struct Moments {
  double mean, variance;
};

template <class A> struct Deviations {
  A center;
  double rest, squares;  // of x - center: the mean, and the sum of the squares of the deviations from it
};

// The mean of a few elements, near which the others are likely to lie.
template <class T> inline AccOf<T> center_of(const T* x, int64_t count) {
  constexpr int64_t kSample = Pair<AccOf<T>>::kStep;
  return count < kSample ? mean_of(x, count) : static_cast<AccOf<T>>(total(load_pair(x)) / kSample);
}

// One pass, around `center`. Where that is further from the mean than the elements are on the average, squares would lose digits:
// once more then, around the mean that is known now.
template <class T> KF_INLINE Deviations<AccOf<T>> deviations_of(const T* x, int64_t count, AccOf<T> center) {
  const double share = 1 / static_cast<double>(count);
  for (bool again = false;; again = true) {
    const auto [rest, squares] = sums_around(x, count, center);
    if (again || rest * (rest * share) <= squares / 2) return {center, rest * share, squares - rest * (rest * share)};
    center = mean_of(x, count);
  }
}

// `center` is that of the first chunk.
template <class T> [[gnu::noinline]] Moments moments(const T* x, int64_t n, bool rms, AccOf<T> center) {
  const double share = 1 / static_cast<double>(n);  // no division waits for the sums
  double base = 0, mean = 0, squares = 0;  // the mean counts from base, so that joining chunks rounds small numbers
  for (int64_t start = 0; start < n; start += kStatisticsChunk) {
    const int64_t count = std::min(kStatisticsChunk, n - start);
    if (rms) {
      squares += squares_of(x + start, count);
      continue;
    }
    // The rounded center leaves a small rest, which corrects both moments: without it mean / std = 1e4 loses digits.
    const auto chunk = deviations_of(x + start, count, start == 0 ? center : center_of(x + start, count));
    if (start == 0) {
      base = chunk.center;
      mean = chunk.rest;
      squares = chunk.squares;
      continue;
    }
    // Chan: join (start elements, mean, squares) and (count elements, local, chunk.squares).
    const double local = (chunk.center - base) + chunk.rest, shift = local - mean, joined = static_cast<double>(start + count);
    mean += shift * static_cast<double>(count) / joined;
    squares += chunk.squares + shift * shift * static_cast<double>(start) * static_cast<double>(count) / joined;
  }
  return {base + mean, squares * share};
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
