// Softmax over the last dimension.
#pragma once

#include "operators.h"

namespace kf {

// y = softmax(scale * input + mask), contiguous. `mask` is boolean or floating point. Causal keeps column j of row i, in the
// last two dimensions, if j <= i. With a mask or causal, a row of -inf gives zeros. Elements left out by a boolean mask or
// causal are 0, even in a row with NaN. The arguments of the operator, as in its schema (operators/schemas.py); kernels get a
// mask with the shape of the input (its strides may be 0).
struct SoftmaxVerbCall {
  const Tensor& input;
  const OptionalTensor& mask;
  double scale;
  bool causal;
};
inline constexpr auto softmax_call = &made<SoftmaxVerbCall, const Tensor&, const OptionalTensor&, double, bool>;
template <class F> auto with_arguments(const SoftmaxVerbCall& c, F&& f) { return f(c.input, c.mask, c.scale, c.causal); }
using SoftmaxKernel = void(const SoftmaxVerbCall& call, Tensor& y);

// A mask's dtype: absent, kBool for a mask that keeps, else that of an additive one.
inline Dtype mask_dtype(const OptionalTensor& mask) {
  return dtype_of(mask) == at::kBool ? Dtype::kBool : dtype_or_absent(dtype_of(mask));
}

// The rows of a mask, whose columns lie side by side, or of a column that repeats.
inline bool repeats_column(const Tensor& mask) { return mask.stride(-1) == 0; }
inline Rows rows_of_mask(const Tensor& mask) { return Rows(repeats_column(mask) ? mask.narrow(-1, 0, 1) : mask, 1); }

// dx = scale * (dy - sum(dy * y)) * y, contiguous. With `leaves_out`, dx = 0 where y = 0, which marks left out elements, even
// in a row with NaN.
struct SoftmaxBwdCall {
  const Tensor& dy;
  const Tensor& y;
  double scale;
  bool leaves_out;
};
inline constexpr auto softmax_bwd_call = &made<SoftmaxBwdCall, const Tensor&, const Tensor&, double, bool>;
template <class F> auto with_arguments(const SoftmaxBwdCall& c, F&& f) { return f(c.dy, c.y, c.scale, c.leaves_out); }
using SoftmaxBwdKernel = void(const SoftmaxBwdCall& call, Tensor& dx);

SoftmaxKernel softmax_cpu, softmax_cuda;
SoftmaxBwdKernel softmax_bwd_cpu, softmax_bwd_cuda;

// Whether the kernels can serve a call; else the definition in backends/eager does, or says what is wrong.
bool accepts(const SoftmaxVerbCall& call);
Tensor reference(const SoftmaxVerbCall& call);

// The operator on a device, and its backward.
Tensor softmax(const Backend& backend, const SoftmaxVerbCall& call);
Tensor softmax_bwd(const Backend& backend, const SoftmaxBwdCall& call);

}  // namespace kf
