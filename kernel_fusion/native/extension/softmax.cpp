// Softmax below autograd: checks, allocation, registration. Shapes for tracing come from Python (operators/schemas.py).
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "backends.h"

namespace kf {

bool accepts(const SoftmaxVerbCall& c) {
  if (!readable(c.input) || c.input.dim() < (c.causal ? 2 : 1)) return false;
  if (!present(c.mask)) return true;
  if (c.mask->device() != c.input.device() || c.mask->layout() != at::kStrided) return false;
  const bool both_double = (c.mask->scalar_type() == at::kDouble) == (c.input.scalar_type() == at::kDouble);
  return c.mask->scalar_type() == at::kBool || (readable(*c.mask) && both_double);
}

Tensor reference(const SoftmaxVerbCall& c) {
  static const auto op = find_op<SoftmaxVerb>("kernel_fusion::softmax_reference");
  return op.call(c.input, c.mask, c.scale, c.causal);
}

Tensor softmax(const Backend& backend, const SoftmaxVerbCall& call) {
  const Tensor expanded = present(call.mask) ? call.mask->expand(call.input.sizes()) : Tensor();
  Tensor y = at::empty_like(call.input, at::MemoryFormat::Contiguous);
  if (y.numel()) {
    check_all_memory(call.input, call.mask);
    backend.softmax({call.input, expanded, call.scale, call.causal}, y);
  }
  return y;
}

Tensor softmax_bwd(const Backend& backend, const Tensor& dy, const Tensor& y, double scale, bool leaves_out) {
  TORCH_CHECK(readable(dy) && readable(y) && y.dim() >= 1 && dy.sizes().equals(y.sizes()) && dy.device() == y.device(),
              "kernel_fusion::softmax_bwd: arguments that its kernels do not take");
  Tensor dx = at::empty_like(y, at::MemoryFormat::Contiguous);
  if (y.numel()) {
    check_all_memory(dy, y);
    backend.softmax_bwd(dy.contiguous(), y.contiguous(), scale, leaves_out, dx);
  }
  return dx;
}

namespace {

template <const Backend& backend>
Tensor softmax_op(const Tensor& input, const OptionalTensor& mask, double scale, bool causal) {
  const SoftmaxVerbCall call{input, mask, scale, causal};
  return accepts(call) ? softmax(backend, call) : reference(call);
}

template <const Backend& backend>
Tensor softmax_bwd_op(const Tensor& dy, const Tensor& y, double scale, bool leaves_out) {
  return softmax_bwd(backend, dy, y, scale, leaves_out);
}

template <const Backend& backend> void implement_softmax(torch::Library& m) {
  m.impl("softmax", softmax_op<backend>);
  m.impl("softmax_bwd", softmax_bwd_op<backend>);
}

}  // namespace

TORCH_LIBRARY_IMPL(kernel_fusion, CPU, m) { implement_softmax<kCpu>(m); }
TORCH_LIBRARY_IMPL(kernel_fusion, CUDA, m) { implement_softmax<kCuda>(m); }

}  // namespace kf
