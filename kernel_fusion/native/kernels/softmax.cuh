// y = softmax(scale * x + mask) over rows of run-time length, causal or not.
//
// The logits l = scale * x + mask are computed once and stay in registers. Their maximum m and the sum s of e^(l - m)
// go through the row's threads, then y = e^(l - m) / s is written. Memory: one read of x and mask, one write of y;
// causal rows read only kept columns. Longer rows are read twice (softmax_long.cuh).
//
// With a mask or causal, a row of -inf gives zeros: m counts as 0 and s as 1. Left out elements are zero, even beside
// NaN, because backward recognises them by that. NaN makes s NaN, so only such rows look for left out elements.
#pragma once

#include "shared/reduce_args.h"
#include "softmax_rows.cuh"

namespace kf {

// A row's logits.
template <class S> struct Logits {
  using A = typename S::Acc;
  using X = typename S::X;
  using MaskType = typename S::MaskType;
  static constexpr int kVec = S::kVec;
  static constexpr bool kBoolean = kPresent<MaskType> && sizeof(MaskType) == sizeof(b8);
  static constexpr bool kAdditive = kPresent<MaskType> && !kBoolean;
  static constexpr bool kMasked = kPresent<MaskType> || S::kCausal;
  static constexpr bool kLeavesOut = kBoolean || S::kCausal;
  struct Loaded {
    Pack<X, kVec> x;
    Pack<MaskType, kVec> mask;
  };

  const X* x;
  const MaskType* mask = nullptr;
  int kept;  // columns from here on are -inf
  A scale;

  __device__ Logits(const SoftmaxArgs& args, i64 row)
      : x(static_cast<const X*>(args.x) + offset_of_row<S::kStridedX>(args.x_rows, row)), kept(static_cast<int>(args.cols)),
        scale(static_cast<A>(args.scale)) {
    if constexpr (kPresent<MaskType>)
      mask = static_cast<const MaskType*>(args.mask) + offset_of_row<S::kStridedMask>(args.mask_rows, row);
    if constexpr (S::kCausal) {
      const i64 place =
          row <= 0xffffffffll ? static_cast<unsigned>(row) % static_cast<unsigned>(args.causal_rows) : row % args.causal_rows;
      if (place + 1 < kept) kept = static_cast<int>(place) + 1;
    }
  }

  // `col` is kept.
  __device__ Loaded load(int col) const {
    Loaded loaded;
    loaded.x = kf::load<S::kAlignX, kVec>(x + col);
    if constexpr (kPresent<MaskType>) {
      constexpr bool kWhole = kAdditive || (kVec > 1 && S::kAlignMask >= kVec);  // booleans come in one piece
      if constexpr (!S::kMaskRepeats && kWhole) {
        loaded.mask = kf::load<S::kAlignMask, kVec>(mask + col);
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) loaded.mask.v[e] = mask[S::kMaskRepeats ? 0 : col + e];
      }
    }
    return loaded;
  }

  __device__ void compute(int col, const Loaded& loaded, A (&l)[kVec]) const {
    widen_pack(loaded.x, l);
#pragma unroll
    for (int e = 0; e < kVec; ++e) l[e] = product(l[e], scale);
    if constexpr (kAdditive) {
      A added[kVec];
      widen_pack(loaded.mask, added);
#pragma unroll
      for (int e = 0; e < kVec; ++e) l[e] += added[e];
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if constexpr (kBoolean) l[e] = loaded.mask.v[e].bits ? l[e] : negative_infinity(A(0));
      if constexpr (S::kCausal) l[e] = col + e < kept ? l[e] : negative_infinity(A(0));
    }
  }

  // The number subtracted: nothing if all are -inf.
  __device__ static A shift(A max) { return max == negative_infinity(A(0)) ? A(0) : max; }
  // The exponentials' divisor; a fully masked row has only zeros.
  __device__ static Divisor<A> divisor(A sum) { return Divisor<A>(kMasked && sum == A(0) ? A(1) : sum); }

  // The quotients of exponentials. `col` is in the row.
  __device__ void divide(int col, const Divisor<A>& divisor, A sum, A (&v)[kVec]) const {
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] = divisor(v[e]);
    if constexpr (kLeavesOut) {
      if (sum == sum) return;
#pragma unroll
      for (int e = 0; e < kVec; ++e)
        if (is_left_out(col + e)) v[e] = 0;
    }
  }

 private:
  __device__ bool is_left_out(int col) const {
    if constexpr (kBoolean)
      if (!mask[S::kMaskRepeats ? 0 : col].bits) return true;
    return S::kCausal && col >= kept;
  }
};

template <class S> __device__ void softmax(const SoftmaxArgs& args) {
  using A = typename S::Acc;
  using X = typename S::X;
  constexpr int kVec = S::kVec, kLanes = S::kLanes, kRows = S::kThreads / kLanes;
  __shared__ A slots[2][kLanes > 32 ? kLanes / 32 : 1];
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kLanes;
  i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  const bool inside = row < args.rows;  // else the last row again: all lanes of a warp take part
  row = inside ? row : args.rows - 1;
  const Logits<S> logits(args, row);
  const auto col_of = [&](int i) { return (i * kLanes + lane) * kVec; };

  typename Logits<S>::Loaded loaded[S::kVectors];
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i)
    if (col_of(i) < logits.kept) loaded[i] = logits.load(col_of(i));
  A l[S::kVectors][kVec], max = negative_infinity(A(0));
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i) {
    if (col_of(i) < logits.kept) {
      logits.compute(col_of(i), loaded[i], l[i]);
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) l[i][e] = negative_infinity(A(0));
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) max = larger(max, l[i][e]);
  }
  const A shift = Logits<S>::shift(max_of_threads<kLanes>(max, slots[0]));
  A sums[kVec] = {};
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i)
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      l[i][e] = exp_below(l[i][e], shift);
      sums[e] += l[i][e];
    }
  const A sum = sum_of_threads<kLanes>(sum_elements(sums), slots[1]);
  const Divisor<A> divisor = Logits<S>::divisor(sum);
  X* y = static_cast<X*>(args.y) + row * args.cols;
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i) {
    if (!inside || col_of(i) >= args.cols) continue;
    logits.divide(col_of(i), divisor, sum, l[i]);
    store<S::kAlignY>(y + col_of(i), narrow_pack<X>(l[i]));
  }
}

}  // namespace kf
