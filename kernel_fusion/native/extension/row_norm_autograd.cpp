// The verbs at and above autograd: which calls the kernels take, the backward node, autocast.
//
// If a transform must see through the operator, the eager definition, a composition of ATen operations, serves the call: under
// torch.func, with a forward-mode tangent, and in a differentiated backward. All three would otherwise be silently wrong.
#include <ATen/core/Tensor.h>
#include <ATen/ops/alias_ops.h>
#include <ATen/ops/zeros_like_ops.h>

#include "node.h"
#include "row_norm.h"

namespace kf {
namespace {

// ---- The node ------------------------------------------------------------------------------------------------------

// The tensors of a call's stages, as saved by a node.
struct UnpackedStages : StageTensors {
  std::array<OptionalTensor, kCount> held;
  template <class Unpack> explicit UnpackedStages(Unpack&& unpack) {
    for (size_t i = 0; i < held.size(); ++i) {
      held[i] = optional(unpack(i));
      all[i] = &held[i];
    }
  }
  UnpackedStages(const UnpackedStages&) = delete;
};

// Backward of y, and of h if that depends on something that requires a gradient.
struct RowNormBackward : SavingNode {
  // kInput: the normalised tensor: h with a residual, else x. kBias is for its dtype, groups and double backward, and read for
  // an activation's argument and a gate's gradient; keeping a parameter costs no memory. kX only with both a residual and a
  // pre-activation or a gate.
  enum { kInput, kWeight, kBias, kStats, kX, kStages };
  const Norm norm;
  const double eps;
  const at::ScalarType x_dtype, y_dtype;
  const bool has_residual, has_residual_gate;
  const std::string groups;  // over which rows are spread

  RowNormBackward(const ForwardCall& call, std::string_view groups)
      : norm(call), eps(call.eps), x_dtype(call.input.scalar_type()), y_dtype(call.y_dtype()),
        has_residual(present(call.residual)), has_residual_gate(present(call.residual_gate())), groups(groups) {}

  bool needs_x() const { return has_residual_gate || (has_residual && norm.pre_activation); }
  UnpackedStages stages() const {
    return UnpackedStages([&](size_t i) { return saved(kStages + i); });
  }

  std::string name() const override { return "RowNormBackward"; }

  std::string key() const override {
    return with_options(norm, [&](const auto&... options) {
      return key_of(norm.num_dims, norm.weight_offset, norm.rms, options..., eps, x_dtype, y_dtype, has_residual,
                    has_residual_gate, groups);
    });
  }

  // Whether h = residual + x, so that both have one gradient, up to its dtype.
  bool only_adds() const { return has_residual && norm.pre_activation == 0 && !norm.dropout && !has_residual_gate; }

  variable_list gradients(variable_list&& grads) override {
    const OptionalTensor dh = grads.size() > 1 ? optional(std::move(grads[1])) : std::nullopt;
    if (!grads[0].defined() && !dh) return no_gradients();
    if (!grads[0].defined() && only_adds()) return of_sum(*dh);
    std::array<bool, 5> wanted;  // without dy, weight and bias have no gradient, not one of zeros
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = wants(i) && (grads[0].defined() || (i != 1 && i != 2));
    return gradients(grads[0], dh, wanted);
  }

  // The gradients of x and the residual from that of their sum, as PyTorch passes them on: no kernel has anything to compute.
  variable_list of_sum(const Tensor& dh) const {
    variable_list list = no_gradients();
    if (wants(0)) list[0] = dh.to(x_dtype);
    if (wants(3)) list[3] = dh;
    return list;
  }

  // As the residual is a term of h, its gradient is that of h.
  variable_list through_y(const Tensor& dy, bool of_h, bool of_weight, bool of_bias) override {
    auto list = gradients(dy, std::nullopt, {false, of_weight, of_bias, of_h, false});
    return {std::move(list[3]), std::move(list[1]), std::move(list[2])};
  }

  variable_list gradients(const Tensor& given, const OptionalTensor& dh, const std::array<bool, 5>& wanted) {
    const Tensor input = saved(kInput);
    const Tensor dy = given.defined() ? given : at::_ops::zeros_like::call(input, y_dtype, {}, {}, {}, {});
    const OptionalTensor w = optional(saved(kWeight)), b = optional(saved(kBias));
    const UnpackedStages stages = this->stages();
    const bool differentiates = at::GradMode::is_enabled();
    if (differentiates && groups.empty()) return differentiable(dy, dh, {input, w, b, stages.row()}, stages, wanted);
    const at::NoGradGuard no_grad;
    const bool same = only_adds() && x_dtype == input.scalar_type();
    const auto of_kernel = same ? std::array{wanted[0] || wanted[3], wanted[1], wanted[2], false, false} : wanted;
    const Tensor stats = saved(kStats);
    const OptionalTensor x = optional(saved(kX));
    const BackwardCall call{
        norm,        stages,    dy,      input, stats, w,
        dtype_of(b), of_kernel, x_dtype, dh,    x,     norm.activation || norm.grouped || present(stages.row()) ? b : kAbsent,
        has_residual};
    const auto* backend = direct(call.tensors(keys_of));
    auto [dx, dweight, dbias, dresidual, dgate] =
        groups.empty() ? backward_by(backend, call) : spread_backward(backend, call, groups);
    if (same) dresidual = dx;
    variable_list list = no_gradients();
    if (wanted[0]) list[0] = std::move(dx);
    if (wanted[1]) list[1] = std::move(dweight);
    if (wanted[2]) list[2] = std::move(dbias);
    if (wanted[3]) list[3] = std::move(dresidual);
    if (wanted[4]) list[4] = std::move(dgate);
    if (differentiates) refuse_derivatives(list, "gradients of gradients of rows that are spread over ranks");
    return list;
  }

  // The gradients as differentiable functions of everything, by running the eager definition again. Through h they reach x, the
  // residual and its gate by h's history, which is this node.
  variable_list differentiable(const Tensor& dy, const OptionalTensor& dh, std::array<OptionalTensor, 4> tensors,
                               const StageTensors& stages, const std::array<bool, 5>& wants) const {
    // Aliases keep gradients from also being looked for behind the normalised tensor, which may depend on the parameters.
    const auto type = tensors[0]->scalar_type();
    // (With kHf it keeps its dtype, which says what to round to.)
    if (has_residual && !norm.is_hf()) tensors[0] = tensors[0]->to(acc_dtype(*tensors[0]));
    for (auto& t : tensors)
      if (t) t = at::_ops::alias::call(*t);
    const std::array<bool, 4> needed{wants[0] || (has_residual && (wants[3] || wants[4])), wants[1], wants[2],
                                     !has_residual && wants[3]};
    variable_list inputs, result = no_gradients();
    for (size_t i = 0; i < 4; ++i)
      if (needed[i]) inputs.push_back(*tensors[i]);
    auto gradients = differentiate(definition(tensors, stages, dy.scalar_type()), inputs, dy);
    for (size_t i = 0, next = 0; i < 4; ++i)
      if (needed[i]) result[i] = std::move(gradients[next++]);
    if (!has_residual || !needed[0]) return result;
    const Tensor total = dh ? result[0].add(*dh) : result[0];
    result[0] = Tensor();
    if (has_residual_gate) before_gated_h(total, stages.residual_gate(), wants, result);
    else if (wants[0]) result[0] = before_h(total);
    if (wants[3]) result[3] = total.to(type);
    return result;
  }

  // y by the definition, from the input, weight, bias and a stage's row; after an h, only the later stages.
  Tensor definition(const std::array<OptionalTensor, 4>& tensors, StageTensors stages, at::ScalarType dtype) const {
    const auto& [input, w, b, row] = tensors;
    for (auto& each : stages.all)
      if (each == &stages.row() && each != &kAbsent) each = &row;
      else if (each == &stages.residual_gate()) each = &kAbsent;
    Norm rest = norm;
    if (has_residual) {
      rest.pre_activation = 0;
      rest.dropout = {};
    }
    return std::get<0>(reference(ForwardCall{rest, stages, *input, w, b, eps, dtype}));
  }

  // dx and dgate of h = residual + gate * dropout(pre_activation(x)), from the gradient of h.
  void before_gated_h(const Tensor& total, const OptionalTensor& gate, const std::array<bool, 5>& wants,
                      variable_list& result) const {
    const Tensor before = at::_ops::alias::call(saved(kX)),
                 factor = at::_ops::alias::call(*gate);  // one may depend on the other
    const auto type = total.scalar_type();
    const Tensor added = chain(before.to(type), norm.pre_activation).mul(factor.to(type));
    variable_list inputs;
    if (wants[0]) inputs.push_back(before);
    if (wants[4]) inputs.push_back(factor);
    auto gradients = inputs.empty() ? variable_list() : differentiate(added, inputs, total);
    if (wants[0]) result[0] = gradients.front();
    if (wants[4]) result[4] = gradients.back();
  }

  // dx of h = residual + dropout(pre_activation(x)), from the gradient of h.
  Tensor before_h(const Tensor& total) const {
    if (only_adds()) return total.to(x_dtype);
    if (!norm.pre_activation) return chain(total, 0).to(x_dtype);
    const Tensor before = saved(kX);
    return differentiate(chain(before.to(total.scalar_type()).contiguous(), norm.pre_activation), {before}, total)[0];
  }

  // dropout(activation(t)) by the definition. t is contiguous, because an element's position is its place in memory.
  Tensor chain(const Tensor& t, int32_t activation) const {
    const UnpackedStages stages = this->stages();
    return reference(
        PointwiseCall{t.contiguous(), kAbsent, "first", kActivationNames[activation], 1.0, norm.dropout.p(), stages.seed()});
  }
};

void make_history(const ForwardCall& call, const Tensor& y, const Tensor& stats, const Tensor& h, std::string_view groups) {
  auto node = std::make_unique<RowNormBackward>(call, groups);
  const Tensor& input = h.defined() ? h : call.input;
  const bool reads_bias = call.activation || present(call.row());
  const bool reads_x = call.pre_activation || has_gradient(call.residual_gate()), reads_gate = has_gradient(call.input);
  const OptionalTensor x = node->needs_x() ? OptionalTensor(reads_x ? call.input : unread(call.input)) : std::nullopt;
  const OptionalTensor bias = reads_bias ? call.bias : unread(call.bias);
  const OptionalTensor gate = reads_gate ? call.residual_gate() : unread(call.residual_gate());
  c10::SmallVector<TensorRef, 8> saved{input, call.weight, bias, stats, x};
  for (const auto* each : call.all) saved.push_back(each == &call.residual_gate() ? gate : *each);
  const std::array<TensorRef, 5> inputs{call.input, call.weight, call.bias, call.other(), call.residual_gate()};
  if (h.defined() && compute_requires_grad(call.input, call.residual, call.residual_gate()))
    set_history_of_norm(std::move(node), inputs, y, h, saved);
  else set_history(std::move(node), inputs, {y}, saved);
}

// ---- The verbs -----------------------------------------------------------------------------------------------------

// Whether autocast runs the installed PyTorch's norm in fp32: RMSNorm since 2.12 (core/autocast.py).
bool is_widened(bool rms) {
  static const bool layer_norm = has_kernel("aten::layer_norm", c10::DispatchKey::AutocastCUDA),
                    rms_norm = has_kernel("aten::rms_norm", c10::DispatchKey::AutocastCUDA);
  return rms ? rms_norm : layer_norm;
}

template <class Call> struct NormVerb {
  using Result = typename Call::Result;
  static constexpr bool kSpread = std::is_same_v<Call, SpreadRowNormCall>;

  static std::string_view groups_of_ranks(const Call& given) {
    if constexpr (kSpread) return given.groups;
    else return {};
  }

  static Result autograd(c10::DispatchKeySet keys, const Call& given) {
    ForwardCall call = norm_of(given);
    if (call.tensors(needs_definition) || !accepts(call)) {
      if constexpr (kSpread) return reference(given);
      auto [y, h] = reference(call);
      return verb_result<Result>(std::move(y), std::move(h), call.input);
    }
    call.wants_stats = call.tensors(compute_requires_grad);
    Tensor y, stats, h;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      const auto* backend = direct(keys);
      if constexpr (kSpread) std::tie(y, stats, h) = spread_forward(backend, call, given.groups);
      else if (backend || call.wants_stats) std::tie(y, stats, h) = forward_by(backend, call);
      else return call_boxed(operator_of<Call>(), given, keys & c10::after_ADInplaceOrView_keyset);
    }
    if (call.wants_stats) make_history(call, y, stats, h, groups_of_ranks(given));
    return verb_result<Result>(std::move(y), std::move(h), call.input);
  }

  // The result is that of torch.nn's norm, whose input is not copied to fp32 first.
  static Result autocast(c10::DispatchKeySet, const Call& given) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
    const auto type = given.input.scalar_type();
    const bool narrow = type == at::kHalf || type == at::kBFloat16;
    Call call = given;
    if (const bool rms = norm_of(given).rms; !call.out_dtype && narrow && is_widened(rms)) call.out_dtype = at::kFloat;
    return call_boxed(operator_of<Call>(), call);
  }

  // Rows that are spread have kernels on GPUs alone.
  const Implements at_autograd =
      kSpread
          ? Implements(Call::kName, {c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutogradMeta}, Boxed<autograd>::kernel)
          : Implements(Call::kName, KF_AUTOGRAD_KEYS, Boxed<autograd>::kernel);
  const Implements at_autocast{Call::kName, {c10::DispatchKey::AutocastCUDA}, Boxed<autocast>::kernel};
};

const NormVerb<LayerNormCall> layer_norm_verb;
const NormVerb<RmsNormCall> rms_norm_verb;
const NormVerb<StagedRowNormCall> staged_row_norm_verb;
const NormVerb<SpreadRowNormCall> spread_row_norm_verb;

}  // namespace

}  // namespace kf
