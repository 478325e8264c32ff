// Softmax of rows that exceed a block's registers: one pass for maximum and sum together, and one to write. Memory: two
// reads of x and mask, the second perhaps from the L2 cache, and one write of y.
#pragma once

#include "softmax.cuh"

namespace kf {

// A maximum, and the sum of e^(l - shift(maximum)) so far.
template <class S> struct Running {
  using A = typename S::Acc;
  A max = negative_infinity(A(0)), sum = 0;

  __device__ void raise(A other) {
    const A raised = larger(max, other);
    if (raised == max) return;
    sum *= exp_below(max, Logits<S>::shift(raised));
    max = raised;
  }
  __device__ void add(const A (&l)[S::kVec]) {
    A most = l[0];
#pragma unroll
    for (int e = 1; e < S::kVec; ++e) most = larger(most, l[e]);
    raise(most);
#pragma unroll
    for (int e = 0; e < S::kVec; ++e) sum += exp_below(l[e], Logits<S>::shift(max));
  }
};

// Calls `use(col, logits)` for the thread's vectors that begin in a kept column.
template <class S, class Use> __device__ void over_logits(const Logits<S>& logits, Use&& use) {
  using A = typename S::Acc;
  batched<S::kUnroll, false>(
      static_cast<int>(threadIdx.x) * S::kVec, logits.kept, S::kThreads * S::kVec, [&](int col) { return logits.load(col); },
      [&](int col, const typename Logits<S>::Loaded& loaded) {
        A l[S::kVec];
        logits.compute(col, loaded, l);
        use(col, l);
      });
}

template <class S> __device__ void softmax_long(const SoftmaxArgs& args) {
  using A = typename S::Acc;
  using X = typename S::X;
  constexpr int kVec = S::kVec, kSpan = S::kThreads * kVec;
  __shared__ A slots[2][S::kThreads / 32];
  wait_for_previous_kernel();
  const Logits<S> logits(args, blockIdx.x);
  Running<S> running;
  over_logits<S>(logits, [&](int, const A(&l)[kVec]) { running.add(l); });
  running.raise(max_of_threads<S::kThreads>(running.max, slots[0]));
  const A shift = Logits<S>::shift(running.max);
  const A sum = sum_of_threads<S::kThreads>(running.sum, slots[1]);
  const Divisor<A> divisor = Logits<S>::divisor(sum);
  X* y = static_cast<X*>(args.y) + blockIdx.x * args.cols;
  over_logits<S>(logits, [&](int col, const A(&l)[kVec]) {
    A v[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] = exp_below(l[e], shift);
    logits.divide(col, divisor, sum, v);
    store<S::kAlignY>(y + col, narrow_pack<X>(v));
  });
  if constexpr (S::kCausal) {
    A v[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] = A(0);
    // The thread's first vector after the kept ones.
    const int skipped = (logits.kept - static_cast<int>(threadIdx.x) * kVec + kSpan - 1) / kSpan;
    for (int col = threadIdx.x * kVec + (skipped > 0 ? skipped : 0) * kSpan; col < args.cols; col += kSpan)
      store<S::kAlignY>(y + col, narrow_pack<X>(v));
  }
}

}  // namespace kf
