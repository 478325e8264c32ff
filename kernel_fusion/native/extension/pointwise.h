// Pointwise chains: y = dropout(scale * f(a, b)). The operators check, promote, broadcast, allocate and choose; the kernels
// fill what was allocated, at least one element, and convert between dtypes themselves: no tensor is cast as a whole.
#pragma once

#include <ATen/TensorIterator.h>

#include <array>
#include <string_view>
#include <tuple>

#include "operators.h"

namespace kf {

// Operands of `iter`: y; a; b unless `combine` is kFirst. The position of an element, for dropout, is its offset in y. Bits are
// written of iterations that need not be cut into parts: below 2^31 bytes, or of operands that lie in one order.
using PointwiseKernel = void(const Chain& chain, at::TensorIteratorBase& iter);

// Gradients of the shape of y. Operands of `iter`: first the wanted ones of da and db, then dy, a and, unless `combine` is
// kFirst, b. The position of an element is its offset in dy, which is laid out as y was. Where the chain has bits, dy stands
// for a too, which is not read, and the gradient is laid out as y was.
using PointwiseBwdKernel = void(const Chain& chain, at::TensorIteratorBase& iter, std::array<bool, 2> wants);

// The same where b is a row that was broadcast to all rows of a: dy and a are contiguous matrices of `rows` times `cols`, b
// and db contiguous rows. db is the sum over rows, in an order that the shape alone decides. da is undefined if unwanted.
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

// The arguments of the operators, as their schemas have them (operators/schemas.py).
struct PointwiseCall {
  const Tensor& a;
  const OptionalTensor& b;
  std::string_view combine, activation;
  double scale, dropout_p;
  const OptionalTensor& seed;
};
inline PointwiseCall pointwise_call(const Tensor& a, const OptionalTensor& b, std::string_view combine,
                                    std::string_view activation, double scale, double dropout_p, const OptionalTensor& seed) {
  return {a, b, combine, activation, scale, dropout_p, seed};
}
template <class F> auto with_arguments(const PointwiseCall& c, F&& f) {
  return f(c.a, c.b, c.combine, c.activation, c.scale, c.dropout_p, c.seed);
}

// f(every tensor of the call, and of what else backward has).
template <class F, class... Others> auto with_tensors(const PointwiseCall& c, F&& f, const Others&... others) {
  return f(c.a, c.b, c.seed, others...);
}

// Whether the kernels can serve a call. What they can't serve goes to the definition in backends/eager, which serves it or says
// what is wrong.
bool accepts(const PointwiseCall& call);
Tensor reference(const PointwiseCall& call);

// Whether its device has kernels that write the bits of a call, and others that read them.
bool has_bits(const PointwiseCall& call);

// The operator on a device. Fills `bits`, if given, of an activation whose slope has two values.
Tensor pointwise(const Backend& backend, const PointwiseCall& call, Tensor* bits = nullptr);

// Its backward. What is not wanted is undefined. a of a chain of one may be bits, of type kByte: then dimensions of dy are in
// memory in the order of those of y. The second one finds the device, and goes through the dispatcher where others want to see
// the call.
using PointwiseGradients = std::tuple<Tensor, Tensor>;
PointwiseGradients pointwise_bwd(const Backend& backend, const Tensor& dy, const PointwiseCall& call,
                                 std::array<bool, 2> wants);
PointwiseGradients pointwise_bwd(const Tensor& dy, const PointwiseCall& call, std::array<bool, 2> wants);

}  // namespace kf
