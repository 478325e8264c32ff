// The operands of a pointwise kernel: where elements lie, and vectors of neighbours.
//
// An iteration counts elements, innermost dimension first. Operands that lie otherwise take one multiplication per
// dimension.
#pragma once

#include "shared/names.h"
#include "shared/pointwise_args.h"
#include "vectors.cuh"

namespace kf {

struct Offsets {
  unsigned of[kOperands];
};

// The offset of element i in every operand, in elements. An offset that nobody uses costs nothing.
template <int kDims> __device__ Offsets offsets_of(const PointwiseArgs& args, unsigned i) {
  Offsets offsets{};
#pragma unroll
  for (int d = 0; d < kDims; ++d) {
    unsigned coordinate = i;
    if (d + 1 < kDims) {
      i = divide(i, args.dim[d]);
      coordinate -= i * args.dim[d].divisor;
    }
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offsets.of[k] += coordinate * args.stride[d][k];
  }
  return offsets;
}

// Operand number kSlot of the arguments. core/other_specs.py defines the modes.
template <class S, class T, Mode kMode, int kAlign, int kSlot> struct Operand {
  using Vector = Pack<T, S::kVec>;
  static constexpr int kVec = S::kVec;
  static constexpr bool kContiguous = kMode == Mode::kLinear || kMode == Mode::kVector;

  // The offset of element i.
  static __device__ i64 offset(const PointwiseArgs& args, i64 i) {
    if constexpr (kMode == Mode::kLinear) return i;
    return offsets_of<S::kDims>(args, static_cast<unsigned>(i)).of[kSlot];
  }

  // The offset of element i + e, given that of i.
  static __device__ i64 offset_within(const PointwiseArgs& args, i64 i, i64 first, int e) {
    if constexpr (kContiguous) return first + e;
    if constexpr (kMode == Mode::kBroadcast) return first;
    if constexpr (kMode == Mode::kStrided) return first + e * args.stride[0][kSlot];
    return offset(args, i + e);
  }

  // The first `count` elements of the vector at i, then zeros.
  static __device__ Vector load(const PointwiseArgs& args, i64 i, int count) {
    const T* p = static_cast<const T*>(args.data[kSlot]);
    const i64 first = offset(args, i);
    Vector pack{};
    if (count == kVec) {
      if constexpr (kContiguous) return kf::load<kAlign, kVec>(p + first);
      if constexpr (kMode == Mode::kBroadcast) {
        const T v = p[first];
#pragma unroll
        for (int e = 0; e < kVec; ++e) pack.v[e] = v;
        return pack;
      }
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      if (e < count) pack.v[e] = p[offset_within(args, i, first, e)];
    return pack;
  }

  static __device__ void store(const PointwiseArgs& args, i64 i, int count, const Vector& pack) {
    T* p = static_cast<T*>(args.data[kSlot]);
    const i64 first = offset(args, i);
    if constexpr (kContiguous) {
      if (count == kVec) return kf::store<kAlign>(p + first, pack);
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      if (e < count) p[offset_within(args, i, first, e)] = pack.v[e];
  }
};

// An operand with one bit per element.
template <class S, Mode kMode, int kAlign, int kSlot> struct Operand<S, b1, kMode, kAlign, kSlot> {
  using Vector = Pack<b1, S::kVec>;
  static __device__ Vector load(const PointwiseArgs& args, i64 i, int) {
    return load_at<b1, kAlign, S::kVec>(args.data[kSlot], i);
  }
  static __device__ void store(const PointwiseArgs& args, i64 i, Vector pack) {
    store_bits(args.data[kSlot], i, args.size, pack);
  }
};

// The operand that is absent.
template <class S, Mode kMode, int kAlign, int kSlot> struct Operand<S, absent, kMode, kAlign, kSlot> {
  struct Vector {};
  static __device__ Vector load(const PointwiseArgs&, i64, int) { return {}; }
};

// Runs `work` over the elements: each thread loads kUnroll vectors before it uses one. `work` handles vectors that the
// end cuts. With kTogether, lanes past the end come along with a count of at most zero.
template <class S, bool kTogether = false, class Work> __device__ void over_vectors(const Work& work, i64 size) {
  constexpr int kSpan = S::kThreads * S::kVec;
  const i64 start = static_cast<i64>(blockIdx.x) * (kSpan * S::kUnroll), first = start + threadIdx.x * S::kVec;
  if (start + kSpan * S::kUnroll <= size) {
    typename Work::Loaded loaded[S::kUnroll];
#pragma unroll
    for (int u = 0; u < S::kUnroll; ++u) loaded[u] = work.load(first + u * kSpan, S::kVec);
#pragma unroll
    for (int u = 0; u < S::kUnroll; ++u) work.finish(first + u * kSpan, S::kVec, loaded[u]);
    return;
  }
  static_assert(S::kPartial || !kTogether);
  const int ahead = kTogether ? threadIdx.x % 32 * S::kVec : 0;  // lane 0 decides for its warp
#pragma unroll 1
  for (i64 i = first; i - ahead < size; i += kSpan) {
    const int count = !S::kPartial || i + S::kVec <= size ? S::kVec : static_cast<int>(size - i);
    work.finish(i, count, work.load(i, count));
  }
}

}  // namespace kf
