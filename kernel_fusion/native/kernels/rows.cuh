// Row addressing in 64 bits, and the factor made of weight and offset.
//
// With S::kGrouped, groups of rows have their own weight, bias and residual gate (RowGroups): kernels count samples,
// blockIdx.y names the group.
#pragma once

#include "shared/row_norm_args.h"
#include "tree.cuh"
#include "vectors.cuh"

namespace kf {

template <bool kStrided> __device__ i64 row_offset(const RowLayout& layout, i64 row) {
  if constexpr (!kStrided) return row * layout.stride[2];
  const i64 outer = row / layout.inner;
  return outer / layout.middle * layout.stride[0] + outer % layout.middle * layout.stride[1] +
         row % layout.inner * layout.stride[2];
}

// The beginning of this block's group of `each` things; 0 without groups.
template <class S, class Args> __device__ i64 group_offset(const Args& args, i64 each) {
  if constexpr (S::kGrouped) return (args.groups.first + blockIdx.y) * each;
  else return 0;
}

// The row of a sample of this block's group.
template <class S, class Args> __device__ i64 row_of_sample(const Args& args, i64 sample) {
  if constexpr (S::kGrouped) return sample * args.groups.step + group_offset<S>(args, args.groups.inner);
  else return sample;
}

// Nothing for an absent tensor.
template <class S, int kAlign, class T> __device__ Pack<T, S::kVec> load_row(const T* row, int col) {
  if constexpr (kPresent<T>) return load_cols<kAlign, S::kVec, S::kCols, Place<S>::kCovers>(row, col);
  else return {};
}

// The weight of this block's group; likewise bias and gate.
template <class S, class Args> __device__ const typename S::Weight* weight_of(const Args& args) {
  return static_cast<const typename S::Weight*>(args.weight) + group_offset<S>(args, args.groups.weight_pitch);
}
template <class S, class Args> __device__ const typename S::Bias* bias_of(const Args& args) {
  return static_cast<const typename S::Bias*>(args.bias) + group_offset<S>(args, args.groups.bias_pitch);
}

template <class S, class Args> __device__ auto load_weight(const Args& args, int col) {
  return load_row<S, S::kAlignWeight>(weight_of<S>(args), col);
}
template <class S, class Args> __device__ auto load_bias(const Args& args, int col) {
  return load_row<S, S::kAlignWeight>(bias_of<S>(args), col);
}
template <class S, class Args> __device__ auto load_gate(const Args& args, int col) {
  using Gate = typename S::ResidualGate;
  const auto* p = static_cast<const Gate*>(args.gate) + group_offset<S>(args, args.groups.gate_pitch);
  return load_row<S, S::kAlignWeight>(p, col);
}

// Starts to bring a vector to L2.
template <class S, class T> __device__ void prefetch_row(const T* row, int col) {
  if constexpr (kPresent<T>)
    if (Place<S>::kCovers || col < S::kCols) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + col));
}

// weight_offset + weight; the addition is compiled in with an offset.
template <class S, class Weight, int kVec, class A>
__device__ void widen_weight(const Pack<Weight, kVec>& pack, double offset, A (&w)[kVec]) {
  widen_pack(pack, w);
  if constexpr (S::kOffset) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) w[e] += static_cast<A>(offset);
  }
}

}  // namespace kf
