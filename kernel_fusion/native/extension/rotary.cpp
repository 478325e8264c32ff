// The rotary embedding below autograd: checks, allocation and registration. Python computes the shapes for tracing
// (operators/meta.py).
#include "rotary.h"

#include "backends.h"
#include "dispatch.h"

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

}  // namespace

bool accepts(const RotaryCall& c) {
  const bool known = c.rounding == "once" || c.rounding == "hf";
  return known && readable(c.query) && c.query.dim() == 4 && are_heads(c.key, c.query) && are_tables(c) &&
         are_positions(c.positions, c.query) && is_weight(c.query_weight, c, true) &&
         is_weight(c.key_weight, c, present(c.key));
}

RotaryResult reference(const RotaryCall& c) {
  static const auto& op = find_op("kernel_fusion::qk_norm_rope_reference");
  return call_operator<RotaryResult>(op, c);
}

RotaryResult by_other_kernels(const RotaryCall& c) {
  static const auto& op = find_op("kernel_fusion::qk_norm_rope_on_gpu");
  return call_operator<RotaryResult>(op, c);
}

namespace {

// An uninitialised result for x, with the layout that `result_like` in core/rotary.py gives it.
Tensor result_like(const Tensor& x) {
  Tensor like = allocate_like(x);
  return like.stride(-1) == 1 || like.size(-1) == 1 ? like : allocate_like(x, at::MemoryFormat::Contiguous);
}

Tensor nothing(const Tensor& like) { return allocate({0}, like.options()); }

}  // namespace

RotaryResult rotary(const Backend& backend, const RotaryCall& c) {
  check_all_memory(c.query, c.key, c.query_weight, c.key_weight, c.cos, c.sin, c.positions);
  Tensor query = result_like(c.query), key = present(c.key) ? result_like(*c.key) : Tensor();
  if (query.numel()) backend.rotary(c, query, key);
  return {query, key.defined() ? key : nothing(query)};
}

RotaryGradients rotary_bwd(const Backend& backend, const RotaryBwdCall& c) {
  const OptionalTensor dy(c.dy), &query = c.eps ? c.query : dy, &key = c.eps ? c.key : c.dy_key;
  TORCH_CHECK(present(query) && !is_of_other_kernels(*query, c.eps.has_value()) && present(key) == present(c.dy_key) &&
                  accepts({*query, key, c.query_weight, c.key_weight, c.cos, c.sin, c.positions, c.eps, c.weight_offset,
                           c.interleaved, c.rounding}) &&
                  goes_with(c.dy, *query) && c.dy.sizes().equals(query->sizes()) &&
                  (!present(key) || (goes_with(*c.dy_key, *query) && c.dy_key->sizes().equals(key->sizes()))),
              "kernel_fusion::qk_norm_rope_bwd: arguments that its kernels do not take");
  check_all_memory(c.dy, c.dy_key, query, key, c.query_weight, c.key_weight, c.cos, c.sin, c.positions);
  const auto wanted = [&](int i, const OptionalTensor& t, auto like) { return c.wants[i] && present(t) ? like(*t) : Tensor(); };
  const auto row_like = [](const Tensor& weight) { return allocate_like(weight, at::MemoryFormat::Contiguous); };
  RotaryGradients gradients{wanted(0, query, result_like), wanted(1, key, result_like), wanted(2, c.query_weight, row_like),
                            wanted(3, c.key_weight, row_like)};
  if (c.dy.numel()) backend.rotary_bwd(c, gradients);
  else std::apply([](auto&... each) { ((each.defined() ? void(each.zero_()) : void()), ...); }, gradients);
  std::apply([&](auto&... each) { ((each.defined() ? void() : void(each = nothing(*query))), ...); }, gradients);
  return gradients;
}

namespace {

RotaryResult rotary_or_definition(const Backend& backend, const RotaryCall& call) {
  if (is_of_other_kernels(call)) return by_other_kernels(call);
  return accepts(call) ? rotary(backend, call) : reference(call);
}

const Implements rotary_kernels[] = {
    {"qk_norm_rope", {&kCpu, &kCuda}, Implementation<rotary_call, rotary_or_definition>::kernel},
    {"qk_norm_rope_bwd", {&kCpu, &kCuda}, Implementation<rotary_bwd_call, rotary_bwd>::kernel},
};

}  // namespace

}  // namespace kf
