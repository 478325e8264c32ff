// The verbs at and above autograd: which calls the kernels take, the backward node, autocast.
//
// The fused path is left for the eager definition, a composition of ATen operations, wherever a transform must see
// through the operator: under torch.func, with a forward-mode tangent, and in a backward that is itself differentiated.
// (Without that, each of the three silently gives wrong results.)
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "activation_codes.h"
#include "node.h"

namespace kf {
namespace {

// ---- Below autograd ------------------------------------------------------------------------------------------------

ForwardResult call_forward(c10::DispatchKeySet keys, const ForwardCall& c) {
  if (const auto* backend = direct(keys)) return forward(*backend, c);
  static const auto op =
      find_op<ForwardResult(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, double, double, OptionalDtype,
                            bool, const OptionalTensor&, std::string_view, std::string_view, double, const OptionalTensor&)>(
          "kernel_fusion::row_norm_fwd");
  static const Stages none;
  const Stages& s = c.stages ? *c.stages : none;
  auto result = op.call(c.input, c.num_dims, c.weight, c.bias, c.eps, c.weight_offset, c.out_dtype, c.rms, s.residual,
                        kActivationNames[s.pre_activation], kActivationNames[s.activation], s.dropout.p(), s.seed);
  if (!present(s.residual)) std::get<2>(result) = Tensor();  // which the operator gives no elements
  return result;
}

BackwardResult call_backward(const BackwardCall& c) {
  static const BackwardStages none;
  const BackwardStages& s = c.stages ? *c.stages : none;
  if (const auto* backend = direct(with_tensors(c, keys_of))) return backward(*backend, c);
  static const auto op =
      find_op<BackwardResult(const Tensor&, const Tensor&, const Tensor&, int64_t, const OptionalTensor&, OptionalDtype, double,
                             bool, Wanted, OptionalDtype, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                             bool, std::string_view, std::string_view, double, const OptionalTensor&)>(
          "kernel_fusion::row_norm_bwd");
  return op.call(c.dy, c.input, c.stats, c.num_dims, c.weight, c.bias_dtype, c.weight_offset, c.rms, c.wants, c.x_dtype, s.dh,
                 s.x, s.bias, s.has_residual, kActivationNames[s.pre_activation], kActivationNames[s.activation],
                 s.dropout.p(), s.seed);
}

// ---- The node ------------------------------------------------------------------------------------------------------

// What the node of a norm with stages keeps beyond a bare one's.
struct SavedStages {
  SavedVariable x, seed;  // x where there are both a residual and a pre-activation
  at::ScalarType x_dtype, out_dtype;
  bool has_residual, saves_output;  // the latter: what is saved as input is h with its history
  int32_t pre_activation, activation;
  Dropout dropout;

  // Whether h = residual + x, so that both have the same gradient, up to its dtype.
  bool only_adds() const { return has_residual && pre_activation == 0 && !dropout; }
};

torch::autograd::edge_list edges_of(const ForwardCall& call) {
  using torch::autograd::collect_next_edges;
  return call.stages ? collect_next_edges(call.input, call.weight, call.bias, call.stages->residual)
                     : collect_next_edges(call.input, call.weight, call.bias);
}

// Backward of y, and of h where it is a result that depends on what requires a gradient.
struct RowNormBackward : SavingNode<RowNormBackward> {
  // input: what is normalised, as far as it is a tensor: h where there is a residual, else x. bias only for its dtype, an
  // activation's argument and double backward; it is a parameter, so keeping it costs no memory.
  SavedVariable input, weight, bias, stats;
  std::unique_ptr<SavedStages> stages;
  const int64_t num_dims;
  const double eps, weight_offset;
  const bool rms;

  RowNormBackward(const ForwardCall& call, const Tensor& call_stats)
      : SavingNode(edges_of(call)),
        weight(call.weight, /*is_output=*/false),
        bias(call.bias, /*is_output=*/false),
        stats(call_stats, /*is_output=*/false),
        num_dims(call.num_dims),
        eps(call.eps),
        weight_offset(call.weight_offset),
        rms(call.rms) {}

  // After the history of the results is set, because h may be one of them.
  void save(const ForwardCall& call, const Tensor& h) {
    const bool saves_output = h.defined() && h.requires_grad();
    input = SavedVariable(h.defined() ? h : call.input, saves_output);
    if (!call.stages) return;
    const Stages& s = *call.stages;
    stages = std::make_unique<SavedStages>();
    stages->x = SavedVariable(h.defined() && s.pre_activation ? OptionalTensor(call.input) : std::nullopt, /*is_output=*/false);
    stages->seed = SavedVariable(s.seed, /*is_output=*/false);
    stages->x_dtype = call.input.scalar_type();
    stages->out_dtype = call.out_dtype;
    stages->has_residual = h.defined();
    stages->saves_output = saves_output;
    stages->pre_activation = s.pre_activation;
    stages->activation = s.activation;
    stages->dropout = s.dropout;
  }

  std::string name() const override { return "RowNormBackward"; }

  template <class F> void each_saved(F&& f) {
    f(input);
    for (auto* saved : {&weight, &bias, &stats}) f(*saved);
    if (stages)
      for (auto* saved : {&stages->x, &stages->seed}) f(*saved);
  }

  variable_list gradients(variable_list&& grads) {
    const Tensor dh = grads.size() > 1 ? std::move(grads[1]) : Tensor();
    if (!grads[0].defined() && !dh.defined()) return variable_list(num_outputs());
    const Tensor saved = stages && stages->saves_output ? input.unpack(getptr()) : input.unpack();
    const Tensor dy = grads[0].defined() ? std::move(grads[0]) : at::zeros_like(saved, saved.options().dtype(stages->out_dtype));
    Wanted wants{};
    for (size_t i = 0; i < num_outputs(); ++i) wants[i] = task_should_compute_output(i);
    const OptionalTensor w = optional(weight.unpack()), b = optional(bias.unpack());
    if (at::GradMode::is_enabled()) return differentiable(dy, dh, saved, w, b, wants);
    BackwardCall call{dy, saved, stats.unpack(), num_dims, w, dtype_of(b), weight_offset, rms, wants, saved.scalar_type()};
    return stages ? staged(call, dh, b) : results(call_backward(call), wants);
  }

  variable_list results(BackwardResult&& gradients, const Wanted& wants) const {
    variable_list list(num_outputs());
    if (wants[0]) list[0] = std::move(std::get<0>(gradients));
    if (wants[1]) list[1] = std::move(std::get<1>(gradients));
    if (wants[2]) list[2] = std::move(std::get<2>(gradients));
    if (wants[3]) list[3] = std::move(std::get<3>(gradients));
    return list;
  }

  variable_list staged(BackwardCall& call, const Tensor& dh, const OptionalTensor& b) const {
    const SavedStages& s = *stages;
    const BackwardStages of_call{optional(dh),     optional(s.x.unpack()), s.activation ? b : std::nullopt,
                                 s.has_residual,   s.pre_activation,       s.activation,
                                 s.dropout,        optional(s.seed.unpack())};
    call.stages = &of_call;
    call.x_dtype = s.x_dtype;
    const Wanted wants = call.wants;
    const bool same = s.only_adds() && s.x_dtype == call.input.scalar_type();
    if (same) call.wants = {wants[0] || wants[3], wants[1], wants[2], false};
    auto gradients = call_backward(call);
    if (same) std::get<3>(gradients) = std::get<0>(gradients);
    return results(std::move(gradients), wants);
  }

  // The gradients as differentiable functions of everything: those of the eager definition, which is run again. Behind h they
  // reach x and the residual through the history of h, which is this node.
  variable_list differentiable(const Tensor& dy, const Tensor& dh, const Tensor& saved, const OptionalTensor& w,
                               const OptionalTensor& b, const Wanted& wants) const {
    const bool behind_h = stages && stages->has_residual;
    // Aliases, so that no gradient is also looked for behind what was normalised, which may depend on the parameters too.
    const auto alias = [](const OptionalTensor& t) { return t ? OptionalTensor(at::alias(*t)) : std::nullopt; };
    const std::array<OptionalTensor, 3> tensors{at::alias(behind_h ? saved.to(acc_dtype(saved)) : saved), alias(w), alias(b)};
    const std::array<bool, 3> needed{wants[0] || wants[3], wants[1], wants[2]};
    variable_list inputs, result(num_outputs());
    for (size_t i = 0; i < 3; ++i)
      if (needed[i]) inputs.push_back(*tensors[i]);
    auto gradients = differentiate(definition(*tensors[0], tensors[1], tensors[2], dy.scalar_type()), inputs, dy);
    for (size_t i = 0, next = 0; i < 3; ++i)
      if (needed[i]) result[i] = std::move(gradients[next++]);
    if (!behind_h || !needed[0]) return result;
    const Tensor total = dh.defined() ? result[0].add(dh) : result[0];
    result[0] = wants[0] ? before_h(total) : Tensor();
    if (wants[3]) result[3] = total.to(saved.scalar_type());
    return result;
  }

  // y of the input, in the definition; behind an h there is only the norm and its activation left.
  Tensor definition(const Tensor& x, const OptionalTensor& w, const OptionalTensor& b, at::ScalarType dtype) const {
    if (!stages) return reference(x, num_dims, w, b, eps, weight_offset, dtype, rms);
    Stages s{std::nullopt, 0, stages->activation};
    if (!stages->has_residual) {
      s.pre_activation = stages->pre_activation;
      s.dropout = stages->dropout;
      s.seed = optional(stages->seed.unpack());
    }
    return std::get<0>(staged_reference(x, num_dims, w, b, eps, weight_offset, dtype, rms, s));
  }

  // dx of h = residual + dropout(pre_activation(x)), from the gradient of h.
  Tensor before_h(const Tensor& total) const {
    const SavedStages& s = *stages;
    if (s.only_adds()) return total.to(s.x_dtype);
    if (!s.pre_activation) return chain(total, 0).to(s.x_dtype);
    const Tensor x = s.x.unpack();
    return differentiate(chain(x.to(total.scalar_type()).contiguous(), s.pre_activation), {x}, total)[0];
  }

  // dropout(activation(t)) by the definition. Of contiguous t, since the position of an element is its place in memory.
  Tensor chain(const Tensor& t, int32_t activation) const {
    static const auto op = find_op<Tensor(const Tensor&, const OptionalTensor&, std::string_view, std::string_view, double, double,
                                          const OptionalTensor&)>("kernel_fusion::pointwise_reference");
    return op.call(t.contiguous(), std::nullopt, "first", kActivationNames[activation], 1.0, stages->dropout.p(),
                   optional(stages->seed.unpack()));
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(input, /*is_output=*/stages && stages->saves_output);
    for (const auto* saved : {&weight, &bias, &stats}) args.collect(*saved, /*is_output=*/false);
    args.collect(num_dims);
    args.collect(eps);
    args.collect(weight_offset);
    args.collect(rms);
    if (!stages) return;
    for (const auto* saved : {&stages->x, &stages->seed}) args.collect(*saved, /*is_output=*/false);
    for (const bool flag : {stages->has_residual, stages->saves_output}) args.collect(flag);
    for (const auto dtype : {stages->x_dtype, stages->out_dtype}) args.collect(dtype);
    for (const int32_t code : {stages->pre_activation, stages->activation}) args.collect(code);
    args.collect(stages->dropout.threshold);
  }
};

// ---- The verbs -----------------------------------------------------------------------------------------------------

void set_history(const ForwardCall& call, const Tensor& y, const Tensor& stats, const Tensor& h) {
  const auto node = new_node<RowNormBackward>(call, stats);
  torch::autograd::set_history(y, node);
  if (h.defined() && torch::autograd::compute_requires_grad(call.input, call.stages->residual))
    torch::autograd::set_history(h, node);
  node->save(call, h);
}

template <bool rms> const auto& verb() {
  static const auto op = find_op<Verb<rms>>(rms ? "kernel_fusion::rms_norm" : "kernel_fusion::layer_norm");
  return op;
}

template <bool rms>
Tensor autograd(c10::DispatchKeySet keys, const Tensor& input, int64_t num_dims, const OptionalTensor& weight,
                const OptionalTensor& bias, Eps<rms> optional_eps, double weight_offset, OptionalDtype out_dtype) {
  const double eps = resolve_eps(input, optional_eps);
  if (needs_definition(input, weight, bias) ||
      !accepts(input, num_dims, weight, bias, weight_offset, out_dtype))
    return reference(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms);
  const bool training = torch::autograd::compute_requires_grad(input, weight, bias);
  const auto dtype = out_dtype.value_or(input.scalar_type());
  const ForwardCall call{input, num_dims, weight, bias, eps, weight_offset, dtype, rms, training};
  Tensor y, stats, h;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (training) {
      std::tie(y, stats, h) = call_forward(keys, call);
    } else if (const auto* backend = direct(keys)) {
      y = std::get<0>(forward(*backend, call));
    } else {
      y = verb<rms>().redispatch(keys & c10::after_ADInplaceOrView_keyset, input, num_dims, weight, bias, optional_eps,
                                 weight_offset, out_dtype);
    }
  }
  if (training) set_history(call, y, stats, h);
  return y;
}

const auto& staged_verb() {
  static const auto op = find_op<StagedVerb>("kernel_fusion::staged_row_norm");
  return op;
}

StagedResult staged_autograd(c10::DispatchKeySet keys, const Tensor& input, const OptionalTensor& residual, int64_t num_dims,
                             const OptionalTensor& weight, const OptionalTensor& bias, double eps, double weight_offset,
                             OptionalDtype out_dtype, bool rms, std::string_view pre_activation, std::string_view activation,
                             double dropout_p, const OptionalTensor& seed) {
  const Stages stages = make_stages(residual, pre_activation, activation, dropout_p, seed);
  if (needs_definition(input, residual, weight, bias) ||
      !accepts(input, num_dims, weight, bias, weight_offset, out_dtype) || !accepts(input, stages))
    return staged_reference(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms, stages);
  if (!torch::autograd::compute_requires_grad(input, residual, weight, bias)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return staged_verb().redispatch(keys & c10::after_ADInplaceOrView_keyset, input, residual, num_dims, weight, bias, eps,
                                    weight_offset, out_dtype, rms, pre_activation, activation, dropout_p, seed);
  }
  const auto dtype = out_dtype.value_or(input.scalar_type());
  const ForwardCall call{input, num_dims, weight, bias, eps, weight_offset, dtype, rms, /*wants_stats=*/true, &stages};
  Tensor y, stats, h;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::tie(y, stats, h) = call_forward(keys, call);
  }
  set_history(call, y, stats, h);
  return {std::move(y), h.defined() ? std::move(h) : at::empty({0}, input.options())};
}

// A norm under autocast returns fp32, as torch.nn's does, but its input is not copied to fp32 first.
OptionalDtype autocast_dtype(const Tensor& input, OptionalDtype out_dtype) {
  const bool narrow = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  return !out_dtype && narrow ? at::kFloat : out_dtype;
}

template <bool rms>
Tensor autocast(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias, Eps<rms> eps,
                double weight_offset, OptionalDtype out_dtype) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return verb<rms>().call(input, num_dims, weight, bias, eps, weight_offset, autocast_dtype(input, out_dtype));
}

StagedResult staged_autocast(const Tensor& input, const OptionalTensor& residual, int64_t num_dims, const OptionalTensor& weight,
                             const OptionalTensor& bias, double eps, double weight_offset, OptionalDtype out_dtype, bool rms,
                             std::string_view pre_activation, std::string_view activation, double dropout_p,
                             const OptionalTensor& seed) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return staged_verb().call(input, residual, num_dims, weight, bias, eps, weight_offset, autocast_dtype(input, out_dtype), rms,
                            pre_activation, activation, dropout_p, seed);
}

void implement_autograd(torch::Library& m) {
  m.impl("staged_row_norm", staged_autograd);
  m.impl("layer_norm", autograd<false>);
  m.impl("rms_norm", autograd<true>);
}

}  // namespace

// The specific keys rather than the alias `Autograd`, which the Python stubs occupy (operators/stubs.py).
TORCH_LIBRARY_IMPL(kernel_fusion, AutogradCPU, m) { implement_autograd(m); }
TORCH_LIBRARY_IMPL(kernel_fusion, AutogradCUDA, m) { implement_autograd(m); }
TORCH_LIBRARY_IMPL(kernel_fusion, AutogradMeta, m) { implement_autograd(m); }

TORCH_LIBRARY_IMPL(kernel_fusion, AutocastCUDA, m) {
  m.impl("layer_norm", autocast<false>);
  m.impl("rms_norm", autocast<true>);
  m.impl("staged_row_norm", staged_autocast);
}

}  // namespace kf
