// Softmax at autograd: which calls the kernels take, and the backward node.
#include <ATen/ops/mul.h>
#include <ATen/ops/promote_types.h>

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
  SavedVariable y, mask;  // the mask, if it has a gradient, for its shape and dtype
  const double scale;
  const bool leaves_out;

  explicit SoftmaxBackward(const SoftmaxVerbCall& c)
      : SavingNode(torch::autograd::collect_next_edges(c.input, c.mask)), scale(c.scale),
        leaves_out(c.causal || dtype_of(c.mask) == at::kBool) {}

  // After the result's history is set.
  void save(const SoftmaxVerbCall& c, const Tensor& result) {
    y = SavedVariable(result, /*is_output=*/true);
    mask = SavedVariable(present(c.mask) && c.mask->requires_grad() ? c.mask : std::nullopt, /*is_output=*/false);
  }

  std::string name() const override { return "SoftmaxBackward"; }

  SavedList saved() override { return {{&y, true}, {&mask}}; }
  std::string key() const override { return key_of(scale, leaves_out); }

  variable_list gradients(variable_list&& grads) override {
    variable_list list(num_outputs());
    if (!grads[0].defined()) return list;
    const Tensor& dy = grads[0];
    const Tensor result = y.unpack(getptr()), additive = mask.unpack();
    if (!additive.defined() || !task_should_compute_output(1)) {
      list[0] = softmax_backward({dy, result, scale, leaves_out});
      return list;
    }
    // Unrounded before the sum over the mask's broadcast dimensions, and never in a dtype other than the mask's.
    const Tensor dlogits = softmax_backward({dy, result.to(acc_dtype(result)), 1.0, leaves_out});
    if (task_should_compute_output(0)) list[0] = at::mul(dlogits, scale).to(result.scalar_type());
    list[1] = dlogits.sum_to_size_symint(additive.sym_sizes()).to(additive.scalar_type());
    return list;
  }
};

Tensor softmax_autograd(c10::DispatchKeySet keys, const SoftmaxVerbCall& call) {
  const auto& [input, mask, scale, causal] = call;
  if (needs_definition(input, mask) || !accepts(call)) return reference(call);
  if (!torch::autograd::compute_requires_grad(input, mask)) return below_autograd(keys, call);
  // Backward reads y, which needs as many digits as a mask that is wider than the input.
  const auto dtype = present(mask) && mask->requires_grad() ? at::promote_types(input.scalar_type(), mask->scalar_type())
                                                            : input.scalar_type();
  const Tensor wide = input.to(dtype);
  const SoftmaxVerbCall of_wide{wide, mask, scale, causal};
  Tensor y = below_autograd(keys, of_wide);
  const auto node = new_node<SoftmaxBackward>(of_wide);
  torch::autograd::set_history(y, node);
  node->save(of_wide, y);
  return y.to(input.scalar_type());
}

}  // namespace

static const Implements softmax_at_autograd("softmax", KF_AUTOGRAD_KEYS,
                                            Implementation<softmax_call, softmax_autograd>::kernel);

}  // namespace kf
