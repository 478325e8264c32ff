// Elements of any type, loaded and stored as vectors of the accumulator type; for the kernels, once per instruction set.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/dtype.h"
#include "shared/inline.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

using at::vec::Vectorized;

template <class T> using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// A bf16 of a row whose pairs hold the elements at even positions in one vector and those at odd positions in the other: both
// lie in the upper halves of words of 32 bits already, so that no element has to move to another lane. What goes with such a row,
// in the accumulator type, is stored in that order, at::vec's deinterleave2.
struct Interleaved : c10::BFloat16 {
  using c10::BFloat16::BFloat16;
};
using Words [[gnu::vector_size(sizeof(Vectorized<float>))]] = uint32_t;

// T as a loop takes it whose operands and results all have that type.
template <class T> using Alike = std::conditional_t<std::is_same_v<T, c10::BFloat16>, Interleaved, T>;

// Two vectors of accumulators at a time: one full vector of a 16-bit type.
template <class A> struct Pair {
  using V = Vectorized<A>;
  static constexpr int64_t kStep = 2 * V::size();
  V a, b;
};

// n rounded up to whole pairs of vectors.
template <class A> inline int64_t whole_pairs(int64_t n) {
  constexpr int64_t kStep = Pair<A>::kStep;
  return (n + kStep - 1) / kStep * kStep;
}

template <class T> inline Pair<AccOf<T>> load_pair(const T* p) {
  using V = Vectorized<AccOf<T>>;
  if constexpr (std::is_same_v<T, AccOf<T>>) {
    return {V::loadu(p), V::loadu(p + V::size())};
  } else if constexpr (std::is_same_v<T, Interleaved>) {
    Words words;
    std::memcpy(&words, p, sizeof(words));
    return {std::bit_cast<V>(words << 16), std::bit_cast<V>(words & 0xffff0000)};
#if defined(CPU_CAPABILITY_AVX512)
  } else if constexpr (std::is_same_v<T, c10::Half>) {  // a vector would have to be cut in two
    const auto* halves = reinterpret_cast<const __m256i*>(p);
    return {V(_mm512_cvtph_ps(_mm256_loadu_si256(halves))), V(_mm512_cvtph_ps(_mm256_loadu_si256(halves + 1)))};
#elif defined(CPU_CAPABILITY_AVX2)
  } else if constexpr (std::is_same_v<T, c10::Half>) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    return {V(_mm256_cvtph_ps(_mm_loadu_si128(halves))), V(_mm256_cvtph_ps(_mm_loadu_si128(halves + 1)))};
#endif
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

// How much of a pair a loop is at: all of it, or at the end of a row its first `count` elements. These go through vectors like the
// others, of which the rest is neither read nor stored: one by one the last 26 of 250 fp16 took backward longer than the 224 before
// them, 0.42 ns per element instead of 0.18 (EPYC with AVX-512, 1 thread). They stand in the order of memory, interleaved or not.
struct Whole {};
struct Part {
  int64_t count;
};

// `count` elements of 16 bits, less than a vector, and zeros. With AVX2 word by word and the odd one by itself: at::vec copies them
// and waits for the copy, so that backward of 524 x 250 fp16 takes 0.36 ns per element instead of 0.27 (EPYC, 1 thread).
template <class T> inline Vectorized<T> load_first(const T* p, int64_t count) {
#if defined(CPU_CAPABILITY_AVX2)
  const __m256i words = _mm256_set1_epi32(static_cast<int>(count / 2)), index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i even = _mm256_maskload_epi32(reinterpret_cast<const int*>(p), _mm256_cmpgt_epi32(words, index));
  if (count % 2 == 0) return even;
  const __m256i odd = _mm256_set1_epi32(std::bit_cast<uint16_t>(p[count - 1]));
  return _mm256_or_si256(even, _mm256_and_si256(odd, _mm256_cmpeq_epi32(words, index)));
#else
  return Vectorized<T>::loadu(p, count);
#endif
}

template <class T> inline Pair<AccOf<T>> load_pair(const T* p, Whole) { return load_pair(p); }
template <class T> inline Pair<AccOf<T>> load_pair(const T* p, Part part) {  // zeros after it
  using V = Vectorized<AccOf<T>>;
  if constexpr (std::is_same_v<T, AccOf<T>>) {
    if (part.count <= V::size()) return {V::loadu(p, part.count), V(0)};
    return {V::loadu(p), V::loadu(p + V::size(), part.count - V::size())};
  } else {
    using Natural = std::conditional_t<std::is_same_v<T, Interleaved>, c10::BFloat16, T>;
    const auto [a, b] = at::vec::convert_to_float<Natural>(load_first<Natural>(p, part.count));
    return {a, b};
  }
}

template <class T> inline void store_pair(T* p, const Pair<AccOf<T>>& v, Whole) { store_pair(p, v); }
template <class T> inline void store_pair(T* p, const Pair<AccOf<T>>& v, Part part) {
  using V = Vectorized<AccOf<T>>;
  if constexpr (std::is_same_v<T, AccOf<T>>) {
    if (part.count <= V::size()) return v.a.store(p, part.count);
    v.a.store(p);
    v.b.store(p + V::size(), part.count - V::size());
  } else {
    using Natural = std::conditional_t<std::is_same_v<T, Interleaved>, c10::BFloat16, T>;
    at::vec::convert_from_float<Natural>(v.a, v.b).store(p, part.count);
  }
}

// v, with zeros after the part.
template <class A> inline Pair<A> first_of(const Pair<A>& v, Whole) { return v; }
template <class A> inline Pair<A> first_of(const Pair<A>& v, Part part) {
  using V = Vectorized<A>;
  const V count(static_cast<A>(part.count));
  return {v.a & (V::arange(A(0), A(1)) < count), v.b & (V::arange(static_cast<A>(V::size()), A(1)) < count)};
}

// Calls f(i, Whole) for each full pair of [0, n), and f(i, Part) for what is left.
template <class A, class F> KF_INLINE void sweep(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + Pair<A>::kStep <= n; i += Pair<A>::kStep) f(i, Whole{});
  if (i < n) f(i, Part{n - i});
}

// Both vectors of a pair as bf16, to nearest, ties to even. A NaN stays one only if the lower half of its bits is zero, like those
// that come from a bf16 or from arithmetic: to look for others would take two instructions more for every five.
KF_INLINE Vectorized<int32_t> interleaved_bits(const Pair<float>& v) {
#if defined(CPU_CAPABILITY_AVX512)  // 7 instructions, where the compiler makes 10 of the formula
  const auto rounded = [](const Vectorized<float>& half) {
    const __m512i bits = _mm512_castps_si512(half), up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_sub_epi32(up, _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000)), up, _mm512_set1_epi32(-1));
  };
  const __m512i upper_half = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);  // of each word, its bytes in a lane of 16
  return _mm512_mask_shuffle_epi8(rounded(v.b), 0x3333333333333333, rounded(v.a), upper_half);
#else
  const auto rounded = [](const Vectorized<float>& half) {
    const auto bits = std::bit_cast<Words>(half);
    return bits + 0x7fff + (bits >> 16 & 1);
  };
  return std::bit_cast<Vectorized<int32_t>>(rounded(v.a) >> 16 | (rounded(v.b) & 0xffff0000));
#endif
}

template <class A> inline Pair<A> operator+(const Pair<A>& x, const Pair<A>& y) { return {x.a + y.a, x.b + y.b}; }
template <class A> inline Pair<A> operator-(const Pair<A>& x, const Pair<A>& y) { return {x.a - y.a, x.b - y.b}; }
template <class A> inline Pair<A> operator*(const Pair<A>& x, const Pair<A>& y) { return {x.a * y.a, x.b * y.b}; }
template <class A> inline Pair<A> operator&(const Pair<A>& x, const Pair<A>& y) { return {x.a & y.a, x.b & y.b}; }
template <class A> inline Pair<A> both(A v) { return {Vectorized<A>(v), Vectorized<A>(v)}; }
template <class A> inline Vectorized<A> fma(const Vectorized<A>& x, const Vectorized<A>& y, const Vectorized<A>& z) {
  return at::vec::fmadd(x, y, z);
}
template <class A> inline Pair<A> fma(const Pair<A>& x, const Pair<A>& y, const Pair<A>& z) {
  return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)};
}

using Doubles [[gnu::vector_size(sizeof(Vectorized<double>))]] = double;

// The lower and the upper half of a vector, added: in registers, lane by lane.
template <class V> KF_INLINE auto join_halves(const V& v) {
  constexpr int kHalf = sizeof(v) / sizeof(v[0]) / 2;
  return [&]<int... i>(std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(v, v, i...) + __builtin_shufflevector(v, v, (kHalf + i)...);
  }(std::make_integer_sequence<int, kHalf>());
}

// The same as doubles.
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

// The sum of all lanes, joined in double.
KF_INLINE double total(const Vectorized<float>& v) { return sum_of_lanes(join_widened(v)); }
KF_INLINE double total(const Vectorized<double>& v) { return sum_of_lanes(std::bit_cast<Doubles>(v)); }
template <class A> KF_INLINE double total(const Pair<A>& v) { return total(v.a + v.b); }

// The lanes of a and b, in groups of kGroup: of each group its lower and its upper half, added.
template <int kGroup> KF_INLINE Doubles join_halves(const Doubles& a, const Doubles& b) {
  constexpr int kHalf = kGroup / 2;
  return [&]<int... i>(std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (i / kHalf * kGroup + i % kHalf)...) +
           __builtin_shufflevector(a, b, (i / kHalf * kGroup + i % kHalf + kHalf)...);
  }(std::make_integer_sequence<int, Vectorized<double>::size()>());
}

// The lanes of kCount vectors that lie one after the other, each of them joined to a group of its own.
template <int kCount, class A> KF_INLINE Doubles join_vectors(const A* lanes) {
  constexpr int kLanes = Vectorized<double>::size();
  if constexpr (kCount > 1) {
    constexpr int kHalf = kCount / 2;
    return join_halves<kLanes / kHalf>(join_vectors<kHalf>(lanes), join_vectors<kHalf>(lanes + kHalf * Vectorized<A>::size()));
  } else if constexpr (std::is_same_v<A, double>) {
    return std::bit_cast<Doubles>(Vectorized<double>::loadu(lanes));
  } else {
#if defined(CPU_CAPABILITY_AVX512)  // half by half from memory, which takes no shuffle
    return _mm512_cvtps_pd(_mm256_loadu_ps(lanes)) + _mm512_cvtps_pd(_mm256_loadu_ps(lanes + kLanes));
#elif defined(CPU_CAPABILITY_AVX2)
    return _mm256_cvtps_pd(_mm_loadu_ps(lanes)) + _mm256_cvtps_pd(_mm_loadu_ps(lanes + kLanes));
#else
    return join_widened(Vectorized<float>::loadu(lanes));
#endif
  }
}

// Sums before their lanes are joined.
template <class A, size_t kSums> using Sums = std::array<Vectorized<A>, kSums>;

template <class A, size_t kSums> KF_INLINE std::array<double, kSums> joined(const std::array<Vectorized<A>, kSums>& sums) {
  return [&]<size_t... k>(std::index_sequence<k...>) {
    return std::array<double, kSums>{total(sums[k])...};
  }(std::make_index_sequence<kSums>());
}

// One sum of each of up to kRows rows, joined when those of all rows are there: as by `joined`, bit for bit, but with the lanes of
// several rows in one vector, which takes less than half the instructions.
template <class A, int64_t kRows> struct SumsOfRows {
  static constexpr int64_t kTogether = Vectorized<double>::size();
  static_assert(kRows % kTogether == 0);
  alignas(64) A lanes[kRows][Vectorized<A>::size()];

  KF_INLINE void put(int64_t row, const Vectorized<A>& sum) { sum.store(lanes[row]); }

  // sums[0 ... count), with room for kRows.
  KF_INLINE void join(int64_t count, double* sums) {
    for (int64_t r = count; r % kTogether != 0; ++r) std::fill_n(lanes[r], Vectorized<A>::size(), A(0));
    for (int64_t r = 0; r < count; r += kTogether) {
      const Doubles all = join_vectors<static_cast<int>(kTogether)>(lanes[r]);
      std::memcpy(sums + r, &all, sizeof(all));
    }
  }
};

// Sums over [0, n): add(i, sums, part) adds the pair at i, or the part of one, to sums of pairs, of which there are kSums. Two chains
// hide the latency of the additions. In two levels: the error of a sum grows with the length of a block, not of the row. Elements that
// are equal, such as the zeros that relu leaves, would all round the same way in one long chain.
template <class A, size_t kSums, class F> inline Sums<A, kSums> lanes_over(int64_t n, F&& add) {
  return [&]<size_t... k>(std::index_sequence<k...>) -> Sums<A, kSums> {  // no loop over k, lest the sums be kept in memory
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

// The same, joined.
template <class A, size_t kSums, class F> inline std::array<double, kSums> sums_over(int64_t n, F&& add) {
  return joined(lanes_over<A, kSums>(n, add));
}

// ---- Types known at run time ----------------------------------------------------------------------------------------------

inline int64_t size_of(Dtype dtype) {
  return dtype == Dtype::kDouble ? 8 : dtype == Dtype::kFloat ? 4 : 2;
}

template <class T> inline constexpr Dtype kDtypeOf = std::is_same_v<T, double>          ? Dtype::kDouble
                                                    : std::is_same_v<T, float>         ? Dtype::kFloat
                                                    : std::is_same_v<T, c10::Half>     ? Dtype::kHalf
                                                                                       : Dtype::kBFloat16;
struct AnyType {};

// Elements side by side in memory, of a type known at run time: double for A = double, one of the others for A = float.
template <class A> struct Source {
  Dtype type = kDtypeOf<A>;
  const void* data = nullptr;  // null: absent

  static bool reads(Dtype type) { return (type == Dtype::kDouble) == std::is_same_v<A, double>; }

  // T: the type, where the loop knows it. Else it is decided for each pair; the branch, which falls the same way all through a
  // loop, is predicted.
  template <class T = AnyType> KF_INLINE Pair<A> load(int64_t i) const {
    if constexpr (!std::is_same_v<T, AnyType>) {
      return load_pair(static_cast<const T*>(data) + i);
    } else if constexpr (std::is_same_v<A, float>) {
      if (type == Dtype::kBFloat16) return load<c10::BFloat16>(i);
      if (type == Dtype::kHalf) return load<c10::Half>(i);
      return load<float>(i);
    } else {
      return load<A>(i);
    }
  }

  template <class T = AnyType> KF_INLINE Pair<A> load(int64_t i, Whole) const { return load<T>(i); }
  // The part, and zeros.
  template <class T = AnyType> [[gnu::noinline]] Pair<A> load(int64_t i, Part part) const {
    A copy[Pair<A>::kStep] = {};
    std::memcpy(copy, static_cast<const char*>(data) + i * size_of(type), part.count * size_of(type));
    return Source{type, copy}.template load<T>(0);
  }
};

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

// Stores a vector past the caches, where the instruction set can; p is aligned to the vector.
template <class T> KF_INLINE void stream(const Vectorized<T>& v, T* p) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512i bits;
  std::memcpy(&bits, &v, sizeof(bits));
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bits);
#elif defined(CPU_CAPABILITY_AVX2)
  __m256i bits;
  std::memcpy(&bits, &v, sizeof(bits));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits);
#else
  v.store(p);
#endif
}

// Before another thread may read what was streamed.
inline void finish_streams() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

#if defined(CPU_CAPABILITY_AVX512)
#define KF_HALVES
using Halves = __m256i;
KF_INLINE Halves halves(const Vectorized<float>& v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KF_INLINE void stream(const Halves& v, c10::Half* p) { _mm256_stream_si256(reinterpret_cast<Halves*>(p), v); }
#elif defined(CPU_CAPABILITY_AVX2)
#define KF_HALVES
using Halves = __m128i;
KF_INLINE Halves halves(const Vectorized<float>& v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KF_INLINE void stream(const Halves& v, c10::Half* p) { _mm_stream_si128(reinterpret_cast<Halves*>(p), v); }
#endif

template <class A> struct Target {
  Dtype type = kDtypeOf<A>;
  void* data = nullptr;   // null: absent
  bool streams = false;   // past the caches: for results that they could not keep

  static constexpr uintptr_t kAlignment = sizeof(Vectorized<A>);

  // What cannot be streamed is stored.
  static Target streamed(Dtype type, void* data, bool streams) {
    return {type, data, streams && reinterpret_cast<uintptr_t>(data) % kAlignment == 0};
  }

  template <class T = AnyType> KF_INLINE void store(int64_t i, const Pair<A>& v) const {
    if constexpr (std::is_same_v<T, A>) {
      A* p = static_cast<A*>(data) + i;
      put(v.a, p);
      put(v.b, p + Vectorized<A>::size());
    } else if constexpr (std::is_same_v<T, Interleaved>) {
      put(interleaved_bits(v), static_cast<int32_t*>(data) + i / 2);
#if defined(KF_HALVES)
    } else if constexpr (std::is_same_v<T, c10::Half>) {  // half by half, as in load_pair
      put(halves(v.a), static_cast<T*>(data) + i);
      put(halves(v.b), static_cast<T*>(data) + i + Vectorized<A>::size());
#endif
    } else if constexpr (!std::is_same_v<T, AnyType>) {
      put(at::vec::convert_from_float<T>(v.a, v.b), static_cast<T*>(data) + i);
    } else if constexpr (std::is_same_v<A, float>) {
      if (type == Dtype::kBFloat16) return store<c10::BFloat16>(i, v);
      if (type == Dtype::kHalf) return store<c10::Half>(i, v);
      store<float>(i, v);
    } else {
      store<A>(i, v);
    }
  }

  template <class T = AnyType> KF_INLINE void store(int64_t i, const Pair<A>& v, Whole) const { store<T>(i, v); }
  template <class T = AnyType> [[gnu::noinline]] void store(int64_t i, const Pair<A>& v, Part part) const {
    A copy[Pair<A>::kStep];
    Target{type, copy}.template store<T>(0, v);
    std::memcpy(static_cast<char*>(data) + i * size_of(type), copy, part.count * size_of(type));
  }

  // A whole vector, as it is.
  template <class T> KF_INLINE void put(const Vectorized<T>& v, T* p) const {
    if (streams) stream(v, p);
    else v.store(p);
  }
#if defined(KF_HALVES)
  KF_INLINE void put(const Halves& v, c10::Half* p) const {
    if (streams) stream(v, p);
    else std::memcpy(p, &v, sizeof(v));
  }
#endif
};

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
