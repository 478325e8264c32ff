// Pointwise chains: y = dropout(scale * f(a, b)). The operators check, promote, broadcast, allocate and choose. The kernels
// fill at least one allocated element, and convert dtypes themselves: no tensor is cast as a whole.
#pragma once

#include <ATen/TensorIterator.h>

#include <array>
#include <string_view>
#include <tuple>

#include "operators.h"

namespace kf {

// Operands of `iter`: y; a; b unless `combine` is kFirst. An element's dropout position is its offset in y. Bits need
// iterations that are not cut into parts: below 2^31 bytes, or operands in one order.
using PointwiseKernel = void(const Chain& chain, at::TensorIteratorBase& iter);

// Gradients in y's shape. Operands of `iter`: the wanted ones of da and db, then dy, a and, unless `combine` is kFirst, b. An
// element's position is its offset in dy, which is laid out like y. With bits, dy also stands for the unread a, and the
// gradient is laid out like y.
using PointwiseBwdKernel = void(const Chain& chain, at::TensorIteratorBase& iter, std::array<bool, 2> wants);

// The same for a row b under all rows of a: dy and a are contiguous matrices of `rows` times `cols`, b and db contiguous rows.
// db is the sum over rows, in an order that the shape alone decides. da is undefined if unwanted.
struct ColumnCall {
  const Chain& chain;
  const Tensor& dy;
  const Tensor& a;
  const Tensor& b;
  int64_t rows, cols;
};
using PointwiseBwdColumnsKernel = void(const ColumnCall& call, Tensor& da, Tensor& db);

PointwiseKernel pointwise_cpu, pointwise_cuda;
PointwiseBwdKernel pointwise_bwd_cpu, pointwise_bwd_cuda;
PointwiseBwdColumnsKernel pointwise_bwd_columns_cpu, pointwise_bwd_columns_cuda;

// The operators' arguments, as in their schemas (operators/schemas.py).
struct PointwiseCall {
  const Tensor& a;
  const OptionalTensor& b;
  std::string_view combine, activation;
  double scale, dropout_p;
  const OptionalTensor& seed;
};
inline constexpr auto pointwise_call = &made<PointwiseCall, const Tensor&, const OptionalTensor&, std::string_view,
                                             std::string_view, double, double, const OptionalTensor&>;
template <class F> auto with_arguments(const PointwiseCall& c, F&& f) {
  return f(c.a, c.b, c.combine, c.activation, c.scale, c.dropout_p, c.seed);
}

// f(every tensor of the call, and backward's others).
template <class F, class... Others> auto with_tensors(const PointwiseCall& c, F&& f, const Others&... others) {
  return f(c.a, c.b, c.seed, others...);
}

// Whether the kernels can serve a call. Other calls go to the definition in backends/eager, which serves them or says what is
// wrong.
bool accepts(const PointwiseCall& call);
Tensor reference(const PointwiseCall& call);

// Whether its device has kernels that write and read the bits of a call.
bool has_bits(const PointwiseCall& call);

// The operator on a device. Fills `bits`, if given, for an activation whose slope has two values.
Tensor pointwise(const Backend& backend, const PointwiseCall& call, Tensor* bits = nullptr);

// Its backward; unwanted gradients are undefined. The a of a chain of one may be bits, of type kByte: dy's dimensions are then
// in y's memory order. The second function finds the device, and goes through the dispatcher if others want to see the call.
using PointwiseGradients = std::tuple<Tensor, Tensor>;
PointwiseGradients pointwise_bwd(const Backend& backend, const Tensor& dy, const PointwiseCall& call,
                                 std::array<bool, 2> wants);
PointwiseGradients pointwise_bwd(const Tensor& dy, const PointwiseCall& call, std::array<bool, 2> wants);

}  // namespace kf
