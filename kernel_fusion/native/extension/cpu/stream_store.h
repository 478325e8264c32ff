// Stores past the caches, if the instruction set has them.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cstring>

#include "shared/inline.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

using at::vec::Vectorized;

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

// p is aligned to the vector.
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

// Called before another thread may read streamed data.
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
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
