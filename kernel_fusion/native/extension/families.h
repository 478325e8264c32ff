// Pointwise chains, reductions and softmax: what their operators (families.cpp) ask of a device.
//
// The operators check, promote, broadcast, allocate and choose; the kernels below fill what was allocated, at least one
// element, and convert between dtypes themselves: no tensor is cast as a whole.
#pragma once

#include <ATen/TensorIterator.h>

#include "row_norm.h"

namespace kf {

// ---- Pointwise: y = dropout(scale * f(a, b)) -------------------------------------------------------------------------------

enum class Combine : int32_t { kFirst, kAdd, kMul, kGate };  // act(a), act(a + b), act(a * b), act(a) * b

struct Chain {
  Combine combine;
  int32_t activation;   // its position in KF_ACTIVATIONS
  double scale;         // that of dropout included
  uint32_t threshold;   // elements whose 16 bits are below it are dropped; 0: no dropout
  const int64_t* seed;  // where the tensors are; null without dropout
};

// Operands of `iter`: y; a; b unless `combine` is kFirst. The position of an element, for dropout, is its offset in y.
using PointwiseKernel = void(const Chain& chain, at::TensorIteratorBase& iter);

// Gradients of the shape of y. Operands of `iter`: first the wanted ones of da and db, then dy, a and, unless `combine` is
// kFirst, b. The position of an element is its offset in dy, which is laid out as y was.
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

// ---- Reductions: out[o][i] = factor * sum over r of map(in[o][r][i]) -------------------------------------------------------

enum class Map : int32_t { kSquare, kAbs, kNone };

// `in` has three strides, in elements; out is contiguous, (outer, inner), of any dtype. Sums are kept in the accumulator type
// of `in`, in an order that `reduced` alone decides (of reductions over the innermost dimension; of others, the shape).
struct ReduceCall {
  Map map;
  const void* in;
  at::ScalarType in_type;
  int64_t outer, reduced, inner;
  int64_t outer_stride, reduced_stride, inner_stride;
  double factor;
  c10::Device device;
};
using ReduceKernel = void(const ReduceCall& call, Tensor& out);

// ---- Softmax over the last dimension ---------------------------------------------------------------------------------------

// y = softmax(scale * x + mask), contiguous. `mask` has the shape of x (its strides may be 0), is boolean or floating point,
// or undefined. Causal: column j of row i, counted within the last two dimensions, is kept where j <= i. With a mask or causal,
// a row whose logits are all -inf gives zeros.
struct SoftmaxCall {
  const Tensor& x;
  const Tensor& mask;
  double scale;
  bool causal;
};
using SoftmaxKernel = void(const SoftmaxCall& call, Tensor& y);

// dx = scale * (dy - sum(dy * y)) * y, contiguous.
using SoftmaxBwdKernel = void(const Tensor& dy, const Tensor& y, double scale, Tensor& dx);

// ---- Devices ---------------------------------------------------------------------------------------------------------------

PointwiseKernel pointwise_cpu, pointwise_cuda;
PointwiseBwdKernel pointwise_bwd_cpu, pointwise_bwd_cuda;
PointwiseBwdColumnsKernel pointwise_bwd_columns_cpu, pointwise_bwd_columns_cuda;
ReduceKernel reduce_cpu, reduce_cuda;
SoftmaxKernel softmax_cpu, softmax_cuda;
SoftmaxBwdKernel softmax_bwd_cpu, softmax_bwd_cuda;

}  // namespace kf
