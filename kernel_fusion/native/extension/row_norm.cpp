// The row-norm operators above the kernels: checks, allocation, autograd, autocast, shapes for tracing, registration.
//
// Autograd sits on the Autograd keys in C++. It leaves the fused path for the eager definition, a composition of ATen
// operations, wherever a transform must see through the operator: under torch.func, with a forward-mode tangent, and in
// a backward that is itself differentiated. (Without that, each of the three silently gives wrong results.)
#include "row_norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace kf {

bool cuda_enabled(int device);  // launcher.cpp

namespace {

template <class Signature> auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

bool supported(at::ScalarType t) { return t == at::kHalf || t == at::kBFloat16 || t == at::kFloat || t == at::kDouble; }

// fp64 goes with fp64, the three others with each other.
bool mixes(at::ScalarType a, at::ScalarType b) { return supported(b) && (a == at::kDouble) == (b == at::kDouble); }

bool fits(const OptionalTensor& t, const Tensor& input, int64_t num_dims) {
  if (!present(t)) return true;
  if (t->dim() != num_dims || t->device() != input.device() || t->layout() != at::kStrided ||
      !mixes(input.scalar_type(), t->scalar_type()))
    return false;
  for (int64_t i = 0; i < num_dims; ++i)
    if (t->sym_size(i) != input.sym_size(input.dim() - num_dims + i)) return false;
  return true;
}

}  // namespace

double resolve_eps(const Tensor& input, std::optional<double> eps) {
  if (eps) return *eps;
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
}

bool accepts(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
             double weight_offset, const OptionalDtype& out_dtype) {
  return supported(input.scalar_type()) && input.layout() == at::kStrided && num_dims >= 1 && num_dims <= input.dim() &&
         (!input.is_cuda() || cuda_enabled(input.device().index())) && fits(weight, input, num_dims) && fits(bias, input, num_dims) &&
         (weight_offset == 0.0 || present(weight)) && (!out_dtype || mixes(input.scalar_type(), *out_dtype));
}

Tensor reference(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                 double eps, double weight_offset, const OptionalDtype& out_dtype, bool rms) {
  static const auto op =
      find_op<Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, double, double, OptionalDtype, bool)>(
          "kernel_fusion::row_norm_reference");
  return op.call(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms);
}

namespace {

ForwardResult call_forward(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps, double weight_offset, OptionalDtype out_dtype, bool rms) {
  static const auto op = find_op<ForwardResult(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, double,
                                               double, OptionalDtype, bool)>("kernel_fusion::row_norm_fwd");
  return op.call(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms);
}

BackwardResult call_backward(const Tensor& dy, const Tensor& input, const Tensor& stats, int64_t num_dims,
                             const OptionalTensor& weight, OptionalDtype bias_dtype, double weight_offset, bool rms,
                             std::array<bool, 3> wants) {
  static const auto op = find_op<BackwardResult(const Tensor&, const Tensor&, const Tensor&, int64_t, const OptionalTensor&,
                                                OptionalDtype, double, bool, std::array<bool, 3>)>(
      "kernel_fusion::row_norm_bwd");
  return op.call(dy, input, stats, num_dims, weight, bias_dtype, weight_offset, rms, wants);
}

// ---- Kernels' side: allocate, then fill ----------------------------------------------------------------------------

// stats has one leading dimension: (mean, rstd), or (rstd) for RMSNorm. Shapes of the rest: those of the rows.
Tensor empty_stats(const Tensor& input, int64_t num_dims, bool rms) {
  c10::SmallVector<c10::SymInt, 6> shape{c10::SymInt(rms ? 1 : 2)};
  for (int64_t i = 0; i < input.dim() - num_dims; ++i) shape.push_back(input.sym_size(i));
  return at::empty_symint(shape, input.options().dtype(acc_dtype(input)));
}

Tensor empty_output(const Tensor& input, at::ScalarType dtype) {
  return at::empty_symint(input.sym_sizes(), input.options().dtype(dtype));
}

using ForwardKernel = void (*)(const ForwardCall&, Tensor&, Tensor&);
using BackwardKernel = void (*)(const BackwardCall&, Tensor&, Tensor&, Tensor&);

// A null kernel stands for tracing: shapes and dtypes alone.
template <ForwardKernel kernel, bool rms>
Tensor inference(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                 double weight_offset, OptionalDtype out_dtype) {
  if (!accepts(input, num_dims, weight, bias, weight_offset, out_dtype))
    return reference(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms);
  const auto dtype = out_dtype.value_or(input.scalar_type());
  Tensor y = empty_output(input, dtype), stats;
  if constexpr (kernel != nullptr) {
    if (y.numel()) kernel({input, num_dims, weight, bias, eps, weight_offset, dtype, rms, false}, y, stats);
  }
  return y;
}

template <ForwardKernel kernel>
Tensor layer_norm(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  double weight_offset, OptionalDtype out_dtype) {
  return inference<kernel, false>(input, num_dims, weight, bias, eps, weight_offset, out_dtype);
}

template <ForwardKernel kernel>
Tensor rms_norm(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                std::optional<double> eps, double weight_offset, OptionalDtype out_dtype) {
  return inference<kernel, true>(input, num_dims, weight, bias, resolve_eps(input, eps), weight_offset, out_dtype);
}

template <ForwardKernel kernel>
ForwardResult row_norm_fwd(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps, double weight_offset, OptionalDtype out_dtype, bool rms) {
  TORCH_CHECK(accepts(input, num_dims, weight, bias, weight_offset, out_dtype),
              "kernel_fusion::row_norm_fwd: arguments that its kernels do not take; call kernel_fusion.layer_norm instead");
  const auto dtype = out_dtype.value_or(input.scalar_type());
  Tensor y = empty_output(input, dtype), stats = empty_stats(input, num_dims, rms);
  if constexpr (kernel != nullptr) {
    if (y.numel()) kernel({input, num_dims, weight, bias, eps, weight_offset, dtype, rms, true}, y, stats);
  }
  return {y, stats};
}

template <BackwardKernel kernel>
BackwardResult row_norm_bwd(const Tensor& dy, const Tensor& input, const Tensor& stats, int64_t num_dims,
                            const OptionalTensor& weight, OptionalDtype bias_dtype, double weight_offset, bool rms,
                            std::array<bool, 3> wants) {
  TORCH_CHECK(accepts(input, num_dims, weight, std::nullopt, weight_offset, dy.scalar_type()) &&
                  dy.sym_sizes() == input.sym_sizes() && dy.device() == input.device() &&
                  stats.scalar_type() == acc_dtype(input) && stats.sym_numel() == empty_stats(input, num_dims, rms).sym_numel(),
              "kernel_fusion::row_norm_bwd: arguments that its kernels do not take");
  TORCH_CHECK((present(weight) || !wants[1]) && (bias_dtype || !wants[2]),
              "kernel_fusion::row_norm_bwd: a gradient was asked for a parameter that is not there");
  const auto shape = input.sym_sizes().slice(input.dim() - num_dims);
  const auto parameter = [&](bool wanted, OptionalDtype dtype) {
    const auto options = input.options().dtype(dtype.value_or(acc_dtype(input)));
    return wanted ? at::empty_symint(shape, options) : at::empty({0}, options);
  };
  Tensor dx = wants[0] ? empty_output(input, input.scalar_type()) : at::empty({0}, input.options());
  Tensor dweight = parameter(wants[1], dtype_of(weight)), dbias = parameter(wants[2], bias_dtype);
  if constexpr (kernel != nullptr) {
    if (input.numel()) {
      kernel({dy, input, stats, num_dims, weight, bias_dtype, weight_offset, rms, wants}, dx, dweight, dbias);
    } else {  // no rows: the sums over them are zero
      dweight.zero_();
      dbias.zero_();
    }
  }
  return {dx, dweight, dbias};
}

// ---- Autograd ------------------------------------------------------------------------------------------------------

bool inside_functorch() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(0).defined(); }
bool has_tangent(const OptionalTensor& t) { return present(t) && has_tangent(*t); }
bool wants_grad(const OptionalTensor& t) { return present(t) && t->requires_grad(); }

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RowNorm : torch::autograd::Function<RowNorm> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t num_dims, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, double weight_offset, OptionalDtype out_dtype, bool rms) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, stats] = call_forward(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms);
    // bias only for its dtype and for double backward; it is a parameter, so keeping it costs no memory.
    ctx->save_for_backward({input, weight.value_or(Tensor()), bias.value_or(Tensor()), stats});
    ctx->saved_data["num_dims"] = num_dims;
    ctx->saved_data["rms"] = rms;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["weight_offset"] = weight_offset;
    ctx->set_materialize_grads(false);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(8);  // one per argument of forward
    if (!grads[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &bias = saved[2], &stats = saved[3];
    // needs_input_grad counts tensors only.
    const size_t bias_index = weight.defined() ? 2 : 1;
    const std::array<bool, 3> wants{ctx->needs_input_grad(0), weight.defined() && ctx->needs_input_grad(1),
                                    bias.defined() && ctx->needs_input_grad(bias_index)};
    if (at::GradMode::is_enabled()) {
      differentiable_backward(ctx, grads[0], input, weight, bias, wants, result);
      return result;
    }
    auto [dx, dweight, dbias] = call_backward(
        grads[0], input, stats, ctx->saved_data["num_dims"].toInt(), weight.defined() ? OptionalTensor(weight) : std::nullopt,
        bias.defined() ? OptionalDtype(bias.scalar_type()) : std::nullopt, ctx->saved_data["weight_offset"].toDouble(),
        ctx->saved_data["rms"].toBool(), wants);
    if (wants[0]) result[0] = dx;
    if (wants[1]) result[2] = dweight;
    if (wants[2]) result[3] = dbias;
    return result;
  }

  // The gradients as differentiable functions of everything: those of the eager definition, which is run again.
  static void differentiable_backward(AutogradContext* ctx, const Tensor& dy, const Tensor& input, const Tensor& weight,
                                      const Tensor& bias, std::array<bool, 3> wants, variable_list& result) {
    const auto optional = [](const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; };
    const Tensor y = reference(input, ctx->saved_data["num_dims"].toInt(), optional(weight), optional(bias),
                               ctx->saved_data["eps"].toDouble(), ctx->saved_data["weight_offset"].toDouble(),
                               dy.scalar_type(), ctx->saved_data["rms"].toBool());
    const std::array<const Tensor*, 3> tensors{&input, &weight, &bias};
    constexpr std::array<size_t, 3> arguments{0, 2, 3};
    variable_list inputs;
    for (size_t i = 0; i < 3; ++i)
      if (wants[i]) inputs.push_back(*tensors[i]);
    auto gradients = torch::autograd::grad({y}, inputs, {dy}, /*retain_graph=*/true, /*create_graph=*/true);
    for (size_t i = 0, next = 0; i < 3; ++i)
      if (wants[i]) result[arguments[i]] = gradients[next++];
  }
};

template <bool rms, class Below>
Tensor differentiable(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                      double weight_offset, OptionalDtype out_dtype, Below&& below) {
  if (inside_functorch() || has_tangent(input) || has_tangent(weight) || has_tangent(bias) ||
      !accepts(input, num_dims, weight, bias, weight_offset, out_dtype))
    return reference(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms);
  if (at::GradMode::is_enabled() && (input.requires_grad() || wants_grad(weight) || wants_grad(bias)))
    return RowNorm::apply(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms);
  at::AutoDispatchBelowADInplaceOrView guard;
  return below();
}

Tensor layer_norm_autograd(c10::DispatchKeySet keys, const Tensor& input, int64_t num_dims, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, double weight_offset, OptionalDtype out_dtype) {
  static const auto op = find_op<Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, double, double,
                                        OptionalDtype)>("kernel_fusion::layer_norm");
  return differentiable<false>(input, num_dims, weight, bias, eps, weight_offset, out_dtype, [&] {
    return op.redispatch(keys & c10::after_autograd_keyset, input, num_dims, weight, bias, eps, weight_offset, out_dtype);
  });
}

Tensor rms_norm_autograd(c10::DispatchKeySet keys, const Tensor& input, int64_t num_dims, const OptionalTensor& weight,
                         const OptionalTensor& bias, std::optional<double> eps, double weight_offset, OptionalDtype out_dtype) {
  static const auto op = find_op<Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&,
                                        std::optional<double>, double, OptionalDtype)>("kernel_fusion::rms_norm");
  return differentiable<true>(input, num_dims, weight, bias, resolve_eps(input, eps), weight_offset, out_dtype, [&] {
    return op.redispatch(keys & c10::after_autograd_keyset, input, num_dims, weight, bias, eps, weight_offset, out_dtype);
  });
}

// Autocast: a norm returns fp32, as torch.nn's does, but its input is not copied to fp32 first.
template <class Eps>
Tensor autocast(const char* name, const Tensor& input, int64_t num_dims, const OptionalTensor& weight,
                const OptionalTensor& bias, Eps eps, double weight_offset, OptionalDtype out_dtype) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  const bool narrow = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  const auto op = find_op<Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, Eps, double,
                                 OptionalDtype)>(name);
  return op.call(input, num_dims, weight, bias, eps, weight_offset, !out_dtype && narrow ? at::kFloat : out_dtype);
}

Tensor layer_norm_autocast(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps, double weight_offset, OptionalDtype out_dtype) {
  return autocast("kernel_fusion::layer_norm", input, num_dims, weight, bias, eps, weight_offset, out_dtype);
}

Tensor rms_norm_autocast(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                         std::optional<double> eps, double weight_offset, OptionalDtype out_dtype) {
  return autocast("kernel_fusion::rms_norm", input, num_dims, weight, bias, eps, weight_offset, out_dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(kernel_fusion, CPU, m) {
  m.impl("layer_norm", layer_norm<forward_cpu>);
  m.impl("rms_norm", rms_norm<forward_cpu>);
  m.impl("row_norm_fwd", row_norm_fwd<forward_cpu>);
  m.impl("row_norm_bwd", row_norm_bwd<backward_cpu>);
}

TORCH_LIBRARY_IMPL(kernel_fusion, CUDA, m) {
  m.impl("layer_norm", layer_norm<forward_cuda>);
  m.impl("rms_norm", rms_norm<forward_cuda>);
  m.impl("row_norm_fwd", row_norm_fwd<forward_cuda>);
  m.impl("row_norm_bwd", row_norm_bwd<backward_cuda>);
}

TORCH_LIBRARY_IMPL(kernel_fusion, Meta, m) {
  m.impl("layer_norm", layer_norm<nullptr>);
  m.impl("rms_norm", rms_norm<nullptr>);
  m.impl("row_norm_fwd", row_norm_fwd<nullptr>);
  m.impl("row_norm_bwd", row_norm_bwd<nullptr>);
}

#define KF_REGISTER_AUTOGRAD(key)                    \
  TORCH_LIBRARY_IMPL(kernel_fusion, key, m) {        \
    m.impl("layer_norm", layer_norm_autograd);       \
    m.impl("rms_norm", rms_norm_autograd);           \
  }
// The specific keys rather than the alias `Autograd`, which the Python stubs occupy (native/schemas.py).
KF_REGISTER_AUTOGRAD(AutogradCPU)
KF_REGISTER_AUTOGRAD(AutogradCUDA)
KF_REGISTER_AUTOGRAD(AutogradMeta)

TORCH_LIBRARY_IMPL(kernel_fusion, AutocastCUDA, m) {
  m.impl("layer_norm", layer_norm_autocast);
  m.impl("rms_norm", rms_norm_autocast);
}

}  // namespace kf
