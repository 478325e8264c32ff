// Pointwise chains, reductions and softmax: what their operators (families.cpp) ask of a device.
//
// The operators check, promote, broadcast, allocate and choose; the kernels below fill what was allocated, at least one
// element, and convert between dtypes themselves: no tensor is cast as a whole.
#pragma once

#include <ATen/TensorIterator.h>

#include <string_view>

#include "chain.h"
#include "row_norm.h"

namespace kf {

// ---- Pointwise: y = dropout(scale * f(a, b)) -------------------------------------------------------------------------------

// Operands of `iter`: y; a; b unless `combine` is kFirst. The position of an element, for dropout, is its offset in y. Bits are
// written of iterations that need not be cut into parts: below 2^31 bytes, or of operands that lie in one order.
using PointwiseKernel = void(const Chain& chain, at::TensorIteratorBase& iter);

// Gradients of the shape of y. Operands of `iter`: first the wanted ones of da and db, then dy, a and, unless `combine` is
// kFirst, b. The position of an element is its offset in dy, which is laid out as y was. Where the chain has bits, dy stands for
// a too, which is not read, and the gradient is laid out as y was.
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

// ---- Reductions: out[o][i] = (sum over r of map(in[o][r][i])) / divisor -----------------------------------------------------

// `in` has three strides, in elements; out is contiguous, (outer, inner), of any dtype. Sums are kept in the accumulator type
// of `in`, in an order that `reduced` alone decides (of reductions over the innermost dimension; of others, the shape).
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

// ---- Softmax over the last dimension ---------------------------------------------------------------------------------------

// y = softmax(scale * x + mask), contiguous. `mask` has the shape of x (its strides may be 0), is boolean or floating point,
// or undefined. Causal: column j of row i, counted within the last two dimensions, is kept where j <= i. With a mask or causal,
// a row whose logits are all -inf gives zeros. What a boolean mask or causal leave out is 0, also in a row with NaN.
struct SoftmaxCall {
  const Tensor& x;
  const Tensor& mask;
  double scale;
  bool causal;
};
using SoftmaxKernel = void(const SoftmaxCall& call, Tensor& y);

// dx = scale * (dy - sum(dy * y)) * y, contiguous. With `leaves_out`, dx = 0 where y = 0, which positions are that a boolean
// mask or causal leave out, also in a row with NaN.
using SoftmaxBwdKernel = void(const Tensor& dy, const Tensor& y, double scale, bool leaves_out, Tensor& dx);

// ---- Devices ---------------------------------------------------------------------------------------------------------------

PointwiseKernel pointwise_cpu, pointwise_cuda;
PointwiseBwdKernel pointwise_bwd_cpu, pointwise_bwd_cuda;
PointwiseBwdColumnsKernel pointwise_bwd_columns_cpu, pointwise_bwd_columns_cuda;
ReduceKernel reduce_cpu, reduce_cuda;
SoftmaxKernel softmax_cpu, softmax_cuda;
SoftmaxBwdKernel softmax_bwd_cpu, softmax_bwd_cuda;

struct FamilyBackend {
  PointwiseKernel* pointwise;
  PointwiseBwdKernel* pointwise_bwd;
  PointwiseBwdColumnsKernel* pointwise_bwd_columns;
  ReduceKernel* reduce;
  SoftmaxKernel* softmax;
  SoftmaxBwdKernel* softmax_bwd;
};
inline constexpr FamilyBackend kCpuFamilies{pointwise_cpu, pointwise_bwd_cpu, pointwise_bwd_columns_cpu,
                                            reduce_cpu,    softmax_cpu,       softmax_bwd_cpu};
inline constexpr FamilyBackend kCudaFamilies{pointwise_cuda, pointwise_bwd_cuda, pointwise_bwd_columns_cuda,
                                             reduce_cuda,    softmax_cuda,       softmax_bwd_cuda};

// `input`, which has elements, summed to a shape that broadcasts to its own; contiguous.
Tensor sum_to(const FamilyBackend& backend, const Tensor& input, at::IntArrayRef shape, at::ScalarType dtype);

// ---- Operators -------------------------------------------------------------------------------------------------------------

// The arguments of the operators, as their schemas have them (operators/schemas.py).
struct PointwiseCall {
  const Tensor& a;
  const OptionalTensor& b;
  std::string_view combine, activation;
  double scale, dropout_p;
  const OptionalTensor& seed;
};
using PointwiseVerb = Tensor(const Tensor&, const OptionalTensor&, std::string_view, std::string_view, double, double,
                             const OptionalTensor&);
using PointwiseTrainingVerb = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, std::string_view, std::string_view,
                                                         double, double, const OptionalTensor&);

struct ReduceVerbCall {
  const Tensor& input;
  at::IntArrayRef dim;
  bool keepdim;
  std::string_view kind;
  OptionalDtype dtype;
};
using ReduceVerb = Tensor(const Tensor&, at::IntArrayRef, bool, std::string_view, OptionalDtype);

struct SoftmaxVerbCall {
  const Tensor& input;
  const OptionalTensor& mask;
  double scale;
  bool causal;
};
using SoftmaxVerb = Tensor(const Tensor&, const OptionalTensor&, double, bool);

// f(every tensor of the call, and of what else backward has).
template <class F, class... Others> auto with_tensors(const PointwiseCall& c, F&& f, const Others&... others) {
  return f(c.a, c.b, c.seed, others...);
}

// The operators on a device, of calls that its kernels accept.
// Pointwise fills `bits`, if given, of an activation whose slope has two values.
Tensor pointwise(const FamilyBackend& backend, const PointwiseCall& call, Tensor* bits = nullptr);
Tensor reduce(const FamilyBackend& backend, const ReduceVerbCall& call);
Tensor softmax(const FamilyBackend& backend, const SoftmaxVerbCall& call);

// Their backward. What is not wanted is undefined. a of a chain of one may be bits, of type kByte: then dimensions of dy are in
// memory in the order of those of y.
using PointwiseGradients = std::tuple<Tensor, Tensor>;
PointwiseGradients pointwise_bwd(const FamilyBackend& backend, const Tensor& dy, const PointwiseCall& call,
                                std::array<bool, 2> wants);
Tensor softmax_bwd(const FamilyBackend& backend, const Tensor& dy, const Tensor& y, double scale, bool leaves_out);

// Whether the kernels can serve a call. What they can't serve goes to the definition, which serves it or says what is wrong.
bool accepts(const PointwiseCall& call);
bool accepts(const ReduceVerbCall& call);
bool accepts(const SoftmaxVerbCall& call);

// Whether its device has kernels that write the bits of a call, and others that read them.
bool has_bits(const PointwiseCall& call);

// The definitions in backends/eager.
Tensor reference(const PointwiseCall& call);
Tensor reference(const ReduceVerbCall& call);
Tensor reference(const SoftmaxVerbCall& call);

// A floating-point tensor that the kernels of its device can read.
bool readable(const Tensor& t);

}  // namespace kf
