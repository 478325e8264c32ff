// Vectors: kVec neighbouring elements of a row, at any alignment; loops with several loads in flight.
#pragma once

#include "types.cuh"

namespace kf {

// fp16 and bf16 stay packed until they are used.
template <class T, int kVec> struct alignas(sizeof(T) * kVec < 16 ? sizeof(T) * kVec : 16) Pack {
  T v[kVec];
};
template <int kVec> struct Pack<b1, kVec> {
  unsigned v;  // the first bit lowest; the rest is undefined
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

// fp16 and bf16 round two values with one instruction.
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

// The compiler would first extract each half into a register.
__device__ inline void widen_pair(bf16, unsigned pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}
__device__ inline void widen_pair(f16, unsigned pair, float& low, float& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(pair));
}

// The elements of a pack in the compute type.
template <class A, class T, int kVec> __device__ void widen_pack(const Pack<T, kVec>& pack, A (&v)[kVec]) {
  if constexpr (sizeof(T) == 2 && sizeof(A) == 4 && kVec % 2 == 0) {
#pragma unroll
    for (int e = 0; e < kVec; e += 2) widen_pair(T{}, reinterpret_cast<const unsigned*>(&pack)[e / 2], v[e], v[e + 1]);
  } else {
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] = widen<A>(pack.v[e]);
  }
}

template <class A, int kVec> __device__ void widen_pack(const Pack<b1, kVec>& pack, A (&v)[kVec]) {
#pragma unroll
  for (int e = 0; e < kVec; ++e) v[e] = pack.v >> e & 1 ? A(1) : A(0);
}

// Makes the compiler widen a pack where it is used, and not before a loop.
template <class T, int kVec> __device__ void keep_packed(Pack<T, kVec>& pack) {
  if constexpr (sizeof(T) == 2 && kVec % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) asm volatile("" : "+r"(reinterpret_cast<unsigned*>(&pack)[i]));
  }
}

template <int kBytes> struct Word;
template <> struct Word<1> {
  using type = unsigned char;
};
template <> struct Word<2> {
  using type = unsigned short;
};
template <> struct Word<4> {
  using type = unsigned;
};
template <> struct Word<8> {
  using type = uint2;
};
template <> struct Word<16> {
  using type = uint4;
};

template <int kAlign, class T, int kVec>
inline constexpr int kPieceBytes = static_cast<int>(sizeof(T)) * kVec < kAlign ? static_cast<int>(sizeof(T)) * kVec : kAlign;

// Loads from p, aligned to kAlign bytes, in the widest pieces. Unaligned fp16 and bf16 come as the aligned words that hold
// them, shifted: 2 bytes cost as much as 4. kLast: caches may drop them.
template <int kAlign, int kVec, bool kLast = false, class T> __device__ Pack<T, kVec> load(const T* p) {
  constexpr int kPiece = kPieceBytes<kAlign, T, kVec>, kWords = sizeof(Pack<T, kVec>) / 4;
  using W = typename Word<kPiece>::type;
  Pack<T, kVec> pack;
  if constexpr (kPiece == 2 && kWords > 0) {
    const bool odd = reinterpret_cast<unsigned long long>(p) & 2;
    const auto* words = reinterpret_cast<const unsigned*>(p - odd);
    unsigned w[kWords + 1];
#pragma unroll
    for (int i = 0; i < kWords; ++i) w[i] = words[i];
    w[kWords] = odd ? words[kWords] : 0;  // touches no word without an element
    const unsigned order = odd ? 0x5432 : 0x3210;
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<unsigned*>(&pack)[i] = __byte_perm(w[i], w[i + 1], order);
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack)) / kPiece; ++i) {
      const W* word = reinterpret_cast<const W*>(p) + i;
      if constexpr (kLast) reinterpret_cast<W*>(&pack)[i] = __ldcs(word);
      else reinterpret_cast<W*>(&pack)[i] = *word;
    }
  }
  return pack;
}

// For what is read only here: skips L1 if a whole piece of 16 bytes is read at once. kLast: the last read of what lies
// in L1.
template <int kAlign, int kVec, class T> __device__ Pack<T, kVec> load_once(const T* p) {
  if constexpr (kPieceBytes<kAlign, T, kVec> == 16) {
    Pack<T, kVec> pack;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack)) / 16; ++i) {
      uint4& w = reinterpret_cast<uint4*>(&pack)[i];
      asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                   : "l"(reinterpret_cast<const uint4*>(p) + i));
    }
    return pack;
  } else {
    return load<kAlign, kVec>(p);
  }
}

// Computes an offset or address here; else the compiler keeps its terms through a loop, or adds them for every use.
template <class T> __device__ T settled(T offset) {
  asm("" : "+l"(offset));
  return offset;
}

// Elements [i, i + kVec) of `base`; one byte holds all bits.
template <class T, int kAlign, int kVec> __device__ Pack<T, kVec> load_at(const void* base, i64 i) {
  if constexpr (kIsBit<T>) return {static_cast<unsigned>(static_cast<const unsigned char*>(base)[i / 8]) >> (i % 8)};
  else return load<kAlign, kVec>(static_cast<const T*>(base) + i);
}

// Bits [i, i + kVec) of `base`. Neighbouring lanes build a byte together, so all lanes call this, each with the next
// vector; those from `size` on are not stored.
template <int kVec> __device__ void store_bits(void* base, i64 i, i64 size, Pack<b1, kVec> pack) {
  static_assert(8 % kVec == 0);
  unsigned byte = pack.v << (i % 8);
#pragma unroll
  for (int lanes = 1; lanes < 8 / kVec; lanes *= 2) byte |= __shfl_xor_sync(~0u, byte, lanes);
  if (i % 8 == 0 && i < size) static_cast<unsigned char*>(base)[i / 8] = static_cast<unsigned char>(byte);
}

// Stores by one instruction. The compiler might split a plain store.
__device__ inline void store_word(void* p, unsigned char v) { *static_cast<unsigned char*>(p) = v; }
__device__ inline void store_word(void* p, unsigned short v) { *static_cast<unsigned short*>(p) = v; }
__device__ inline void store_word(void* p, unsigned v) { *static_cast<unsigned*>(p) = v; }
__device__ inline void store_word(void* p, uint2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
__device__ inline void store_word(void* p, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Stores whole vectors if aligned as a vector, else in pieces. kLast: caches may drop it first.
template <int kAlign, bool kLast = false, int kVec, class T> __device__ void store(T* p, const Pack<T, kVec>& pack) {
  constexpr int kPiece = kPieceBytes<kAlign, T, kVec>;
  using W = typename Word<kPiece>::type;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack)) / kPiece; ++i) {
    const W word = reinterpret_cast<const W*>(&pack)[i];
    if constexpr (kLast) __stcs(reinterpret_cast<W*>(p) + i, word);
    else store_word(reinterpret_cast<W*>(p) + i, word);
  }
}

// Vectors of a warp's lanes, neighbours in a row of kCols columns. `row` is aligned like them and, with kRoom, has room
// for two at a lone last one. Every lane calls this. Two lanes exchange halves of 32-byte vectors, so that an
// instruction fills each sector that it touches.
template <int kCols, bool kRoom, int kVec, class A>
__device__ void store_by_pairs(A* row, int col, int lane, const A (&v)[kVec]) {
  constexpr int kHalf = kVec / 2;
  if constexpr (kVec * sizeof(A) == 32 && (kRoom || kCols % (2 * kVec) == 0)) {
    const bool odd = lane % 2;
    Pack<A, kHalf> first, second;
#pragma unroll
    for (int e = 0; e < kHalf; ++e) {
      const A kept = odd ? v[kHalf + e] : v[e], got = __shfl_xor_sync(~0u, odd ? v[e] : v[kHalf + e], 1);
      first.v[e] = odd ? got : kept;
      second.v[e] = odd ? kept : got;
    }
    const int of_pair = __shfl_sync(~0u, col, lane & ~1);  // without a vector, col is kCols or more
    if (of_pair >= kCols) return;
    A* const p = row + of_pair + (odd ? kHalf : 0);
    store<16>(p, first);
    store<16>(p + kVec, second);
  } else if (col < kCols) {
    Pack<A, kVec> pack;
#pragma unroll
    for (int e = 0; e < kVec; ++e) pack.v[e] = v[e];
    store<16>(row + col, pack);
  }
}

// Columns [col, col + kVec) of a row of kCols columns, both multiples of kVec: beyond the row reads give zero and
// writes nothing, at no cost if the threads cover the row exactly.
template <int kAlign, int kVec, int kCols, bool kCovers, bool kLast = false, class T>
__device__ Pack<T, kVec> load_cols(const T* row, int col) {
  if constexpr (kCovers) return load<kAlign, kVec, kLast>(row + col);
  Pack<T, kVec> pack{};
  if (col < kCols) pack = load<kAlign, kVec, kLast>(row + col);
  keep_packed(pack);  // else the compiler tests each half of a pair
  return pack;
}

template <int kAlign, int kVec, int kCols, bool kCovers, bool kLast = false, class T>
__device__ void store_cols(T* row, int col, const Pack<T, kVec>& pack) {
  if (kCovers || col < kCols) store<kAlign, kLast>(row + col, pack);
}

// use(i, load(i)) for i = first, first + step, ... below `end`, kBatch loads at a time; returns the first i not below.
// The rest goes in halves of the batch, because slow loads are best waited for together; or one by one, with less code
// and fewer registers.
template <int kBatch, bool kHalves = true, class I, class Load, class Use>
__device__ I batched(I first, I end, I step, const Load& load, const Use& use) {
  I i = first;
  // Unrolled, it would multiply a batch's registers.
#pragma unroll 1
  for (; i < end - (kBatch - 1) * step; i += kBatch * step) {
    decltype(load(i)) loaded[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) loaded[u] = load(i + u * step);
#pragma unroll
    for (int u = 0; u < kBatch; ++u) use(i + u * step, loaded[u]);
  }
  if constexpr (kBatch > 1) return batched<kHalves ? kBatch / 2 : 1>(i, end, step, load, use);
  else return i;
}

// Programmatic dependent launch: a kernel starts while the one before it runs, and waits here before it touches memory.
// After an ordinary launch it does nothing. sm_90 and newer.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Computes the address of the first read before the wait. A store that never executes, because no address ends in 32
// ones, keeps the compiler from doing so later.
__device__ inline void wait_for_previous_kernel(const void* first_read) {
#if __CUDA_ARCH__ >= 900
  __shared__ unsigned unread;
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(&unread));
  const auto low = static_cast<unsigned>(reinterpret_cast<unsigned long long>(first_read));
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %1, 0xffffffff; @p st.shared.u32 [%0], %1; }" ::"r"(shared), "r"(low)
               : "memory");
#endif
  wait_for_previous_kernel();
}

}  // namespace kf
