// Shared by both directions of softmax: a row of run-time length, cut into vectors that kLanes threads take in turn,
// and sums and maxima over them. The length alone decides the order of sums.
#pragma once

#include "math.cuh"
#include "rows.cuh"
#include "sums.cuh"

namespace kf {

__device__ inline float larger(float a, float b) { return fmaxf(a, b); }  // NaN loses
__device__ inline double larger(double a, double b) { return fmax(a, b); }
__device__ inline float negative_infinity(float) { return __int_as_float(0xff800000); }
__device__ inline double negative_infinity(double) { return __longlong_as_double(0xfff0000000000000ll); }

// e^(v - max). A product with log2(e) could overflow for a mask of the lowest finite number.
__device__ inline float exp_below(float v, float max) { return Hardware::exp2((v - max) * 1.44269504f); }
__device__ inline double exp_below(double v, double max) { return exp(v - max); }

// Divides a row: in float by a product, in double exactly, because nothing hides its errors.
template <class A> struct Divisor;
template <> struct Divisor<float> {
  float inverse;
  __device__ explicit Divisor(float by) : inverse(1 / by) {}
  __device__ float operator()(float v) const { return v * inverse; }
};
template <> struct Divisor<double> {
  double by;
  __device__ explicit Divisor(double by) : by(by) {}
  __device__ double operator()(double v) const { return v / by; }
};

// Combines a row's threads, for each of them. `slots` in shared memory has one per warp.
template <int kLanes, class A, class Combine> __device__ A combine_threads(A v, A* slots, Combine&& combine) {
  constexpr int kWarps = kLanes / 32;
#pragma unroll
  for (int offset = 1; offset < (kLanes < 32 ? kLanes : 32); offset *= 2)
    v = combine(v, __shfl_xor_sync(0xffffffffu, v, offset));
  if constexpr (kWarps > 1) {
    static_assert((kWarps & (kWarps - 1)) == 0);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = v;
    __syncthreads();
    v = slots[threadIdx.x % kWarps];
#pragma unroll
    for (int offset = 1; offset < kWarps; offset *= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, offset));
  }
  return v;
}

template <int kLanes, class A> __device__ A sum_of_threads(A v, A* slots) {
  return combine_threads<kLanes>(v, slots, [](A a, A b) { return a + b; });
}
template <int kLanes, class A> __device__ A max_of_threads(A v, A* slots) {
  return combine_threads<kLanes>(v, slots, [](A a, A b) { return larger(a, b); });
}

// row_offset of rows.cuh, with 32-bit divisions if they suffice.
template <bool kStrided> __device__ i64 offset_of_row(const RowLayout& layout, i64 row) {
  if constexpr (!kStrided) return row_offset<false>(layout, row);
  if (row > 0xffffffffll) return row_offset<true>(layout, row);
  const auto inner = static_cast<unsigned>(layout.inner), middle = static_cast<unsigned>(layout.middle);
  const unsigned outer = static_cast<unsigned>(row) / inner;
  return outer / middle * layout.stride[0] + outer % middle * layout.stride[1] +
         (static_cast<unsigned>(row) - outer * inner) * layout.stride[2];
}

}  // namespace kf
