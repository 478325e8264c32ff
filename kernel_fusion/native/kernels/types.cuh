// Element types and vector access. No CUDA header is included: conversions are single PTX instructions, which keeps
// a kernel's compile time at some tens of milliseconds and needs nothing but NVRTC itself.
#pragma once

namespace kf {

using i64 = long long;
using f32 = float;
using f64 = double;
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct absent {};  // the type of a tensor that is not there

template <class T> inline constexpr bool kPresent = true;
template <> inline constexpr bool kPresent<absent> = false;

template <class A> __device__ A widen(f32 v) { return v; }
template <class A> __device__ A widen(f64 v) { return v; }
template <class A> __device__ A widen(bf16 v) { return __uint_as_float(static_cast<unsigned>(v.bits) << 16); }
template <class A> __device__ A widen(f16 v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.bits));
  return r;
}

// Rounds to nearest even, once: the accumulator is fp32 wherever the element is 16 bits wide.
template <class T> __device__ T narrow(float v);
template <> __device__ inline f32 narrow<f32>(float v) { return v; }
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
template <class T> __device__ T narrow(double v) { return static_cast<T>(v); }

// A product that is rounded before it is used: the compiler would otherwise fuse a * b - c, which is not 0 where c is the
// rounded product itself.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

__device__ inline float reciprocal_sqrt(float v) { return __frsqrt_rn(v); }
__device__ inline double reciprocal_sqrt(double v) { return rsqrt(v); }

// kVec neighbouring elements of one row, as loaded: 16-bit elements stay packed until they are used.
template <class T, int kVec> struct alignas(sizeof(T) * kVec < 16 ? sizeof(T) * kVec : 16) Pack {
  T v[kVec];
};

__device__ inline unsigned narrow_pair(bf16, float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ inline unsigned narrow_pair(f16, float low, float high) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// A whole pack: 16-bit types round two values with one instruction.
template <class T, int kVec, class A> __device__ Pack<T, kVec> narrow_pack(const A (&v)[kVec]) {
  Pack<T, kVec> pack;
  if constexpr (sizeof(T) == 2 && kVec % 2 == 0) {
#pragma unroll
    for (int e = 0; e < kVec; e += 2) reinterpret_cast<unsigned*>(&pack)[e / 2] = narrow_pair(T{}, v[e], v[e + 1]);
  } else {
#pragma unroll
    for (int e = 0; e < kVec; ++e) pack.v[e] = narrow<T>(v[e]);
  }
  return pack;
}

template <int kBytes> struct Word;
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

template <int kAlign, class T, int kVec> inline constexpr int kPieceBytes =
    static_cast<int>(sizeof(T)) * kVec < kAlign ? static_cast<int>(sizeof(T)) * kVec : kAlign;

// A whole pack in the compute type. (Splitting pairs of 16-bit elements by hand, with a shift and a mask, saves an
// instruction an element and still measured 5 % slower in backward on an H200.)
template <class A, class T, int kVec> __device__ void widen_pack(const Pack<T, kVec>& pack, A (&v)[kVec]) {
#pragma unroll
  for (int e = 0; e < kVec; ++e) v[e] = widen<A>(pack.v[e]);
}

// Makes the compiler widen a pack where it is used, instead of once before a loop into twice the registers.
template <class T, int kVec> __device__ void keep_packed(Pack<T, kVec>& pack) {
  if constexpr (sizeof(T) == 2 && kVec % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) asm volatile("" : "+r"(reinterpret_cast<unsigned*>(&pack)[i]));
  }
}

// Loads kVec elements from p, which is aligned to kAlign bytes, in the widest pieces that this allows.
template <int kAlign, int kVec, class T> __device__ Pack<T, kVec> load(const T* p) {
  constexpr int kPiece = kPieceBytes<kAlign, T, kVec>;
  using W = typename Word<kPiece>::type;
  Pack<T, kVec> pack;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack)) / kPiece; ++i)
    reinterpret_cast<W*>(&pack)[i] = reinterpret_cast<const W*>(p)[i];
  return pack;
}

template <int kAlign, int kVec, class T> __device__ void store(T* p, const Pack<T, kVec>& pack) {
  constexpr int kPiece = kPieceBytes<kAlign, T, kVec>;
  using W = typename Word<kPiece>::type;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack)) / kPiece; ++i)
    reinterpret_cast<W*>(p)[i] = reinterpret_cast<const W*>(&pack)[i];
}

// The same for columns [col, col + kVec) of a row of kCols columns: what lies beyond the row reads as zero and is not
// written. The comparison disappears where kVec divides kCols and the caller's loop covers the row exactly.
template <int kAlign, int kVec, int kCols, bool kCovers, class T> __device__ Pack<T, kVec> load_cols(const T* row, int col) {
  if (kCovers || col + kVec <= kCols) return load<kAlign, kVec>(row + col);
  Pack<T, kVec> pack = {};
  if constexpr (kCols % kVec != 0) {
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      if (col + e < kCols) pack.v[e] = row[col + e];
  }
  return pack;
}

template <int kAlign, int kVec, int kCols, bool kCovers, class T>
__device__ void store_cols(T* row, int col, const Pack<T, kVec>& pack) {
  if (kCovers || col + kVec <= kCols) {
    store<kAlign>(row + col, pack);
  } else if constexpr (kCols % kVec != 0) {
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      if (col + e < kCols) row[col + e] = pack.v[e];
  }
}

}  // namespace kf
