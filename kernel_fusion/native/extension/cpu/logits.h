// Logits of a row, their maximum, and the sum of their exponentials.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/chunk.h"
#include "cpu/math.h"
#include "cpu/sums.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

template <class A> inline constexpr A kNothing = -std::numeric_limits<A>::infinity();

// A row's logits: the elements of `in` times `scale`.
template <class A> struct Logits {
  Source<A> in;
  A scale;

  // Calls f(i, pair) for the pairs of [begin, end). The last pair is filled up with kNothing.
  template <class F> KF_INLINE void each_pair(int64_t begin, int64_t end, F&& f) const {
    constexpr int64_t kStep = Pair<A>::kStep;
    const auto factor = both(scale);
    int64_t i = begin;
    for (; i + kStep <= end; i += kStep) f(i, in.load(i) * factor);
    if (i < end) f(i, then_nothing(in.load(i, Part{end - i}) * factor, end - i));
  }

  [[gnu::noinline]] static Pair<A> then_nothing(const Pair<A>& x, int64_t count) {
    A lanes[Pair<A>::kStep];
    store_pair(lanes, x);
    std::fill(lanes + count, std::end(lanes), kNothing<A>);
    return load_pair(lanes);
  }
};

// The largest logit. Whether it ignores NaN does not matter, because the sum of the exponentials will be NaN.
template <class A> A largest_of(const Logits<A>& logits, int64_t n) {
  auto largest = both(kNothing<A>);
  logits.each_pair(0, n, [&](int64_t, const Pair<A>& x) {
    largest = {at::vec::clamp_min(x.a, largest.a), at::vec::clamp_min(x.b, largest.b)};
  });
  const auto maximum = [](Vectorized<A>& x, Vectorized<A>& y) { return at::vec::maximum(x, y); };
  return at::vec::vec_reduce_all<A>(maximum, at::vec::maximum(largest.a, largest.b));
}

// Returns the sum of exp(logits - largest). If `kKeeps`, writes the exponentials to `out`, rounded up to whole pairs.
template <bool kKeeps, class A> double exponentiate(const Logits<A>& logits, int64_t n, A largest, A* out) {
  const auto top = both(largest);
  double sum = 0;
  for (int64_t start = 0; start < n; start += kChunk<A>) {
    auto sums = both<A>(0);
    logits.each_pair(start, std::min(n, start + kChunk<A>), [&](int64_t i, const Pair<A>& x) {
      const auto d = x - top;
      const Pair<A> e{Math<A>::exp(d.a), Math<A>::exp(d.b)};
      if constexpr (kKeeps) store_pair(out + i, e);
      sums = sums + e;
    });
    sum += total(sums);
  }
  return sum;
}

}  // namespace
}  // namespace kf::cpu::CPU_CAPABILITY
