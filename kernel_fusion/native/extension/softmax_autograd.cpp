// Softmax at autograd: which calls the kernels take, and the backward node.
#include "node.h"

namespace kf {
namespace {

Tensor below_autograd(c10::DispatchKeySet keys, const SoftmaxVerbCall& c) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (const auto* backend = direct(keys)) return softmax(*backend, c);
  static const auto& op = find_op("kernel_fusion::softmax");
  return call_operator<Tensor>(op, c);
}

// scale * (dy - sum(dy * y)) * y; with ATen if it is differentiated. y determines it, so x need not be kept.
Tensor softmax_backward(const SoftmaxBwdCall& c) {
  const Tensor &dy = c.dy, &y = c.y;
  const auto* backend = direct(keys_of(dy, y));
  if (!at::GradMode::is_enabled()) {
    if (backend) return softmax_bwd(*backend, c);
    static const auto& op = find_op("kernel_fusion::softmax_bwd");
    return call_operator<Tensor>(op, c);
  }
  if (backend) check_all_memory(dy, y);  // ATen's operations check none
  const Tensor wide_dy = dy.to(acc_dtype(y)), wide_y = y.to(acc_dtype(y));
  const Tensor dot = wide_dy.mul(wide_y).sum(-1, /*keepdim=*/true);
  const Tensor dx = wide_dy.sub(dot).mul(wide_y).mul(c.scale).to(y.scalar_type());
  return c.leaves_out ? dx.masked_fill(y.eq(0), 0) : dx;
}

struct SoftmaxBackward : SavingNode {
  enum { kY, kMask };  // the mask, if it has a gradient, for its shape and dtype
  const double scale;
  const bool leaves_out;

  explicit SoftmaxBackward(const SoftmaxVerbCall& c) : scale(c.scale), leaves_out(c.causal || dtype_of(c.mask) == at::kBool) {}

  std::string name() const override { return "SoftmaxBackward"; }
  std::string key() const override { return key_of(scale, leaves_out); }

  variable_list gradients(variable_list&& grads) override {
    variable_list list = no_gradients();
    if (!grads[0].defined()) return list;
    const Tensor& dy = grads[0];
    const Tensor result = saved(kY), additive = saved(kMask);
    if (!additive.defined() || !wants(1)) {
      list[0] = softmax_backward({dy, result, scale, leaves_out});
      return list;
    }
    // Unrounded before the sum over the mask's broadcast dimensions, and never in a dtype other than the mask's.
    const Tensor dlogits = softmax_backward({dy, result.to(acc_dtype(result)), 1.0, leaves_out});
    if (wants(0)) list[0] = dlogits.mul(scale).to(result.scalar_type());
    list[1] = dlogits.sum_to_size_symint(additive.sym_sizes()).to(additive.scalar_type());
    return list;
  }
};

Tensor softmax_autograd(c10::DispatchKeySet keys, const SoftmaxVerbCall& call) {
  const auto& [input, mask, scale, causal] = call;
  if (needs_definition(input, mask) || !accepts(call)) return reference(call);
  if (!compute_requires_grad(input, mask)) return below_autograd(keys, call);
  // Backward reads y, which needs as many digits as a mask that is wider than the input.
  const auto dtype = present(mask) && mask->requires_grad() ? c10::promoteTypes(input.scalar_type(), mask->scalar_type())
                                                            : input.scalar_type();
  const Tensor wide = input.to(dtype);
  const SoftmaxVerbCall of_wide{wide, mask, scale, causal};
  Tensor y = below_autograd(keys, of_wide);
  const OptionalTensor& kept = present(mask) && mask->requires_grad() ? mask : kAbsent;
  set_history(std::make_unique<SoftmaxBackward>(of_wide), {wide, mask}, {y}, {y, kept});
  return y.to(input.scalar_type());
}

}  // namespace

static const Implements softmax_at_autograd("softmax", KF_AUTOGRAD_KEYS,
                                            Implementation<softmax_call, softmax_autograd>::kernel);

}  // namespace kf
