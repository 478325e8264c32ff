// Row reductions: sums over dimensions, of squares or of absolute values.
#pragma once

#include <string_view>

#include "operators.h"

namespace kf {

// out[o][i] = (sum over r of map(in[o][r][i])) / divisor. `in` has three strides, in elements; out is contiguous, (outer,
// inner), of any dtype. Sums are in the accumulator type of `in`. Their order depends only on `reduced` for innermost
// dimensions, on the shape for others.
struct ReduceCall {
  Map map;
  const void* in;
  at::ScalarType in_type;
  int64_t outer, reduced, inner;
  int64_t outer_stride, reduced_stride, inner_stride;
  double divisor;
  c10::Device device;
};
using ReduceKernel = void(const ReduceCall& call, Tensor& out);

ReduceKernel reduce_cpu, reduce_cuda;

// The operator's arguments, as in its schema (operators/schemas.py).
struct ReduceVerbCall {
  const Tensor& input;
  at::IntArrayRef dim;
  bool keepdim;
  std::string_view kind;
  OptionalDtype dtype;
};
inline constexpr auto reduce_call =
    &made<ReduceVerbCall, const Tensor&, at::IntArrayRef, bool, std::string_view, OptionalDtype>;
template <class F> auto with_arguments(const ReduceVerbCall& c, F&& f) { return f(c.input, c.dim, c.keepdim, c.kind, c.dtype); }

// Whether the kernels can serve a call; else the definition in backends/eager does, or says what is wrong.
bool accepts(const ReduceVerbCall& call);
Tensor reference(const ReduceVerbCall& call);

// The operator on a device.
Tensor reduce(const Backend& backend, const ReduceVerbCall& call);

// `input`, which has elements, summed to a shape that broadcasts to its own; contiguous.
Tensor sum_to(const Backend& backend, const Tensor& input, at::IntArrayRef shape, at::ScalarType dtype);

}  // namespace kf
