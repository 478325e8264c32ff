// Pointwise chains: y = dropout(scale * f(a, b)). The operators check, promote, broadcast, allocate and choose a kernel.
// Kernels get at least one element to fill. They convert dtypes themselves, so no tensor is cast as a whole.
#pragma once

#include <ATen/TensorIterator.h>

#include <array>

#include "backends.h"
#include "dispatch.h"

namespace kf {

// Forward. The operands of `iter` are y, a and, unless `combine` is kFirst, b. Dropout numbers an element by its offset in y.
// A call that writes bits must not be cut into parts: it has less than 2^31 bytes, or operands in one order.
using PointwiseKernel = void(const Chain& chain, at::TensorIteratorBase& iter);

// Backward, which makes gradients of y's shape. The operands of `iter` are the wanted ones of da and db, then dy, a and, unless
// `combine` is kFirst, b. Dropout numbers an element by its offset in dy, which has y's layout. If bits are read instead of a,
// dy stands for a in the iterator, and the gradient has y's layout.
using PointwiseBwdKernel = void(const Chain& chain, at::TensorIteratorBase& iter, std::array<bool, 2> wants);

// Backward of a chain whose b is one row, broadcast to all rows of a. dy and a are contiguous matrices of `rows` times `cols`;
// b and db are contiguous rows. db is the sum over rows, in an order that the shape alone decides. da is undefined if it is
// not wanted.
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

bool accepts(const PointwiseCall& call);
Tensor compute(const Backend& backend, const PointwiseCall& call);
// The same, with the bits of an activation whose slope has two values.
std::tuple<Tensor, Tensor> compute(const Backend& backend, const PointwiseFwdCall& call);

// Whether the device of a call has kernels that write and read bits.
bool has_bits(const PointwiseCall& call);

// The backward of the operator. Unwanted gradients are undefined. In a chain of one operand, a may be bits, of type kByte; the
// dimensions of dy are then in y's memory order. The second function finds the device, and calls the dispatcher if something
// else must see the call.
using PointwiseGradients = PointwiseBwdCall::Result;
PointwiseGradients pointwise_bwd(const Backend& backend, const PointwiseBwdCall& call);
PointwiseGradients pointwise_bwd(const PointwiseBwdCall& call);

}  // namespace kf
