// Pointwise chains, reductions and softmax at autograd: which calls the kernels take, and their backward.
//
// As for the row norms (autograd.cpp), the definition serves calls inside torch.func and with forward-mode tangents, and the
// backward that is itself differentiated.
#include <ATen/ops/alias.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "families.h"

namespace kf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

OptionalTensor some(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

bool transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

bool needs_definition(const Tensor& first, const OptionalTensor& second = std::nullopt) {
  return transformed() || torch::autograd::isFwGradDefined(first) || torch::autograd::isFwGradDefined(second);
}

// The gradients of y = definition(...) with respect to the wanted ones of `inputs`, as differentiable functions of everything.
variable_list differentiated(const Tensor& y, const Tensor& dy, const variable_list& inputs, const std::vector<bool>& wants) {
  variable_list wanted, result(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i)
    if (wants[i]) wanted.push_back(inputs[i]);
  auto gradients = torch::autograd::grad({y}, wanted, {dy}, /*retain_graph=*/true, /*create_graph=*/true);
  for (size_t i = 0, next = 0; i < inputs.size(); ++i)
    if (wants[i]) result[i] = std::move(gradients[next++]);
  return result;
}

// As many gradients as the forward has arguments.
variable_list padded_to(variable_list gradients, size_t arguments) {
  gradients.resize(arguments);
  return gradients;
}

// ---- Pointwise -------------------------------------------------------------------------------------------------------------

Tensor below_autograd(const PointwiseCall& c) {
  const at::AutoDispatchBelowADInplaceOrView below;
  static const auto op = find_op<PointwiseVerb>("kernel_fusion::pointwise");
  return op.call(c.a, c.b, c.combine, c.activation, c.scale, c.dropout_p, c.seed);
}

std::tuple<Tensor, Tensor> call_pointwise_bwd(const Tensor& dy, const PointwiseCall& c, std::array<bool, 2> wants) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view, std::string_view,
                                         double, double, const OptionalTensor&, std::array<bool, 2>)>(
          "kernel_fusion::pointwise_bwd");
  return op.call(dy, c.a, c.b, c.combine, c.activation, c.scale, c.dropout_p, c.seed, wants);
}

// dy, laid out as y was, of which only strides other than a contiguous tensor's were saved.
Tensor laid_out(const Tensor& dy, const std::vector<int64_t>& strides) {
  if (strides.empty()) return dy.contiguous();
  if (dy.strides().equals(strides)) return dy;
  return at::empty_strided(dy.sizes(), strides, dy.options()).copy_(dy);
}

// The activation that has at y the slope which `activation` has where its value is y; none where y does not tell, or not
// exactly enough because it is rounded to 16 bits.
std::string_view of_result(std::string_view activation, at::ScalarType type) {
  if (activation == "identity" || activation == "relu" || activation == "leaky_relu") return activation;
  if (type != at::kFloat && type != at::kDouble) return {};
  return activation == "tanh" ? "from_tanh" : activation == "sigmoid" ? "from_sigmoid" : "";
}

// Whether backward reads y, and need not read a, nor b but as the row that its gradient is summed to.
bool reads_result(const PointwiseCall& c) {
  if (present(c.seed) || c.scale != 1.0 || of_result(c.activation, c.a.scalar_type()).empty()) return false;
  if (c.combine != "add") return c.combine == "first";
  return c.a.scalar_type() == c.b->scalar_type() &&
         (c.a.sym_sizes() == c.b->sym_sizes() ||
          (c.b->dim() == 1 && c.a.dim() > 1 && c.b->sym_size(0) == c.a.sym_size(-1)));
}

struct PointwiseFunction : Function<PointwiseFunction> {
  static constexpr bool is_traceable = true;
  static constexpr size_t kArguments = 7;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const OptionalTensor& b, std::string_view combine,
                        std::string_view activation, double scale, double dropout_p, const OptionalTensor& seed) {
    ctx->set_materialize_grads(false);
    const PointwiseCall call{a, b, combine, activation, scale, dropout_p, seed};
    Tensor y = below_autograd(call);
    const bool by_result = reads_result(call), shared = same_gradients(call);
    ctx->save_for_backward({by_result ? y : a, by_result && shared ? Tensor() : b.value_or(Tensor()), seed.value_or(Tensor())});
    ctx->saved_data["combine"] = std::string(by_result ? "first" : combine);
    ctx->saved_data["activation"] = std::string(by_result ? of_result(activation, a.scalar_type()) : activation);
    ctx->saved_data["flags"] = std::vector<int64_t>{present(b), shared};
    ctx->saved_data["numbers"] = std::vector<double>{scale, dropout_p};  // in a list, which compiled autograd specialises on
    ctx->saved_data["strides"] = present(seed) && !y.is_contiguous() ? y.strides().vec() : std::vector<int64_t>();
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(kArguments);
    const auto saved = ctx->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1], &seed = saved[2];
    const std::string combine = ctx->saved_data["combine"].toStringRef();
    const std::string activation = ctx->saved_data["activation"].toStringRef();
    const auto numbers = ctx->saved_data["numbers"].toDoubleVector();
    const OptionalTensor second = some(b), dropout_seed = some(seed);
    const PointwiseCall call{a, second, combine, activation, numbers[0], numbers[1], dropout_seed};
    const auto flags = ctx->saved_data["flags"].toIntVector();
    const bool binary = flags[0], shared = flags[1];
    const std::array<bool, 2> needs{ctx->needs_input_grad(0), binary && ctx->needs_input_grad(1)};
    const Tensor& dy = grads[0];
    if (at::GradMode::is_enabled()) return padded_to(differentiable(call, dy, needs, shared), kArguments);
    const Tensor laid = present(dropout_seed) ? laid_out(dy, ctx->saved_data["strides"].toIntVector()) : dy;
    auto [da, db] = call_pointwise_bwd(laid, call, {needs[0] || shared, needs[1] && !shared});
    variable_list result(kArguments);
    if (needs[0]) result[0] = da;
    if (needs[1]) result[1] = shared ? da : db;
    return result;
  }

  // The same as differentiable functions of everything. Aliases, so that neither operand's gradient is also looked for in the
  // other, which may depend on it or be the same.
  static variable_list differentiable(const PointwiseCall& call, const Tensor& dy, std::array<bool, 2> needs, bool shared) {
    const Tensor first = at::alias(call.a), other = present(call.b) ? at::alias(*call.b) : Tensor();
    const bool by_row = call.combine == "first" && other.defined();
    const OptionalTensor operand = by_row ? std::nullopt : some(other);
    const PointwiseCall again{first, operand, call.combine, call.activation, call.scale, call.dropout_p, call.seed};
    if (call.combine != "first") return differentiated(reference(again), dy, {first, other}, {needs[0], needs[1]});
    const Tensor gradient = differentiated(reference(again), dy, {first}, {true})[0];
    const Tensor second = by_row ? gradient.sum_to_size_symint(other.sym_sizes()) : gradient;
    return {needs[0] ? gradient : Tensor(), needs[1] ? second : Tensor()};
  }

  // The terms of a sum have one gradient, where they are of one kind.
  static bool same_gradients(const PointwiseCall& c) {
    return c.combine == "add" && c.a.scalar_type() == c.b->scalar_type() && c.a.sym_sizes() == c.b->sym_sizes();
  }
};

Tensor pointwise_autograd(const Tensor& a, const OptionalTensor& b, std::string_view combine, std::string_view activation,
                          double scale, double dropout_p, const OptionalTensor& seed) {
  const PointwiseCall call{a, b, combine, activation, scale, dropout_p, seed};
  if (needs_definition(a, b) || !accepts(call)) return reference(call);
  if (!torch::autograd::compute_requires_grad(a, b)) return below_autograd(call);
  return PointwiseFunction::apply(a, b, combine, activation, scale, dropout_p, seed);
}

// ---- Reductions ------------------------------------------------------------------------------------------------------------

Tensor below_autograd(const ReduceVerbCall& c) {
  const at::AutoDispatchBelowADInplaceOrView below;
  static const auto op = find_op<ReduceVerb>("kernel_fusion::reduce");
  return op.call(c.input, c.dim, c.keepdim, c.kind, c.dtype);
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

// dx = 2 x dy, or sign(x) dy / n: the gradient of one operand of a chain in which x stands twice, which is in x's dtype.
Tensor reduce_backward(const Tensor& dy, const Tensor& x, const ReduceVerbCall& c) {
  if (c.kind == "sum_squared")
    return std::get<0>(call_pointwise_bwd(expanded(dy, x, c.dim, c.keepdim), {x, x, "mul", "identity", 2.0, 0.0, {}}, {true, false}));
  const c10::SymInt outputs = dy.sym_numel(), inputs = x.sym_numel();
  const auto known_outputs = outputs.maybe_as_int(), known_inputs = inputs.maybe_as_int();
  double factor = 1.0;
  Tensor scaled = dy;
  if (known_outputs && known_inputs) {
    factor = *known_inputs ? static_cast<double>(*known_outputs) / static_cast<double>(*known_inputs) : 1.0;
  } else {  // a number that is not known while tracing cannot be an argument
    scaled = at::div(dy, at::Scalar(inputs / outputs));
  }
  return std::get<1>(
      call_pointwise_bwd(expanded(scaled, x, c.dim, c.keepdim), {x, x, "gate", "sign", factor, 0.0, {}}, {false, true}));
}

struct ReduceFunction : Function<ReduceFunction> {
  static constexpr bool is_traceable = true;
  static constexpr size_t kArguments = 5;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, at::IntArrayRef dim, bool keepdim, std::string_view kind,
                        OptionalDtype dtype) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({input});
    ctx->saved_data["dim"] = dim.vec();
    ctx->saved_data["flags"] = std::vector<int64_t>{keepdim, kind == "mean_abs"};
    return below_autograd(ReduceVerbCall{input, dim, keepdim, kind, dtype});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(kArguments);
    const Tensor x = ctx->get_saved_variables()[0], &dy = grads[0];
    const auto dim = ctx->saved_data["dim"].toIntVector(), flags = ctx->saved_data["flags"].toIntVector();
    const ReduceVerbCall call{x, dim, flags[0] != 0, flags[1] ? "mean_abs" : "sum_squared", dy.scalar_type()};
    if (at::GradMode::is_enabled()) return padded_to(differentiated(reference(call), dy, {x}, {true}), kArguments);
    return padded_to({reduce_backward(dy, x, call)}, kArguments);
  }
};

Tensor reduce_autograd(const Tensor& input, at::IntArrayRef dim, bool keepdim, std::string_view kind, OptionalDtype dtype) {
  const ReduceVerbCall call{input, dim, keepdim, kind, dtype};
  if (needs_definition(input) || !accepts(call)) return reference(call);
  if (!torch::autograd::compute_requires_grad(input)) return below_autograd(call);
  return ReduceFunction::apply(input, dim, keepdim, kind, dtype);
}

// ---- Softmax ---------------------------------------------------------------------------------------------------------------

Tensor below_autograd(const SoftmaxVerbCall& c) {
  const at::AutoDispatchBelowADInplaceOrView below;
  static const auto op = find_op<SoftmaxVerb>("kernel_fusion::softmax");
  return op.call(c.input, c.mask, c.scale, c.causal);
}

// scale * (dy - sum(dy * y)) * y; with ATen where it is itself differentiated. y determines it, so x need not be kept.
Tensor softmax_backward(const Tensor& dy, const Tensor& y, double scale) {
  if (!at::GradMode::is_enabled()) {
    static const auto op = find_op<Tensor(const Tensor&, const Tensor&, double)>("kernel_fusion::softmax_bwd");
    return op.call(dy, y, scale);
  }
  const Tensor wide_dy = dy.to(acc_dtype(y)), wide_y = y.to(acc_dtype(y));
  const Tensor dot = wide_dy.mul(wide_y).sum(-1, /*keepdim=*/true);
  return wide_dy.sub(dot).mul(wide_y).mul(scale).to(y.scalar_type());
}

struct SoftmaxFunction : Function<SoftmaxFunction> {
  static constexpr bool is_traceable = true;
  static constexpr size_t kArguments = 4;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const OptionalTensor& mask, double scale, bool causal) {
    ctx->set_materialize_grads(false);
    Tensor y = below_autograd(SoftmaxVerbCall{input, mask, scale, causal});
    const bool additive = present(mask) && mask->requires_grad();
    ctx->save_for_backward({y, additive ? *mask : Tensor()});  // the mask for its shape and dtype
    ctx->saved_data["numbers"] = std::vector<double>{scale};
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(kArguments);
    if (!grads[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const Tensor &dy = grads[0], &y = saved[0], &mask = saved[1];
    const double scale = ctx->saved_data["numbers"].toDoubleVector()[0];
    if (!mask.defined() || !ctx->needs_input_grad(1)) {
      result[0] = softmax_backward(dy, y, scale);
      return result;
    }
    // Not rounded before the sum over what the mask was broadcast to, nor to a dtype that the mask does not have.
    const Tensor dlogits = softmax_backward(dy, y.to(acc_dtype(y)), 1.0);
    if (ctx->needs_input_grad(0)) result[0] = at::mul(dlogits, scale).to(y.scalar_type());
    result[1] = dlogits.sum_to_size_symint(mask.sym_sizes()).to(mask.scalar_type());
    return result;
  }
};

Tensor softmax_autograd(const Tensor& input, const OptionalTensor& mask, double scale, bool causal) {
  const SoftmaxVerbCall call{input, mask, scale, causal};
  if (needs_definition(input, mask) || !accepts(call)) return reference(call);
  if (!torch::autograd::compute_requires_grad(input, mask)) return below_autograd(call);
  // Backward reads y, which for a mask of more digits than the input must have as many.
  const auto dtype = present(mask) && mask->requires_grad() ? at::promote_types(input.scalar_type(), mask->scalar_type())
                                                            : input.scalar_type();
  return SoftmaxFunction::apply(input.to(dtype), mask, scale, causal).to(input.scalar_type());
}

void implement_family_autograd(torch::Library& m) {
  m.impl("pointwise", pointwise_autograd);
  m.impl("reduce", reduce_autograd);
  m.impl("softmax", softmax_autograd);
}

}  // namespace

// The specific keys rather than the alias `Autograd`, which the Python stubs occupy (native/schemas.py).
TORCH_LIBRARY_IMPL(kernel_fusion, AutogradCPU, m) { implement_family_autograd(m); }
TORCH_LIBRARY_IMPL(kernel_fusion, AutogradCUDA, m) { implement_family_autograd(m); }
TORCH_LIBRARY_IMPL(kernel_fusion, AutogradMeta, m) { implement_family_autograd(m); }

}  // namespace kf
