// The arithmetic of forward row norms: one pass over a row for its statistics (cpu/moments.h), one for the result. The row
// length alone decides the order of every sum.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/chunk.h"
#include "cpu/moments.h"
#include "cpu/results.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

// Computes mean (0 for RMSNorm) and rstd of `count` rows, of which the first has number `first`, and also stores them if they
// are wanted. Roots and divisions are slow, so vectors of several rows share them.
template <class T>
void statistics(const Forward& c, const T* const* x, int64_t first, int64_t count, AccOf<T>* mean, AccOf<T>* rstd) {
  using A = AccOf<T>;
  using V = Vectorized<double>;
  double means[kMostRows] = {}, variances[kMostRows] = {};
  if (are_read_twice<T>(c.cols, c.rms)) {
    moments_read_twice(x, count, c.cols, means, variances);
  } else if (are_joined(count, c.cols)) {
    moments_together(x, count, c.cols, c.rms, means, variances);
  } else {
    A center[kMostRows] = {};
    for (int64_t r = 0; !c.rms && r < count; ++r) center[r] = center_of(x[r], std::min(c.cols, kStretch));
    for (int64_t r = 0; r < count; ++r) {
      const Moments m = moments(x[r], c.cols, c.rms, center[r]);
      means[r] = m.mean;
      variances[r] = m.variance;
    }
  }
  for (int64_t r = 0; r < count; r += V::size()) (V(1) / (V::loadu(variances + r) + V(c.eps)).sqrt()).store(variances + r);
  std::copy_n(means, count, mean);
  std::copy_n(variances, count, rstd);
  if (c.mean) std::copy_n(mean, count, static_cast<A*>(c.mean) + first);
  if (c.rstd) std::copy_n(rstd, count, static_cast<A*>(c.rstd) + first);
}

// The statistics of one long row, from the moments of its stretches.
inline RowStatistics statistics_from(const Forward& c, const StretchMoments* stretches) {
  JoinedMoments row;
  for (int64_t start = 0; start < c.cols; start += kStretch)
    row.add(stretches[start / kStretch], std::min(kStretch, c.cols - start), c.rms);
  const auto [mean, variance] = row.total(1 / static_cast<double>(c.cols));
  return {mean, 1 / std::sqrt(variance + c.eps)};
}

// Computes y = (x - mean) * rstd * weight + bias for n elements. `results` may store to x itself. x is prefetched into the L2
// cache `next` elements ahead, unless that is 0. The function is always inlined, because `results` in memory would cost time
// in every row.
template <class X, class W, class R>
KF_INLINE void normalize(const X* x, AccOf<X> mean, AccOf<X> rstd, const W* weight, const W* bias, int64_t n, R results,
                         int64_t next = 0) {
  const auto means = both(mean), rstds = both(rstd);
  const auto write = [&](auto&& scale_shift) {
    sweep<AccOf<X>>(n, [&](int64_t i, auto part) KF_INLINE_LAMBDA {
      if constexpr (sizeof(X) == 2)
        if (next) __builtin_prefetch(x + i + next, 0, 2);
      results.put(i, scale_shift((load_pair(x + i, part) - means) * rstds, i, part), part);
    });
  };
  if (weight && bias)
    write([&](auto v, int64_t i, auto part)
              KF_INLINE_LAMBDA { return fma(v, load_pair(weight + i, part), load_pair(bias + i, part)); });
  else if (weight) write([&](auto v, int64_t i, auto part) KF_INLINE_LAMBDA { return v * load_pair(weight + i, part); });
  else if (bias) write([&](auto v, int64_t i, auto part) KF_INLINE_LAMBDA { return v + load_pair(bias + i, part); });
  else write([](auto v, int64_t, auto) { return v; });
}

// The same, with the normalised value rounded before it meets the weight (`Stages::rounds`). Doubles are never rounded so.
template <class X>
KF_STAGE void normalize_rounded(const Stages& s, const X* x, AccOf<X> mean, AccOf<X> rstd, const AccOf<X>* weight,
                                const AccOf<X>* bias, int64_t n, AnyResults<AccOf<X>> results) {
  using A = AccOf<X>;
  const auto means = both(mean), rstds = both(rstd);
  // The product with the weight is rounded here, unless the store rounds it to the same type anyway.
  const bool again = weight && s.argument == s.normalized && s.argument != results.target.type;
  const auto write = [&]<class T>(T) {
    const auto rounded = [](const Pair<A>& v) KF_INLINE_LAMBDA {
      if constexpr (std::is_same_v<T, c10::BFloat16>) {  // without moving elements between lanes
        const auto words = std::bit_cast<Words>(interleaved_bits(v.a, v.b));
        return Pair<A>{std::bit_cast<Vectorized<A>>(words << 16), std::bit_cast<Vectorized<A>>(words & 0xffff0000)};
      } else {
        const auto [a, b] = at::vec::convert_to_float<T>(at::vec::convert_from_float<T>(v.a, v.b));
        return Pair<A>{a, b};
      }
    };
    sweep<A>(n, [&](int64_t i, auto part) KF_INLINE_LAMBDA {
      Pair<A> v = rounded((load_pair(x + i, part) - means) * rstds);
      if (weight && bias) v = fma(v, load_pair(weight + i, part), load_pair(bias + i, part));
      else if (weight) v = v * load_pair(weight + i, part);
      else if (bias) v = v + load_pair(bias + i, part);
      results.put(i, again ? rounded(v) : v, part);
    });
  };
  if constexpr (std::is_same_v<A, float>) {
    if (s.normalized == Dtype::kHalf) write(c10::Half());
    else write(c10::BFloat16());
  }
}

}  // namespace
}  // namespace kf::cpu::CPU_CAPABILITY
