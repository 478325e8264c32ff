// What the row-norm kernels share: row addressing, in 64 bits, and the factor made of weight and offset.
//
// With S::kGrouped a row of the tensors is one of several groups of a sample's columns, and a norm by itself. A kernel then
// counts samples; blockIdx.y says which of the groups is its own, with parameters of its own.
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

// The row of the tensors that is a sample's of this block's group.
template <class S, class Args> __device__ i64 row_of_sample(const Args& args, i64 sample) {
  if constexpr (S::kGrouped) return sample * args.groups + blockIdx.y;
  else return sample;
}

// Where the columns of this block's group begin among those of all groups, in parameters and their gradients.
template <class S> __device__ i64 first_of_group() {
  if constexpr (S::kGrouped) return static_cast<i64>(blockIdx.y) * S::kCols;
  else return 0;
}

// The vector at column `col` of a row of a tensor; of an absent one, nothing.
template <class S, int kAlign, class T> __device__ Pack<T, S::kVec> load_row(const T* row, int col) {
  if constexpr (kPresent<T>) return load_cols<kAlign, S::kVec, S::kCols, Place<S>::kCovers>(row, col);
  else return {};
}

// Of weight or bias.
template <class S, class T> __device__ Pack<T, S::kVec> load_parameter(const void* p, int col) {
  return load_row<S, S::kAlignWeight>(static_cast<const T*>(p) + first_of_group<S>(), col);
}

// The factor of n: weight_offset + weight, the addition compiled in only where there is an offset.
template <class S, class Weight, int kVec, class A>
__device__ void widen_weight(const Pack<Weight, kVec>& pack, double offset, A (&w)[kVec]) {
  widen_pack(pack, w);
  if constexpr (S::kOffset) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) w[e] += static_cast<A>(offset);
  }
}

}  // namespace kf
