// The autograd of the rotary embedding: which calls the kernels take, and the backward node.
#include <ATen/core/Tensor.h>
#include <ATen/ops/alias_ops.h>

#include "node.h"

namespace kf {
namespace {

RotaryResult call_verb(const RotaryCall& c) {
  static const auto& op = find_op("kernel_fusion::qk_norm_rope");
  return call_operator<RotaryResult>(op, c);
}

RotaryResult below_autograd(c10::DispatchKeySet keys, const RotaryCall& c) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto* backend = direct(keys);
  return backend && backend->rotary ? rotary(*backend, c) : call_verb(c);
}

RotaryGradients call_backward(const RotaryBwdCall& c) {
  const auto* backend =
      direct(keys_of(c.dy, c.dy_key, c.query, c.key, c.query_weight, c.key_weight, c.cos, c.sin, c.positions));
  if (backend && backend->rotary_bwd) return rotary_bwd(*backend, c);
  static const auto& op = find_op("kernel_fusion::qk_norm_rope_bwd");
  return call_operator<RotaryGradients>(op, c);
}

struct RotaryBackward : SavingNode {
  enum { kInputs, kCos = kInputs + 4, kSin, kPositions };  // inputs: query, key and their weights
  const std::optional<double> eps;
  const double weight_offset;
  const bool interleaved, is_hf;

  explicit RotaryBackward(const RotaryCall& c)
      : eps(c.eps), weight_offset(c.weight_offset), interleaved(c.interleaved), is_hf(c.rounding == "hf") {}

  std::string name() const override { return "RotaryBackward"; }

  std::string key() const override { return key_of(eps.has_value(), eps.value_or(0), weight_offset, interleaved, is_hf); }

  variable_list gradients(variable_list&& grads) override {
    variable_list list = no_gradients();
    const std::array<OptionalTensor, 2> dy{optional(grads[0]), grads.size() > 1 ? optional(grads[1]) : std::nullopt};
    if (!dy[0] && !dy[1]) return list;
    // If only the key's result has a gradient, the key takes the place of the query.
    const size_t first = dy[0] ? 0 : 1;
    const bool both = dy[0] && dy[1];
    std::array<OptionalTensor, 4> x;
    for (size_t i = 0; i < x.size(); ++i) x[i] = optional(saved(kInputs + i));
    const Tensor cos = saved(kCos), sin = saved(kSin);
    const OptionalTensor positions = optional(saved(kPositions));
    const auto second = [&](const OptionalTensor& t) -> const OptionalTensor& { return both ? t : kAbsent; };
    const std::array<bool, 4> wanted{wants(first), both && wants(1), wants(2 + first), both && wants(3)};
    const RotaryBwdCall call{*dy[first], second(dy[1]), x[first], second(x[1]),  x[2 + first], second(x[3]),          cos,
                             sin,        positions,     eps,      weight_offset, interleaved,  is_hf ? "hf" : "once", wanted};
    const auto found = at::GradMode::is_enabled() ? differentiable(call) : call_backward(call);
    const auto& [dx, dx_key, dweight, dweight_key] = found;
    if (wanted[0]) list[first] = dx;
    if (wanted[1]) list[1] = dx_key;
    if (wanted[2]) list[2 + first] = dweight;
    if (wanted[3]) list[3] = dweight_key;
    return list;
  }

  // The gradients as differentiable functions of everything, by the eager definition. Without a norm they are the rotation by
  // the negative angles. With a norm the definition is run again and differentiated.
  static RotaryGradients differentiable(const RotaryBwdCall& c) {
    if (!c.eps) {
      const auto [query, key] = reference(
          {c.dy, c.dy_key, kAbsent, kAbsent, c.cos, c.sin.neg(), c.positions, std::nullopt, 0.0, c.interleaved, "once"});
      return {query, key, {}, {}};
    }
    // The inputs are replaced by aliases, because the weights may depend on the query, whose gradient must not include theirs.
    std::array<OptionalTensor, 4> x{c.query, c.key, c.query_weight, c.key_weight};
    for (auto& t : x)
      if (t) t = at::_ops::alias::call(*t);
    const auto [query, key] =
        reference({*x[0], x[1], x[2], x[3], c.cos, c.sin, c.positions, c.eps, c.weight_offset, c.interleaved, c.rounding});
    variable_list outputs{query}, dys{c.dy}, inputs;
    if (present(c.dy_key)) {
      outputs.push_back(key);
      dys.push_back(*c.dy_key);
    }
    for (size_t i = 0; i < x.size(); ++i)
      if (c.wants[i]) inputs.push_back(*x[i]);
    auto found = differentiate(outputs, inputs, dys);
    std::array<Tensor, 4> result;
    for (size_t i = 0, next = 0; i < x.size(); ++i)
      if (c.wants[i]) result[i] = std::move(found[next++]);
    return {result[0], result[1], result[2], result[3]};
  }
};

RotaryResult rotary_autograd(c10::DispatchKeySet keys, const RotaryCall& call) {
  const auto& [query, key, query_weight, key_weight, cos, sin, positions, eps, weight_offset, interleaved, rounding] = call;
  if (is_of_other_kernels(call)) return by_other_kernels(call);
  // The kernels have no gradients of cos and sin.
  if (needs_definition(query, key, query_weight, key_weight, cos, sin) || compute_requires_grad(cos, sin) || !accepts(call))
    return reference(call);
  RotaryResult result = below_autograd(keys, call);
  const bool of_query = compute_requires_grad(query, query_weight), of_key = compute_requires_grad(key, key_weight);
  if (!of_query && !of_key) return result;
  // A tensor that needs no gradient is not part of the node.
  const bool both = of_query && of_key;
  const Tensor& x = of_query ? query : *key;
  const OptionalTensor &weight = of_query ? query_weight : key_weight, &other = both ? key : kAbsent;
  const RotaryCall of_node{x,           other,   weight, both ? key_weight : kAbsent, cos, sin, positions, eps, weight_offset,
                           interleaved, rounding};
  const auto& [y, y_key] = result;
  const TensorRef inputs[] = {x, other, weight, of_node.key_weight};
  c10::SmallVector<TensorRef, 2> results;
  if (of_query) results.push_back(y);
  if (of_key) results.push_back(y_key);
  c10::SmallVector<TensorRef, 7> saved;
  for (const auto& each : inputs) saved.push_back(eps ? each : kAbsent);  // without a norm backward only rotates dy
  saved.append({cos, sin, positions});
  set_history(std::make_unique<RotaryBackward>(of_node), inputs, results, saved);
  return result;
}

}  // namespace

static const Implements rotary_at_autograd("qk_norm_rope", KF_AUTOGRAD_KEYS,
                                           Implementation<rotary_call, rotary_autograd>::kernel);

}  // namespace kf
