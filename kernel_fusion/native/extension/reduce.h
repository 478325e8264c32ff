// Row reductions: sums over dimensions, of squares or of absolute values.
#pragma once

#include "backends.h"

namespace kf {

// out[o][i] = (sum over r of map(in[o][r][i])) / divisor. `in` has three strides, in elements; out is contiguous, (outer,
// inner), of any dtype. Sums are in the accumulator type of `in`. Their order depends only on `reduced` for innermost
// dimensions, on the shape for others.
struct Reduction {
  Map map;
  const void* in;
  at::ScalarType in_type;
  int64_t outer, reduced, inner;
  int64_t outer_stride, reduced_stride, inner_stride;
  double divisor;
  c10::Device device;
};
void reduce_cpu(const Reduction& call, Tensor& out);
void reduce_cuda(const Reduction& call, Tensor& out);

// `input`, which has elements, summed to a shape that broadcasts to its own; contiguous.
Tensor sum_to(const Backend& backend, const Tensor& input, at::IntArrayRef shape, at::ScalarType dtype);

}  // namespace kf
