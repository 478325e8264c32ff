// Softmax below autograd: checks, allocation, registration. Python has the shapes for tracing (operators/meta.py).
#include "backends.h"
#include "dispatch.h"

namespace kf {

bool accepts(const SoftmaxVerbCall& c) {
  if (!readable(c.input) || c.input.dim() < (c.causal ? 2 : 1)) return false;
  if (!present(c.mask)) return true;
  if (c.mask->device() != c.input.device() || c.mask->layout() != at::kStrided) return false;
  return c.mask->scalar_type() == at::kBool || (readable(*c.mask) && mixes(c.input.scalar_type(), c.mask->scalar_type()));
}

Tensor reference(const SoftmaxVerbCall& c) {
  static const auto& op = find_op("kernel_fusion::softmax_reference");
  return call_operator<Tensor>(op, c);
}

namespace {

// The mask in the shape of the input. If its columns lie apart it is copied, before it is broadcast.
OptionalTensor expanded_mask(const SoftmaxVerbCall& c) {
  if (!present(c.mask)) return std::nullopt;
  const Tensor& mask = *c.mask;
  if (mask.dim() == 0 || mask.size(-1) == 1 || mask.stride(-1) <= 1) return mask.expand(c.input.sizes());
  check_memory(mask);
  return mask.contiguous().expand(c.input.sizes());
}

}  // namespace

Tensor softmax(const Backend& backend, const SoftmaxVerbCall& call) {
  const OptionalTensor mask = expanded_mask(call);
  Tensor y = allocate_like(call.input, at::MemoryFormat::Contiguous);
  if (y.numel()) {
    check_all_memory(call.input, call.mask);
    backend.softmax({call.input, mask, call.scale, call.causal}, y);
  }
  return y;
}

Tensor softmax_bwd(const Backend& backend, const SoftmaxBwdCall& c) {
  const Tensor &dy = c.dy, &y = c.y;
  TORCH_CHECK(readable(dy) && readable(y) && y.dim() >= 1 && dy.sizes().equals(y.sizes()) && dy.device() == y.device(),
              "kernel_fusion::softmax_bwd: arguments that its kernels do not take");
  Tensor dx = allocate_like(y, at::MemoryFormat::Contiguous);
  if (y.numel()) {
    check_all_memory(dy, y);
    backend.softmax_bwd({dy.contiguous(), y.contiguous(), c.scale, c.leaves_out}, dx);
  }
  return dx;
}

namespace {

Tensor softmax_or_definition(const Backend& backend, const SoftmaxVerbCall& call) {
  return accepts(call) ? softmax(backend, call) : reference(call);
}
const Implements softmax_kernels[] = {
    {"softmax", {&kCpu, &kCuda}, Implementation<softmax_call, softmax_or_definition>::kernel},
    {"softmax_bwd", {&kCpu, &kCuda}, Implementation<softmax_bwd_call, softmax_bwd>::kernel},
};

}  // namespace

}  // namespace kf
