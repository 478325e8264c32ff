// Loads and stores of elements of any type, as pairs of vectors of the accumulator type.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <bit>
#include <cstring>
#include <type_traits>

#include "shared/inline.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

using at::vec::Vectorized;

// ---- bf16 without moving elements between lanes -----------------------------------------------------------------------------

// A bf16 element that is loaded in another order: a pair holds the even elements in one vector and the odd ones in the other.
// Each then is the upper half of the word in which it lies, so no element moves between lanes.
struct Interleaved : c10::BFloat16 {
  using c10::BFloat16::BFloat16;
};
using Words [[gnu::vector_size(sizeof(Vectorized<float>))]] = uint32_t;

// The type by which a loop loads and stores T if all its operands and results have type T: any order of elements will do.
template <class T> using Alike = std::conditional_t<std::is_same_v<T, c10::BFloat16>, Interleaved, T>;

// Rounds both vectors to bf16, to nearest with ties to even. A NaN stays a NaN only if its lower 16 bits are zero, as they are
// if it comes from bf16 or from arithmetic. All other NaN would cost two more instructions.
KF_INLINE Vectorized<int32_t> interleaved_bits(const Vectorized<float>& a, const Vectorized<float>& b) {
#if defined(CPU_CAPABILITY_AVX512)  // three instructions fewer than the formula
  const auto rounded = [](const Vectorized<float>& half) {
    const __m512i bits = _mm512_castps_si512(half), up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_sub_epi32(up, _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000)), up, _mm512_set1_epi32(-1));
  };
  const __m512i upper_half = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);  // bytes of a 16-byte lane
  return _mm512_mask_shuffle_epi8(rounded(b), 0x3333333333333333, rounded(a), upper_half);
#else
  const auto rounded = [](const Vectorized<float>& half) {
    const auto bits = std::bit_cast<Words>(half);
    return bits + 0x7fff + (bits >> 16 & 1);
  };
  return std::bit_cast<Vectorized<int32_t>>(rounded(a) >> 16 | (rounded(b) & 0xffff0000));
#endif
}

// ---- Pairs -----------------------------------------------------------------------------------------------------------------

template <class T> using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Two vectors of accumulators, which hold as many elements as one vector of fp16 or bf16.
template <class A> struct Pair {
  using V = Vectorized<A>;
  static constexpr int64_t kStep = 2 * V::size();
  V a, b;
};

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
  } else if constexpr (std::is_same_v<T, c10::Half>) {  // two loads, so that no vector must be cut in two
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

// How much of a pair a loop takes: all of it, or the last `count` elements of a row. Memory beyond a part is neither read nor
// written. Taking a part element by element would take longer than the rest of a short row.
struct Whole {};
struct Part {
  int64_t count;
};

// Loads less than a vector of fp16 or bf16, followed by zeros. AVX2 loads word by word, which is faster than at::vec's copy.
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
template <class T> inline Pair<AccOf<T>> load_pair(const T* p, Part part) {  // followed by zeros
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

// v, with zeros in place of the elements beyond the part.
template <class A> inline Pair<A> first_of(const Pair<A>& v, Whole) { return v; }
template <class A> inline Pair<A> first_of(const Pair<A>& v, Part part) {
  using V = Vectorized<A>;
  const V count(static_cast<A>(part.count));
  return {v.a & (V::arange(A(0), A(1)) < count), v.b & (V::arange(static_cast<A>(V::size()), A(1)) < count)};
}

// Calls f(i, Whole) for each full pair of [0, n), then f(i, Part).
template <class A, class F> KF_INLINE void sweep(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + Pair<A>::kStep <= n; i += Pair<A>::kStep) f(i, Whole{});
  if (i < n) f(i, Part{n - i});
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

}  // namespace
}  // namespace kf::cpu::CPU_CAPABILITY
