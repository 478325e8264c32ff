// Sums over the elements of rows, and over the lanes of vectors.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "cpu/simd.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

using Doubles [[gnu::vector_size(sizeof(Vectorized<double>))]] = double;

// The sum of a vector's lower and upper half.
template <class V> KF_INLINE auto join_halves(const V& v) {
  constexpr int kHalf = sizeof(v) / sizeof(v[0]) / 2;
  return [&]<int... i>(std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(v, v, i...) + __builtin_shufflevector(v, v, (kHalf + i)...);
  }(std::make_integer_sequence<int, kHalf>());
}

KF_INLINE Doubles join_widened(const Vectorized<float>& v) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtps_pd(_mm512_castps512_ps256(v)) + _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtps_pd(_mm256_castps256_ps128(v)) + _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#else
  using Floats [[gnu::vector_size(sizeof(v))]] = float;
  using WideDoubles [[gnu::vector_size(2 * sizeof(v))]] = double;
  return join_halves(__builtin_convertvector(std::bit_cast<Floats>(v), WideDoubles));
#endif
}

template <class V> KF_INLINE double sum_of_lanes(const V& v) {
  if constexpr (sizeof(v) == 2 * sizeof(double)) return v[0] + v[1];
  else return sum_of_lanes(join_halves(v));
}

KF_INLINE double total(const Vectorized<float>& v) { return sum_of_lanes(join_widened(v)); }
KF_INLINE double total(const Vectorized<double>& v) { return sum_of_lanes(std::bit_cast<Doubles>(v)); }
template <class A> KF_INLINE double total(const Pair<A>& v) { return total(v.a + v.b); }

// For each group of kGroup lanes, the sum of the group's lower and upper half.
template <int kGroup> KF_INLINE Doubles join_halves(const Doubles& a, const Doubles& b) {
  constexpr int kHalf = kGroup / 2;
  return [&]<int... i>(std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (i / kHalf * kGroup + i % kHalf)...) +
           __builtin_shufflevector(a, b, (i / kHalf * kGroup + i % kHalf + kHalf)...);
  }(std::make_integer_sequence<int, Vectorized<double>::size()>());
}

// Joins the lanes of each of kCount vectors to one group of a vector of doubles.
template <int kCount, class A> KF_INLINE Doubles join_vectors(const A* lanes) {
  constexpr int kLanes = Vectorized<double>::size();
  if constexpr (kCount > 1) {
    constexpr int kHalf = kCount / 2;
    return join_halves<kLanes / kHalf>(join_vectors<kHalf>(lanes), join_vectors<kHalf>(lanes + kHalf * Vectorized<A>::size()));
  } else if constexpr (std::is_same_v<A, double>) {
    return std::bit_cast<Doubles>(Vectorized<double>::loadu(lanes));
  } else {
#if defined(CPU_CAPABILITY_AVX512)  // two loads need no shuffles
    return _mm512_cvtps_pd(_mm256_loadu_ps(lanes)) + _mm512_cvtps_pd(_mm256_loadu_ps(lanes + kLanes));
#elif defined(CPU_CAPABILITY_AVX2)
    return _mm256_cvtps_pd(_mm_loadu_ps(lanes)) + _mm256_cvtps_pd(_mm_loadu_ps(lanes + kLanes));
#else
    return join_widened(Vectorized<float>::loadu(lanes));
#endif
  }
}

template <class A, size_t kSums> using Sums = std::array<Vectorized<A>, kSums>;

template <class A, size_t kSums> KF_INLINE std::array<double, kSums> joined(const std::array<Vectorized<A>, kSums>& sums) {
  return [&]<size_t... k>(std::index_sequence<k...>) {
    return std::array<double, kSums>{total(sums[k])...};
  }(std::make_index_sequence<kSums>());
}

// One sum for each of up to kRows rows, with the same bits as `joined`. The lanes of several rows share a vector, which halves
// the number of instructions.
template <class A, int64_t kRows> struct SumsOfRows {
  static constexpr int64_t kTogether = Vectorized<double>::size();
  static_assert(kRows % kTogether == 0);
  alignas(64) A lanes[kRows][Vectorized<A>::size()];

  KF_INLINE void put(int64_t row, const Vectorized<A>& sum) { sum.store(lanes[row]); }

  // Writes sums[0 ... count). There is room for kRows of them.
  KF_INLINE void join(int64_t count, double* sums) {
    for (int64_t r = count; r % kTogether != 0; ++r) std::fill_n(lanes[r], Vectorized<A>::size(), A(0));
    for (int64_t r = 0; r < count; r += kTogether) {
      const Doubles all = join_vectors<static_cast<int>(kTogether)>(lanes[r]);
      std::memcpy(sums + r, &all, sizeof(all));
    }
  }
};

// Sums over [0, n): add(i, sums, part) adds the pair at i, or a part of it, to kSums sums of pairs. Two independent chains of
// additions hide their latency. Two levels of sums make the error grow with the length of a block, not of the row. In one
// long chain, equal elements such as relu's zeros would all round the same way.
template <class A, size_t kSums, class F> inline Sums<A, kSums> lanes_over(int64_t n, F&& add) {
  return [&]<size_t... k>(std::index_sequence<k...>) -> Sums<A, kSums> {  // a loop over k would keep the sums in memory
    constexpr int64_t kStep = Pair<A>::kStep, kBlock = 32 * kStep;
    const auto zeros = [] { return std::array<Pair<A>, kSums>{(static_cast<void>(k), both<A>(0))...}; };
    auto blocks = zeros();
    int64_t i = 0;
    while (i + kStep <= n) {
      auto first = zeros(), second = zeros();
      const int64_t stop = std::min(n, i + kBlock);
      for (; i + 2 * kStep <= stop; i += 2 * kStep) {
        add(i, first, Whole{});
        add(i + kStep, second, Whole{});
      }
      if (i + kStep <= stop) {
        add(i, first, Whole{});
        i += kStep;
      }
      ((blocks[k] = blocks[k] + (first[k] + second[k])), ...);
    }
    if (i < n) add(i, blocks, Part{n - i});
    return {(blocks[k].a + blocks[k].b)...};
  }(std::make_index_sequence<kSums>());
}

template <class A, size_t kSums, class F> inline std::array<double, kSums> sums_over(int64_t n, F&& add) {
  return joined(lanes_over<A, kSums>(n, add));
}

}  // namespace
}  // namespace kf::cpu::CPU_CAPABILITY
