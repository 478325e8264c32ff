// y = softmax(scale * x + mask) over rows of run-time length, causal or not, or its logarithm: the policy (row_executors.cuh).
//
// A warp takes the maximum m of its logits l = scale * x + mask, and the sum s of e^(l - m). The row's maximum is M, its
// sum S the sum of s e^(m - M). Then y = e^(l - M) / S, of a row in registers e^(l - m) * (e^(m - M) / S). Memory: one
// read of x and mask, one write of y; causal rows read only kept columns. A streamed row's mask is read again.
//
// The logarithm is (l - M) - log(S). What is zero here is -inf there.
//
// With a mask or causal, a row of -inf gives zeros: m counts as 0 and S as 1. Left out elements are zero, even beside
// NaN, because backward recognises them by that. NaN makes S NaN, so only such rows look for left out elements.
#pragma once

#include "math.cuh"
#include "row_executors.cuh"
#include "shared/reduce_args.h"
#include "sums.cuh"
#include "exponentials.cuh"

namespace kf {

// v * factor / by: in float one product, in double exactly, because nothing hides its errors.
template <class A> struct Quotient;
template <> struct Quotient<float> {
  float ratio;
  __device__ Quotient(float factor, float by) : ratio(factor / by) {}
  __device__ float operator()(float v) const { return v * ratio; }
};
template <> struct Quotient<double> {
  double factor, by;
  __device__ double operator()(double v) const { return v * factor / by; }
};

// y of an element that is left out, in the type of `zero`.
template <class S, class A> __device__ A nothing(A zero) {
  if constexpr (S::kLog) return negative_infinity(zero);
  else return zero;
}

template <class S> struct Softmax {
  using A = typename S::Acc;
  using X = typename S::X;
  using MaskType = typename S::MaskType;
  using Args = SoftmaxArgs;
  using First = X;
  using Second = absent;
  static constexpr bool kLimited = S::kCausal;
  static constexpr int kVec = S::kVec, kAlignFirst = S::kAlignX, kAlignSecond = 1;
  static constexpr bool kBoolean = kPresent<MaskType> && sizeof(MaskType) == sizeof(b8);
  static constexpr bool kAdditive = kPresent<MaskType> && !kBoolean;
  static constexpr bool kMasked = kPresent<MaskType> || S::kCausal;
  static constexpr bool kLeavesOut = kBoolean || S::kCausal;
  struct Loaded {
    Pack<X, kVec> x;
    Pack<MaskType, kVec> mask;
  };
  struct Held {
    A v[kVec];  // logits, then exponentials; for the logarithm logits throughout
  };
  struct Finish {
    Quotient<A> quotient;
    A sum;
  };
  // For fp16 and bf16 the quotient is part of the exponent, which saves a product. Beside an added mask it is not: if that
  // has a gradient, training computes such rows in the mask's fp32, and must give the bits of inference.
  static constexpr bool kRough = sizeof(X) == 2 && sizeof(A) == 4 && !kAdditive;
  struct Anew : Finish {
    A shift, exponent;  // the exponent is log2 of the quotient or, for the logarithm, log(S)
  };

  const X* first;
  const absent* second = nullptr;
  const MaskType* mask = nullptr;
  X* y;
  int kept;  // columns from here on are -inf
  A scale;

  __device__ Softmax(const SoftmaxArgs& args, i64 row)
      : first(static_cast<const X*>(args.x) + row_offset<S::kStridedX, true>(args.x_rows, row)),
        y(static_cast<X*>(args.y) + row * args.cols), kept(static_cast<int>(args.cols)), scale(static_cast<A>(args.scale)) {
    if constexpr (kPresent<MaskType>)
      mask = static_cast<const MaskType*>(args.mask) + row_offset<S::kStridedMask, true>(args.mask_rows, row);
    if constexpr (S::kCausal) {
      const i64 place =
          row <= 0xffffffffll ? static_cast<unsigned>(row) % static_cast<unsigned>(args.causal_rows) : row % args.causal_rows;
      if (place + 1 < kept) kept = static_cast<int>(place) + 1;
    }
  }

  __device__ int limit(int end) const { return S::kCausal ? min(end, kept) : end; }

  __device__ Loaded load(int col) const {
    Loaded loaded;
    loaded.x = kf::load<S::kAlignX, kVec>(first + col);
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

  // Logits.
  __device__ void hold(int col, int limit, const Loaded& loaded, Held& held, bool inside = false) const {
    if (inside || col < limit) {
      widen_pack(loaded.x, held.v);
      if constexpr (S::kScaled) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) held.v[e] = product(held.v[e], scale);
      }
      if constexpr (kAdditive) {
        A added[kVec];
        widen_pack(loaded.mask, added);
#pragma unroll
        for (int e = 0; e < kVec; ++e) held.v[e] += added[e];
      }
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        if constexpr (kBoolean) held.v[e] = loaded.mask.v[e].bits ? held.v[e] : negative_infinity(A(0));
        if constexpr (S::kCausal) held.v[e] = col + e < kept ? held.v[e] : negative_infinity(A(0));
      }
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) held.v[e] = negative_infinity(A(0));
    }
  }

  // The number that is subtracted from logits. It is 0 if all are -inf.
  __device__ static A shift_of(A max) { return max == negative_infinity(A(0)) ? A(0) : max; }

  template <class At, int kVectors> __device__ static Pair<A> of_warp(const At&, int, Held (&held)[kVectors]) {
    A max = negative_infinity(A(0));
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int e = 0; e < kVec; ++e) max = Larger()(max, held[i].v[e]);
    max = combine_lanes<S::kLanes>(max, Larger());
    const A shift = shift_of(max);
    A sums[kVec] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        if constexpr (S::kLog) {
          sums[e] += exp_below(held[i].v[e], shift);
        } else {
          held[i].v[e] = exp_below(held[i].v[e], shift);
          sums[e] += held[i].v[e];
        }
      }
    return {max, sum_lanes<S::kLanes>(sum_elements(sums))};
  }

  // The maximum of the vectors so far, and the sum of their exponentials.
  struct Running {
    A max = negative_infinity(A(0)), sum = 0;

    __device__ void raise(A other) {
      const A raised = Larger()(max, other);
      if (raised == max) return;
      sum *= exp_below(max, shift_of(raised));
      max = raised;
    }
    __device__ void add(const Held& held) {
      A most = held.v[0];
#pragma unroll
      for (int e = 1; e < kVec; ++e) most = Larger()(most, held.v[e]);
      raise(most);
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum += exp_below(held.v[e], shift_of(max));
    }
    __device__ Pair<A> of_warp() {
      raise(combine_lanes<S::kLanes>(max, Larger()));
      return {max, sum_lanes<S::kLanes>(sum)};
    }
  };

  __device__ static Pair<A> join(int lane, const A (*slots)[2]) {
    const A max = Exchange<S>::all(lane, [&](int w) { return slots[w][0]; }, Larger(), negative_infinity(A(0)));
    const A shift = shift_of(max);
    return {max, Exchange<S>::sum(lane, [&](int w) { return slots[w][1] * exp_below(slots[w][0], shift); })};
  }

  __device__ static Finish share(const Pair<A>& whole, A factor = 1) {
    return {Quotient<A>{factor, kMasked && whole.second == A(0) ? A(1) : whole.second}, whole.second};
  }
  __device__ static auto finish(const Pair<A>& whole) {
    if constexpr (S::kLog) return finish_anew(whole);
    else return share(whole);
  }
  __device__ static auto finish(const Pair<A>& own, const Pair<A>& whole) {
    if constexpr (S::kLog) return finish_anew(whole);
    else return share(whole, exp_below(own.first, shift_of(whole.first)));
  }
  __device__ static Anew finish_anew(const Pair<A>& whole) {
    Anew anew{share(whole), shift_of(whole.first), 0};
    if constexpr (S::kLog) anew.exponent = log(kMasked && whole.second == A(0) ? A(1) : whole.second);
    else if constexpr (kRough) anew.exponent = log2f(anew.quotient.ratio);
    return anew;
  }

  // Exponentials.
  __device__ void write(int col, Held& held, const Finish& finish) const {
#pragma unroll
    for (int e = 0; e < kVec; ++e) held.v[e] = finish.quotient(held.v[e]);
    put(col, held, finish.sum);
  }
  __device__ void write(int col, Held& held, const Anew& anew) const { write_anew(col, held, anew); }
  // Logits.
  __device__ void write_anew(int col, Held& held, const Anew& anew) const {
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if constexpr (S::kLog) held.v[e] = held.v[e] - anew.shift - anew.exponent;
      else if constexpr (kRough) held.v[e] = Hardware::exp2(fused(held.v[e] - anew.shift, kLog2E, anew.exponent));
      else held.v[e] = anew.quotient(exp_below(held.v[e], anew.shift));
    }
    put(col, held, anew.sum);
  }

 private:
  __device__ void put(int col, Held& held, A sum) const {
    if constexpr (kLeavesOut)
      if (sum != sum) {
#pragma unroll
        for (int e = 0; e < kVec; ++e)
          if (is_left_out(col + e)) held.v[e] = nothing<S>(A(0));
      }
    store<S::kAlignY>(y + col, narrow_pack<X>(held.v));
  }
  __device__ bool is_left_out(int col) const {
    if constexpr (kBoolean)
      if (!mask[S::kMaskRepeats ? 0 : col].bits) return true;
    return S::kCausal && col >= kept;
  }
};

template <class S> __device__ void softmax(const SoftmaxArgs& args) { run_rows<Softmax, S>(args); }

// Backward: dx = scale * (dy - sum(dy * y)) * y. Left out elements have y = 0, so dx = 0; with kLeavesOut even in a row with
// NaN. Memory: one read of dy and y, one write of dx.
//
// For the logarithm it is dx = scale * (dy - sum(dy) * e^y). Left out elements have y = -inf, and their dy counts for nothing.
template <class S> struct SoftmaxBwd {
  using A = typename S::Acc;
  using DX = typename S::DX;
  using Args = SoftmaxBwdArgs;
  using First = typename S::DY;
  using Second = typename S::Y;
  static constexpr bool kLimited = false;
  static constexpr int kVec = S::kVec, kAlignFirst = S::kAlignDY, kAlignSecond = S::kAlignY;
  struct Loaded {
    Pack<First, kVec> dy;
    Pack<Second, kVec> y;
  };
  using Held = Loaded;

  const First* first;
  const Second* second;
  DX* dx;
  A scale;

  __device__ SoftmaxBwd(const SoftmaxBwdArgs& args, i64 row)
      : first(static_cast<const First*>(args.dy) + row_offset<S::kStridedDY, true>(args.dy_rows, row)),
        second(static_cast<const Second*>(args.y) + row_offset<S::kStridedY, true>(args.y_rows, row)),
        dx(static_cast<DX*>(args.dx) + row * args.cols), scale(static_cast<A>(args.scale)) {}

  __device__ static int limit(int end) { return end; }
  __device__ Loaded load(int col) const {
    return {kf::load<S::kAlignDY, kVec>(first + col), kf::load<S::kAlignY, kVec>(second + col)};
  }
  __device__ static void hold(int, int, const Loaded& loaded, Held& held, bool = false) { held = loaded; }

  __device__ static void add(const Held& held, A (&sums)[kVec]) {
    A g[kVec], p[kVec];
    widen_pack(held.dy, g);
    widen_pack(held.y, p);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if constexpr (S::kLog) sums[e] += S::kLeavesOut && p[e] == nothing<S>(A(0)) ? A(0) : g[e];
      else sums[e] = fused(g[e], p[e], sums[e]);
    }
  }
  template <class At, int kVectors> __device__ static Pair<A> of_warp(const At& at, int limit, const Held (&held)[kVectors]) {
    A sums[kVec] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (at.col(i) < limit) add(held[i], sums);
    return {sum_lanes<S::kLanes>(sum_elements(sums)), 0};
  }
  struct Running {
    A sums[kVec] = {};

    __device__ void add(const Held& held) { SoftmaxBwd::add(held, sums); }
    __device__ Pair<A> of_warp() { return {sum_lanes<S::kLanes>(sum_elements(sums)), 0}; }
  };

  __device__ static Pair<A> join(int lane, const A (*slots)[2]) {
    return {Exchange<S>::sum(lane, [&](int w) { return slots[w][0]; }), 0};
  }
  __device__ static A finish(const Pair<A>& whole) { return whole.first; }
  __device__ static A finish_anew(const Pair<A>& whole) { return whole.first; }
  __device__ static A finish(const Pair<A>&, const Pair<A>& whole) { return whole.first; }

  __device__ void write(int col, const Held& held, A sum) const {
    A g[kVec], p[kVec];
    widen_pack(held.dy, g);
    widen_pack(held.y, p);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if constexpr (S::kLog) g[e] = scale * (g[e] - sum * exp_below(p[e], A(0)));
      else g[e] = scale * ((g[e] - sum) * p[e]);
      if constexpr (S::kLeavesOut) g[e] = p[e] == nothing<S>(A(0)) ? A(0) : g[e];
    }
    store<S::kAlignDX>(dx + col, narrow_pack<DX>(g));
  }
  __device__ void write_anew(int col, const Held& held, A sum) const { write(col, held, sum); }
};

template <class S> __device__ void softmax(const SoftmaxBwdArgs& args) { run_rows<SoftmaxBwd, S>(args); }

}  // namespace kf
