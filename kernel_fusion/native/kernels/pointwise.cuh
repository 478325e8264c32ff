// y = dropout(scale * f(a, b)) over any strides. The kernel reads a and b once and writes y once. In training it also
// writes a bit for each element, in the order of y, if backward needs no more than that (Chain::bits).
#pragma once

#include "operands.cuh"
#include "pointwise_chain.cuh"

namespace kf {

template <class S> struct PointwiseWork {
  using A = typename S::Acc;
  using Y = typename S::Y;
  using OutY = Operand<S, Y, S::kModeY, S::kAlignY, 0>;
  using OutBits = Operand<S, typename S::Bits, S::kModeBits, S::kAlignBits, 1>;
  using InA = Operand<S, typename S::A, S::kModeA, S::kAlignA, 3>;
  using InB = Operand<S, typename S::B, S::kModeB, S::kAlignB, 4>;
  static constexpr int kVec = S::kVec;
  struct Loaded {
    typename InA::Vector a;
    typename InB::Vector b;
  };

  const PointwiseArgs& args;
  Chain<S, Y> chain;

  __device__ explicit PointwiseWork(const PointwiseArgs& args) : args(args), chain(args) {}
  __device__ Loaded load(i64 i, int count) const { return {InA::load(args, i, count), InB::load(args, i, count)}; }

  __device__ void finish(i64 i, int count, const Loaded& loaded) const {
    A a[kVec], b[kVec] = {};
    widen_pack(loaded.a, a);
    if constexpr (kPresent<typename S::B>) widen_pack(loaded.b, b);
    if constexpr (kPresent<typename S::Bits>) OutBits::store(args, i, chain.bits(a, b));
#pragma unroll
    for (int e = 0; e < kVec; ++e) a[e] = chain.value(a[e], b[e]);
    const i64 first = OutY::offset(args, i);
    chain.scale_and_drop([&](int e) { return args.position + OutY::offset_within(args, i, first, e); }, a);
    OutY::store(args, i, count, narrow_pack<Y>(a));
  }
};

template <class S> __device__ void pointwise(const PointwiseArgs& args) {
  wait_for_previous_kernel();
  over_vectors<S, kPresent<typename S::Bits>>(PointwiseWork<S>(args), args.size);
}

}  // namespace kf
