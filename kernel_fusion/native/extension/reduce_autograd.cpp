// Reductions at autograd: which calls the kernels take, and the backward node, whose gradients are pointwise chains.
#include "node.h"

namespace kf {
namespace {

Tensor below_autograd(c10::DispatchKeySet keys, const ReduceVerbCall& c) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (const auto* backend = direct(keys)) return reduce(*backend, c);
  static const auto& op = find_op("kernel_fusion::reduce");
  return call_operator<Tensor>(op, c);
}

// dy, with the shape of x.
Tensor expanded(const Tensor& dy, const Tensor& x, at::IntArrayRef dim, bool keepdim) {
  Tensor result = dy;
  if (!keepdim) {
    std::vector<bool> reduced(x.dim(), dim.empty());
    for (const auto d : dim)
      if (x.dim()) reduced[d < 0 ? d + x.dim() : d] = true;
    for (int64_t d = 0; d < x.dim(); ++d)
      if (reduced[d]) result = result.unsqueeze(d);
  }
  return result.expand_symint(x.sym_sizes());
}

// dx = 2 x dy, or sign(x) dy / n: the gradient of one operand of a chain that has x twice, in x's dtype. It is computed in dy's
// type, which must not be narrower than fp64 x.
Tensor reduce_backward(const Tensor& given, const Tensor& x, const ReduceVerbCall& c) {
  const Tensor dy = x.scalar_type() == at::kDouble ? given.to(at::kDouble) : given;
  if (c.kind == "sum_squared")
    return std::get<0>(
        pointwise_bwd(expanded(dy, x, c.dim, c.keepdim), {x, x, "mul", "identity", 2.0, 0.0, {}}, {true, false}));
  const c10::SymInt outputs = dy.sym_numel(), inputs = x.sym_numel();
  const auto known_outputs = outputs.maybe_as_int(), known_inputs = inputs.maybe_as_int();
  double factor = 1.0;
  Tensor scaled = dy;
  if (known_outputs && known_inputs) {
    factor = *known_inputs ? static_cast<double>(*known_outputs) / static_cast<double>(*known_inputs) : 1.0;
  } else {  // a number unknown during tracing cannot be an argument
    scaled = dy.div(at::Scalar(inputs / outputs));
  }
  return std::get<1>(
      pointwise_bwd(expanded(scaled, x, c.dim, c.keepdim), {x, x, "gate", "sign", factor, 0.0, {}}, {false, true}));
}

struct ReduceBackward : SavingNode {
  const std::vector<int64_t> dim;
  const bool keepdim, mean;

  explicit ReduceBackward(const ReduceVerbCall& c) : dim(c.dim.vec()), keepdim(c.keepdim), mean(c.kind == "mean_abs") {}

  std::string name() const override { return "ReduceBackward"; }
  std::string key() const override { return key_of(dim, keepdim, mean); }

  variable_list gradients(variable_list&& grads) override {
    if (!grads[0].defined()) return no_gradients();
    const Tensor x = saved(0), &dy = grads[0];
    const ReduceVerbCall call{x, dim, keepdim, mean ? "mean_abs" : "sum_squared", dy.scalar_type()};
    return at::GradMode::is_enabled() ? differentiate(reference(call), {x}, dy) : variable_list{reduce_backward(dy, x, call)};
  }
};

Tensor reduce_autograd(c10::DispatchKeySet keys, const ReduceVerbCall& call) {
  if (needs_definition(call.input) || !accepts(call)) return reference(call);
  Tensor y = below_autograd(keys, call);
  if (compute_requires_grad(call.input)) set_history(std::make_unique<ReduceBackward>(call), {call.input}, {y}, {call.input});
  return y;
}

}  // namespace

static const Implements reduce_at_autograd("reduce", KF_AUTOGRAD_KEYS, Implementation<reduce_call, reduce_autograd>::kernel);

}  // namespace kf
