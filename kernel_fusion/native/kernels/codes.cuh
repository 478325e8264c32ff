// Codes and scales of a row v that is computed vector by vector (backends/eager/quantize.py, bit for bit):
// code = round(clamp(v / s)), s = max |v| / largest code, or 1 for 0.
//
// The largest |v| of neighbouring vectors is found by shuffles, and that of a row through shared memory. The quotient of
// an fp16 or bf16 v takes two instructions. Float8 is rounded by one instruction on sm_89 and newer, and elsewhere in
// integers.
#pragma once

#include "shared/names.h"
#include "shared/row_norm_args.h"
#include "tree.cuh"
#include "vectors.cuh"

namespace kf {

constexpr int kScaleBlock = 128;  // columns that share a scale

// The largest code of a type, and the codes of two or four quotients in one word, in which the first one is lowest.
template <CodeType> struct Code;

template <> struct Code<CodeType::kInt8> {
  static constexpr float kLargest = 127;
  // NaN has the code 0.
  static __device__ int whole(float q) {
    float least;
    int code;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(q), "f"(-kLargest));
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(code) : "f"(least));
    return code;
  }
  static __device__ unsigned two(float low, float high, unsigned above = 0) {
    unsigned codes;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(codes) : "r"(whole(high)), "r"(whole(low)), "r"(above));
    return codes;
  }
  static __device__ unsigned four(float a, float b, float c, float d) { return two(a, b, two(c, d)); }
};

// Rounds to a byte in integers, where a carry goes where it belongs. A code without a leading 1 is rounded by a sum whose
// last digit is the code's.
template <int kExponent, int kMantissa> __device__ unsigned float8_in_integers(float q, float largest) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1, kShift = 23 - kMantissa;
  constexpr unsigned kLeastNormal = (127 - kBias + 1) << 23, kSum = (127 - kBias + kShift + 1) << 23;
  constexpr unsigned kRebias = (static_cast<unsigned>(kBias - 127) << 23) + (1u << (kShift - 1)) - 1;
  const float size = fabsf(q);
  const unsigned bits = __float_as_uint(size > largest ? largest : size);  // NaN stays
  const unsigned small = __float_as_uint(__uint_as_float(bits) + __uint_as_float(kSum)) - kSum;
  const unsigned normal = (bits + kRebias + (bits >> kShift & 1)) >> kShift;
  const unsigned code = bits > 0x7f800000 ? 0x7f : bits < kLeastNormal ? small : normal;
  return code | (__float_as_uint(q) >> 24 & 0x80);
}

template <int kExponent, int kMantissa, int largest> struct Float8 {
  static constexpr float kLargest = largest;
  static __device__ unsigned two(float low, float high) {
#if __CUDA_ARCH__ >= 890
    unsigned short codes;
    if constexpr (kMantissa == 3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return float8_in_integers<kExponent, kMantissa>(low, kLargest) | float8_in_integers<kExponent, kMantissa>(high, kLargest)
                                                                         << 8;
#endif
  }
  static __device__ unsigned four(float a, float b, float c, float d) {
    unsigned codes;
    asm("mov.b32 %0, {%1, %2};"
        : "=r"(codes)
        : "h"(static_cast<unsigned short>(two(a, b))), "h"(static_cast<unsigned short>(two(c, d))));
    return codes;
  }
};
template <> struct Code<CodeType::kFloat8E4m3fn> : Float8<4, 3, 448> {};
template <> struct Code<CodeType::kFloat8E5m2> : Float8<5, 2, 57344> {};

// The codes of a vector of quotients, a byte each.
template <CodeType kCode, int kVec> __device__ typename Word<kVec>::type codes_of(const float (&q)[kVec]) {
  using C = Code<kCode>;
  if constexpr (kVec == 8) return {C::four(q[0], q[1], q[2], q[3]), C::four(q[4], q[5], q[6], q[7])};
  else if constexpr (kVec == 4) return C::four(q[0], q[1], q[2], q[3]);
  else return static_cast<typename Word<kVec>::type>(C::two(q[0], q[kVec - 1]));
}

// The largest |v| so far, as an integer. Integers have the order of the numbers, with NaN above all. Pairs of fp16 or bf16
// have two of them in a word.
template <class V> struct Largest {
  unsigned of = 0;

  template <int kVec> __device__ void add(const Pack<V, kVec>& pack) {
    if constexpr (sizeof(V) == 2 && kVec % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kVec / 2; ++i) of = __vmaxu2(of, reinterpret_cast<const unsigned*>(&pack)[i] & 0x7fff7fff);
    } else if constexpr (sizeof(V) == 2) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) of = max(of, pack.v[e].bits & 0x7fffu);
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) of = max(of, __float_as_uint(widen<float>(pack.v[e])) & 0x7fffffff);
    }
  }
  __device__ unsigned value() const { return sizeof(V) == 2 ? max(of & 0xffff, of >> 16) : of; }
};

template <CodeType kCode, class V> __device__ float scale_of(unsigned largest) {
  float v;
  if constexpr (sizeof(V) == 2) v = widen<float>(V{static_cast<unsigned short>(largest)});
  else v = __uint_as_float(largest);
  const float s = v / Code<kCode>::kLargest;
  return s == 0 ? 1.0f : s;
}

// Whether the quotient of an fp16 or bf16 v has terms that are not normal numbers.
template <class V> __device__ bool is_extreme(float s) {
  return sizeof(V) == 2 && !(fabsf(s) >= 0x1p-100f && fabsf(s) <= 0x1p100f);
}

// v / s, correctly rounded.
template <class V, bool kExtreme, bool kNarrow = sizeof(V) == 2> struct Divisor {
  float s;

  __device__ explicit Divisor(float s) : s(s) {}
  // The scale that another one of kLanes neighbouring lanes has.
  template <int kLanes> __device__ Divisor of_lane(int lane) const { return Divisor(__shfl_sync(~0u, s, lane, kLanes)); }
  template <int kVec> __device__ void divide(float (&v)[kVec]) const {
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] /= s;
  }
};

// For 16-bit v as v * high + v * low, which has the codes of the rounded quotient: high + low is 1 / s to 46 digits
// (docs/quantized.md). `low` is never 0, so that infinities stay, and has the sign of `high`, so that -0 does. With an
// extreme s a power of two, which first multiplies v, keeps both normal.
template <class V, bool kExtreme> struct Divisor<V, kExtreme, true> {
  float power = 1, high, low;

  __device__ explicit Divisor(float s) {
    float size = fabsf(s);
    if (kExtreme && is_extreme<V>(s)) power = size < 1 ? 0x1p96f : 0x1p-64f;
    size *= power;
    high = __frcp_rz(size);
    const float rest = fused(-size, high, 1.0f), first = product(rest, high);
    low = fmaxf(__fmaf_ru(first, rest, first), 0x1p-126f);  // of NaN the least
    high = copysignf(high, s);
    low = copysignf(low, s);
  }

  template <int kLanes> __device__ Divisor of_lane(int lane) const {
    Divisor other = *this;
    if constexpr (kExtreme) other.power = __shfl_sync(~0u, power, lane, kLanes);
    other.high = __shfl_sync(~0u, high, lane, kLanes);
    other.low = __shfl_sync(~0u, low, lane, kLanes);
    return other;
  }

  template <int kVec> __device__ void divide(float (&v)[kVec]) const {
    if constexpr (kExtreme) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] *= power;
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] = fused(v[e], high, product(v[e], low));
  }
};

// Writes codes and scales of a row of V; `At` says which vectors a thread has, and which warps a block.
template <class S, class V, class At> struct RowCodes {
  using P = Place<S>;
  static constexpr int kVec = S::kVec, kVectors = At::kVectors, kWarps = S::kWarps / S::kShares;
  // Vectors of a lane that share a scale with the other lanes', and lanes.
  static constexpr int kBlockVectors = P::kChunk < kScaleBlock ? kScaleBlock / P::kChunk : 1;
  static constexpr int kBlockLanes = kScaleBlock / kVec < S::kLanes ? kScaleBlock / kVec : S::kLanes;

  const CodeArgs& args;
  const At& at;
  i64 row;
  bool live;

  // `vector(i)` gives the thread's i-th vector. It is called once for each i in order, or twice if a row finds no room in
  // registers.
  template <class Vector> __device__ void store(const Vector& vector) const {
    if constexpr (S::kScales != Scales::kBlock) {
      with_one_scale(vector);
    } else {
      static_assert(P::kChunk % kScaleBlock == 0 || S::kWarps == 1);
      constexpr int kBlocks = (kVectors + kBlockVectors - 1) / kBlockVectors;
      // Each lane of a block has at least one column.
      constexpr bool kWhole = S::kCols % kScaleBlock == 0 || S::kCols % kScaleBlock >= 4 * kVec;
      constexpr int kTogether = !kWhole || kBlockVectors > 1 ? 1 : kBlocks % 4 == 0 ? 4 : kBlocks % 2 == 0 ? 2 : 1;
      each<kBlocks / kTogether>([&](int i) { blocks<kTogether>(i * kTogether, vector); });
    }
  }

 private:
  template <int kCount, class F> __device__ static void each(const F& f) {
    constexpr int kUnroll = S::kResident ? kCount : kCount < 4 ? kCount : 4;
#pragma unroll kUnroll
    for (int i = 0; i < kCount; ++i) f(i);
  }

  // A vector past the row's end may not be zero.
  __device__ void add(int i, const Pack<V, kVec>& pack, Largest<V>& largest) const {
    if (P::kCovers || at.col(i) < S::kCols) largest.add(pack);
  }

  // Vectors in registers wait for the scale.
  template <class Vector> __device__ void with_one_scale(const Vector& vector) const {
    constexpr bool kFound = S::kScales == Scales::kRow;
    Pack<V, kVec> kept[S::kResident ? kVectors : 1];
    Largest<V> largest;
    float scale = kFound ? 0 : *args.scales;
    if constexpr (S::kResident || kFound)
      each<kVectors>([&](int i) {
        auto& pack = kept[S::kResident ? i : 0];
        pack = vector(i);
        if constexpr (kFound) add(i, pack, largest);
      });
    if constexpr (kFound) {
      scale = scale_of<S::kCode, V>(of_row(largest.value()));
      if (live && at.leader()) args.scales[row] = scale;
    }
    const auto again = [&](int i) { return S::kResident ? kept[S::kResident ? i : 0] : vector(i); };
    // One test for all of a thread's vectors: beside each it would cost as much as a multiplication.
    if (is_extreme<V>(scale)) put_all(again, Divisor<V, true>(scale));
    else put_all(again, Divisor<V, false>(scale));
  }

  // Blocks [first, first + kTogether) of this thread's. Shuffles leave a lane the largest of one of them: its number is
  // `mine`. The lane makes the scale, and others ask it. A word has two blocks of 16-bit v.
  template <int kTogether, class Vector> __device__ void blocks(int first, const Vector& vector) const {
    constexpr bool kPairs = sizeof(V) == 2 && kTogether > 1;
    constexpr int kWords = kPairs ? kTogether / 2 : kTogether;
    Pack<V, kVec> kept[kTogether * kBlockVectors];
    Largest<V> largest[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether * kBlockVectors; ++k) {
      const int i = first * kBlockVectors + k;
      if (kVectors % kBlockVectors > 0 && i >= kVectors) continue;
      kept[k] = vector(i);
      add(i, kept[k], largest[k / kBlockVectors]);
    }
    const auto larger = [](unsigned a, unsigned b) { return kPairs ? __vmaxu2(a, b) : max(a, b); };
    unsigned most[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const unsigned low = largest[k].of, high = largest[kTogether - kWords + k].of;
      if constexpr (kPairs) most[k] = larger(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
      else most[k] = largest[k].value();
    }
#pragma unroll
    for (int offset = 1, left = kWords; offset < kBlockLanes; offset *= 2) {
      const bool upper = at.lane & offset;
      left /= 2;  // pairs to exchange; none: all lanes go on with one word
#pragma unroll
      for (int k = 0; k < left; ++k) {
        const unsigned even = most[2 * k], odd = most[2 * k + 1];
        most[k] = larger(upper ? odd : even, __shfl_xor_sync(~0u, upper ? even : odd, offset));
      }
      if (left == 0) most[0] = larger(most[0], __shfl_xor_sync(~0u, most[0], offset));
    }
    if constexpr (kPairs) most[0] = at.lane & kWords ? most[0] >> 16 : most[0] & 0xffff;
    const float scale = scale_of<S::kCode, V>(most[0]);
    const int of_block = at.lane & (kBlockLanes - 1), mine = of_block & (kTogether - 1);
    unsigned col = at.col(first * kBlockVectors);
#pragma unroll
    for (int k = 1; k < kTogether; ++k) col = mine == k ? at.col(first + k) : col;
    if (live && of_block < kTogether && col < S::kCols) args.scales[col / kScaleBlock * args.rows + row] = scale;
    const bool extreme = kTogether == 1 ? is_extreme<V>(scale) : __any_sync(~0u, is_extreme<V>(scale));
    if (extreme) put_blocks<kTogether>(first, kept, Divisor<V, true>(scale));
    else put_blocks<kTogether>(first, kept, Divisor<V, false>(scale));
  }

  template <int kTogether, class D>
  __device__ void put_blocks(int first, const Pack<V, kVec> (&kept)[kTogether * kBlockVectors], const D& divisor) const {
#pragma unroll
    for (int k = 0; k < kTogether * kBlockVectors; ++k) {
      const int i = first * kBlockVectors + k;
      if (kVectors % kBlockVectors > 0 && i >= kVectors) continue;
      if constexpr (kTogether == 1) put(i, kept[k], divisor);
      else put(i, kept[k], divisor.template of_lane<S::kLanes>((at.lane & ~(kBlockLanes - 1)) | k));
    }
  }

  template <int kLanes> __device__ static unsigned largest_of_lanes(unsigned v) {
    if constexpr (kLanes == 32) return __reduce_max_sync(~0u, v);
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) v = max(v, __shfl_xor_sync(~0u, v, offset));
    return v;
  }

  __device__ unsigned of_row(unsigned v) const {
    v = largest_of_lanes<S::kLanes>(v);
    if constexpr (kWarps > 1) {
      __shared__ unsigned of_warp[kWarps];
      if (at.lane == 0) of_warp[at.warp] = v;
      __syncthreads();
      v = largest_of_lanes<32>(at.lane < kWarps ? of_warp[at.lane] : 0);
    }
    return v;
  }

  template <class Vector, class D> __device__ void put_all(const Vector& vector, const D& divisor) const {
    each<kVectors>([&](int i) { put(i, vector(i), divisor); });
  }

  template <class D> __device__ void put(int i, const Pack<V, kVec>& pack, const D& divisor) const {
    float q[kVec];
    widen_pack(pack, q);
    divisor.divide(q);
    auto* const codes = static_cast<unsigned char*>(args.codes) + row * S::kCols + at.col(i);
    if (live && (P::kCovers || at.col(i) < S::kCols)) store_word(codes, codes_of<S::kCode>(q));
  }
};

}  // namespace kf
