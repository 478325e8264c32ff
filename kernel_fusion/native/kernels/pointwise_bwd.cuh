// da and db of y = dropout(scale * f(a, b)), in the shape of y, over any strides. The slope is computed again, and the
// random bits of dropout are drawn again. The kernel reads dy, a and b once and writes da and db once. If forward saved
// bits of the slope (Chain::bits), `a` is these bits and there is no b.
#pragma once

#include "operands.cuh"
#include "pointwise_chain.cuh"

namespace kf {

template <class S> struct PointwiseBwdWork {
  using A = typename S::Acc;
  using DA = typename S::DA;
  using DB = typename S::DB;
  using OutA = Operand<S, DA, S::kModeDA, S::kAlignDA, 0>;
  using OutB = Operand<S, DB, S::kModeDB, S::kAlignDB, 1>;
  using InDY = Operand<S, typename S::DY, S::kModeDY, S::kAlignDY, 2>;
  using InA = Operand<S, typename S::A, S::kModeA, S::kAlignA, 3>;
  using InB = Operand<S, typename S::B, S::kModeB, S::kAlignB, 4>;
  static constexpr int kVec = S::kVec;
  struct Loaded {
    typename InDY::Vector dy;
    typename InA::Vector a;
    typename InB::Vector b;
  };

  const PointwiseArgs& args;
  Chain<S, typename S::Result> chain;

  __device__ explicit PointwiseBwdWork(const PointwiseArgs& args) : args(args), chain(args) {}
  __device__ Loaded load(i64 i, int count) const {
    return {InDY::load(args, i, count), InA::load(args, i, count), InB::load(args, i, count)};
  }

  __device__ void finish(i64 i, int count, const Loaded& loaded) const {
    A g[kVec], a[kVec], b[kVec] = {}, da[kVec], db[kVec];
    widen_pack(loaded.dy, g);
    widen_pack(loaded.a, a);
    if constexpr (kPresent<typename S::B>) widen_pack(loaded.b, b);
    const i64 first = InDY::offset(args, i);
    chain.scale_and_drop([&](int e) { return args.position + InDY::offset_within(args, i, first, e); }, g);
#pragma unroll
    for (int e = 0; e < kVec; ++e) chain.gradients(g[e], a[e], b[e], da[e], db[e]);
    if constexpr (kPresent<DA>) OutA::store(args, i, count, narrow_pack<DA>(da));
    if constexpr (kPresent<DB>) OutB::store(args, i, count, narrow_pack<DB>(db));
  }
};

template <class S> __device__ void pointwise_bwd(const PointwiseArgs& args) {
  wait_for_previous_kernel();
  over_vectors<S>(PointwiseBwdWork<S>(args), args.size);
}

}  // namespace kf
