// Contiguous elements of a type known at run time: `Source` loads and `Target` stores pairs of vectors of the compute type.
#pragma once

#include <cstring>
#include <type_traits>

#include "shared/names.h"
#include "cpu/simd.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::kDouble ? 8 : dtype == Dtype::kFloat ? 4 : 2; }

template <class T>
inline constexpr Dtype kDtypeOf = std::is_same_v<T, double>      ? Dtype::kDouble
                                  : std::is_same_v<T, float>     ? Dtype::kFloat
                                  : std::is_same_v<T, c10::Half> ? Dtype::kHalf
                                                                 : Dtype::kBFloat16;
struct AnyType {};

// ---- Stores past the caches -------------------------------------------------------------------------------------------------

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

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

// Makes streamed stores visible. A thread calls it before another thread may read the data.
inline void finish_streams() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

#if defined(CPU_CAPABILITY_AVX512)
#define KF_HALVES
using Halves = __m256i;
KF_INLINE Halves halves(const Vectorized<float>& v) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
KF_INLINE void stream(const Halves& v, c10::Half* p) { _mm256_stream_si256(reinterpret_cast<Halves*>(p), v); }
#elif defined(CPU_CAPABILITY_AVX2)
#define KF_HALVES
using Halves = __m128i;
KF_INLINE Halves halves(const Vectorized<float>& v) {
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
KF_INLINE void stream(const Halves& v, c10::Half* p) { _mm_stream_si128(reinterpret_cast<Halves*>(p), v); }
#endif

}  // namespace

// Contiguous elements to read: of double if A is double, of any other type if A is float.
template <class A> struct Source {
  Dtype type = kDtypeOf<A>;
  const void* data = nullptr;  // null if absent

  static bool reads(Dtype type) { return (type == Dtype::kDouble) == std::is_same_v<A, double>; }

  // T is the type, if the loop knows it at compile time. Otherwise each pair costs a branch, which always goes the same way.
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
  template <class T = AnyType> KF_INLINE Pair<A> load(int64_t i, Part part) const { return load_part<T>(*this, i, part); }

 private:
  // `from` is passed by value. If its address were known elsewhere, a loop would read the type again for every pair.
  template <class T> [[gnu::noinline]] static Pair<A> load_part(Source from, int64_t i, Part part) {
    A copy[Pair<A>::kStep] = {};
    std::memcpy(copy, static_cast<const char*>(from.data) + i * size_of(from.type), part.count * size_of(from.type));
    return Source{from.type, copy}.template load<T>(0);
  }
};

// Contiguous elements to write, of the same types.
template <class A> struct Target {
  Dtype type = kDtypeOf<A>;
  void* data = nullptr;  // null if absent
  bool streams = false;  // store past the caches, for results that would not stay there

  static constexpr uintptr_t kAlignment = sizeof(Vectorized<A>);

  // A target that streams, if asked to and aligned; unaligned results are stored as usual.
  static Target streamed(Dtype type, void* data, bool streams) {
    return {type, data, streams && reinterpret_cast<uintptr_t>(data) % kAlignment == 0};
  }

  template <class T = AnyType> KF_INLINE void store(int64_t i, const Pair<A>& v) const {
    if constexpr (std::is_same_v<T, A>) {
      A* p = static_cast<A*>(data) + i;
      put(v.a, p);
      put(v.b, p + Vectorized<A>::size());
    } else if constexpr (std::is_same_v<T, Interleaved>) {
      put(interleaved_bits(v.a, v.b), static_cast<int32_t*>(data) + i / 2);
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
  template <class T = AnyType> KF_INLINE void store(int64_t i, const Pair<A>& v, Part part) const {
    store_part<T>(*this, i, v, part);
  }

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

 private:
  template <class T> [[gnu::noinline]] static void store_part(Target to, int64_t i, Pair<A> v, Part part) {
    A copy[Pair<A>::kStep];
    Target{to.type, copy}.template store<T>(0, v);
    std::memcpy(static_cast<char*>(to.data) + i * size_of(to.type), copy, part.count * size_of(to.type));
  }
};

}  // namespace kf::cpu::CPU_CAPABILITY
