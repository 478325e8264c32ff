// Element types. Conversions are single PTX instructions instead of CUDA's headers, which keeps compilation fast.
#pragma once

namespace kf {

using i64 = long long;
using f32 = float;
using f64 = double;
struct f16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};
struct b8 {
  unsigned char bits;
};  // a boolean
struct b1 {};      // eight of them to a byte, the first one lowest
struct absent {};  // the type of an absent tensor

template <class T> inline constexpr bool kPresent = true;
template <> inline constexpr bool kPresent<absent> = false;

template <class T> inline constexpr bool kIsBit = false;
template <> inline constexpr bool kIsBit<b1> = true;

template <class T, class U> inline constexpr bool kSame = false;
template <class T> inline constexpr bool kSame<T, T> = true;

template <bool, class T> struct PresentIf {
  using type = absent;
};
template <class T> struct PresentIf<true, T> {
  using type = T;
};
template <bool condition, class T> using If = typename PresentIf<condition, T>::type;

template <class T, class Otherwise> struct PresentOr {
  using type = T;
};
template <class Otherwise> struct PresentOr<absent, Otherwise> {
  using type = Otherwise;
};

template <class A> __device__ A widen(f32 v) { return v; }
template <class A> __device__ A widen(f64 v) { return static_cast<A>(v); }
template <class A> __device__ A widen(bf16 v) { return __uint_as_float(static_cast<unsigned>(v.bits) << 16); }
template <class A> __device__ A widen(f16 v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.bits));
  return r;
}

// Rounds to the nearest number, and a tie to the even one.
template <class T> __device__ T narrow(float v);
template <> __device__ inline f32 narrow<f32>(float v) { return v; }
template <> __device__ inline f64 narrow<f64>(float v) { return v; }
template <> __device__ inline bf16 narrow<bf16>(float v) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
  return r;
}
template <> __device__ inline f16 narrow<f16>(float v) {
  f16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
  return r;
}
template <class T> __device__ T narrow(double v) {
  if constexpr (sizeof(T) == 2) return narrow<T>(static_cast<float>(v));  // PyTorch converts in two steps, too
  else return static_cast<T>(v);
}

// The compiler may not contract these: a sum must not depend on the kernel that adds it up.
__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }  // a * b + c, rounded once
__device__ inline double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

__device__ inline float reciprocal_sqrt(float v) { return __frsqrt_rn(v); }
__device__ inline double reciprocal_sqrt(double v) { return rsqrt(v); }

}  // namespace kf
