// The rotary embedding: checks, allocation, the backward node. Python computes the shapes for tracing (operators/meta.py).
#include "rotary.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/alias_ops.h>

#include "verb.h"

namespace kf {

namespace {

bool goes_with(const Tensor& t, const Tensor& query) {
  return readable(t) && mixes(query.scalar_type(), t.scalar_type()) && t.device() == query.device();
}

bool are_heads(const OptionalTensor& x, const Tensor& query) {
  if (!present(x)) return true;
  if (!readable(*x) || x->dim() != 4 || x->scalar_type() != query.scalar_type() || x->device() != query.device()) return false;
  return alike(x->sym_size(0), query.sym_size(0)) && alike(x->sym_size(1), query.sym_size(1)) &&
         alike(x->sym_size(3), query.sym_size(3)) &&
         possible(x->sym_size(2).sym_gt(0)) == possible(query.sym_size(2).sym_gt(0));
}

bool is_weight(const OptionalTensor& weight, const RotaryCall& c, bool has_heads) {
  if (!present(weight)) return !has_heads || c.weight_offset == 0.0;
  return c.eps && goes_with(*weight, c.query) && weight->dim() == 1 && alike(weight->sym_size(0), c.query.sym_size(3));
}

bool are_positions(const OptionalTensor& positions, const Tensor& query) {
  if (!present(positions)) return true;
  const bool counts = positions->scalar_type() == at::kInt || positions->scalar_type() == at::kLong;
  return counts && positions->layout() == at::kStrided && positions->device() == query.device() && positions->dim() == 2 &&
         (alike(positions->sym_size(0), query.sym_size(0)) || one(positions->sym_size(0))) &&
         alike(positions->sym_size(1), query.sym_size(1));
}

bool are_tables(const RotaryCall& c) {
  if (!goes_with(c.cos, c.query) || !goes_with(c.sin, c.query) || c.cos.dim() != 3 || c.sin.dim() != 3) return false;
  if (c.cos.scalar_type() != c.sin.scalar_type() || c.sin.dim() != 3) return false;
  for (int d = 0; d < 3; ++d)
    if (!alike(c.cos.sym_size(d), c.sin.sym_size(d))) return false;
  const bool is_table = present(c.positions);
  const auto examples = c.cos.sym_size(0), half = c.cos.sym_size(2);
  return ((!is_table && alike(examples, c.query.sym_size(0))) || one(examples)) &&
         (is_table || alike(c.cos.sym_size(1), c.query.sym_size(1))) && possible(half.sym_gt(0)) &&
         possible((half * 2).sym_le(c.query.sym_size(3)));
}

// Whether this is a call on a GPU that the CUDA kernels do not serve. Python then looks for another backend.
bool is_of_other_kernels(const RotaryCall& c) {
  return c.query.is_cuda() &&
         (!cuda_enabled(c.query.device().index()) || (c.eps && c.query.dim() == 4 && c.query.sym_size(3) > kLongestHead));
}

}  // namespace

bool accepts(const RotaryCall& c) {
  const bool known = c.rounding == "once" || c.rounding == "hf";
  return known && !is_of_other_kernels(c) && readable(c.query) && c.query.dim() == 4 && are_heads(c.key, c.query) &&
         are_tables(c) && are_positions(c.positions, c.query) && is_weight(c.query_weight, c, true) &&
         is_weight(c.key_weight, c, present(c.key));
}

RotaryResult without_kernels(const RotaryCall& c) {
  if (!is_of_other_kernels(c)) return reference(c);
  static const auto& op = find_op(RotaryCall::kName, "_on_gpu");
  return call_boxed(op, c);
}

namespace {

// An uninitialised result for x, with the layout that `result_like` in core/rotary.py gives it.
Tensor result_like(const Tensor& x) {
  Tensor like = allocate_like(x);
  return like.stride(-1) == 1 || like.size(-1) == 1 ? like : allocate_like(x, at::MemoryFormat::Contiguous);
}

Tensor nothing(const Tensor& like) { return allocate({0}, like.options()); }

constexpr Kernels rotary_kernels{rotary_cpu, rotary_cuda};
constexpr Kernels rotary_bwd_kernels{rotary_bwd_cpu, rotary_bwd_cuda};

}  // namespace

RotaryResult compute(const Backend& backend, const RotaryCall& c) {
  c.tensors(check_all_memory);
  Tensor query = result_like(c.query), key = present(c.key) ? result_like(*c.key) : Tensor();
  if (query.numel()) rotary_kernels(backend, c, query, key);
  return {query, key.defined() ? key : nothing(query)};
}

RotaryGradients compute(const Backend& backend, const RotaryBwdCall& c) {
  const OptionalTensor dy(c.dy), &query = c.eps ? c.query : dy, &key = c.eps ? c.key : c.dy_key;
  TORCH_CHECK(present(query) && present(key) == present(c.dy_key) &&
                  accepts({*query, key, c.query_weight, c.key_weight, c.cos, c.sin, c.positions, c.eps, c.weight_offset,
                           c.interleaved, c.rounding}) &&
                  goes_with(c.dy, *query) && c.dy.sizes().equals(query->sizes()) &&
                  (!present(key) || (goes_with(*c.dy_key, *query) && c.dy_key->sizes().equals(key->sizes()))),
              "kernel_fusion::qk_norm_rope_bwd: arguments that its kernels do not take");
  check_all_memory(c.dy, c.dy_key, query, key, c.query_weight, c.key_weight, c.cos, c.sin, c.positions);
  const auto wanted = [&](int i, const OptionalTensor& t, auto like) {
    return c.output_mask[i] && present(t) ? like(*t) : Tensor();
  };
  const auto row_like = [](const Tensor& weight) { return allocate_like(weight, at::MemoryFormat::Contiguous); };
  RotaryGradients gradients{wanted(0, query, result_like), wanted(1, key, result_like), wanted(2, c.query_weight, row_like),
                            wanted(3, c.key_weight, row_like)};
  if (c.dy.numel()) rotary_bwd_kernels(backend, c, gradients);
  else std::apply([](auto&... each) { ((each.defined() ? void(each.zero_()) : void()), ...); }, gradients);
  std::apply([&](auto&... each) { ((each.defined() ? void() : void(each = nothing(*query))), ...); }, gradients);
  return gradients;
}

// ---- Autograd
// ----------------------------------------------------------------------------------------------------------------

namespace {

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
    const auto found = at::GradMode::is_enabled() ? differentiable(call) : compute_by(call.tensors(keys_of), call);
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
      const auto [query, key] = reference(RotaryCall{c.dy, c.dy_key, kAbsent, kAbsent, c.cos, c.sin.neg(), c.positions,
                                                     std::nullopt, 0.0, c.interleaved, "once"});
      return {query, key, {}, {}};
    }
    // The inputs are replaced by aliases, because the weights may depend on the query, whose gradient must not include theirs.
    std::array<OptionalTensor, 4> x{c.query, c.key, c.query_weight, c.key_weight};
    for (auto& t : x)
      if (t) t = at::_ops::alias::call(*t);
    const auto [query, key] = reference(
        RotaryCall{*x[0], x[1], x[2], x[3], c.cos, c.sin, c.positions, c.eps, c.weight_offset, c.interleaved, c.rounding});
    variable_list outputs{query}, dys{c.dy}, inputs;
    if (present(c.dy_key)) {
      outputs.push_back(key);
      dys.push_back(*c.dy_key);
    }
    for (size_t i = 0; i < x.size(); ++i)
      if (c.output_mask[i]) inputs.push_back(*x[i]);
    auto found = differentiate(outputs, inputs, dys);
    std::array<Tensor, 4> result;
    for (size_t i = 0, next = 0; i < x.size(); ++i)
      if (c.output_mask[i]) result[i] = std::move(found[next++]);
    return {result[0], result[1], result[2], result[3]};
  }
};

}  // namespace

RotaryResult record(c10::DispatchKeySet keys, const RotaryCall& call) {
  const auto& [query, key, query_weight, key_weight, cos, sin, positions, eps, weight_offset, interleaved, rounding] = call;
  if (compute_requires_grad(cos, sin)) return reference(call);  // the kernels have no gradients of them
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

static const Verb<RotaryCall> rotary_verb;
static const Part<RotaryBwdCall> rotary_part;

}  // namespace kf
