// Norms of rows that are spread over the ranks of process groups: two passes over this rank's piece of each row, and between
// them an all-reduce of a few numbers for each row. Nothing here knows a collective library: the collectives are operators.
#include <ATen/core/LegacyTypeDispatch.h>

#include "row_norm.h"

namespace kf {
namespace {

// PyTorch's collectives as operators, which know a process group by its name.
struct AllReduceCall {
  using Result = Tensor;
  const Tensor& input;
  std::string_view reduction, group;
  template <class F> auto arguments(F&& f) const { return f(input, reduction, group); }
};
struct WaitCall {
  using Result = Tensor;
  const Tensor& input;
  template <class F> auto arguments(F&& f) const { return f(input); }
};

// The sums over the ranks of each group, whose names have spaces between. Only the collective that makes a new tensor can be
// traced. No sum has a gradient.
Tensor join(Tensor sums, std::string_view groups, bool in_place) {
  static const auto &all_reduce = any_op("_c10d_functional::all_reduce"),
                    &all_reduce_ = any_op("_c10d_functional::all_reduce_"), &wait = any_op("_c10d_functional::wait_tensor");
  const at::AutoDispatchBelowADInplaceOrView below;
  while (!groups.empty()) {
    const auto name = groups.substr(0, groups.find(' '));
    groups.remove_prefix(std::min(groups.size(), name.size() + 1));
    sums = call_boxed(in_place ? all_reduce_ : all_reduce, AllReduceCall{sums, "sum", name});
    sums = call_boxed(wait, WaitCall{sums});
  }
  return sums;
}

// The stages of a call without these tensors.
template <class... Absent> StageTensors without(StageTensors tensors, const Absent&... absent) {
  for (auto& each : tensors.all)
    if (((each == &absent) || ...)) each = &kAbsent;
  return tensors;
}

}  // namespace

ForwardResult forward_by(const Backend* backend, const ForwardCall& c) {
  if (backend) return forward(*backend, c);
  auto result = with_stages(c, c, [&](const auto&... stages) {
    const RowNormFwdCall call{c.input,
                              c.num_dims,
                              c.weight,
                              c.bias,
                              c.eps,
                              c.weight_offset,
                              c.out_dtype,
                              c.rms,
                              c.residual,
                              stages...,
                              kPassesNames[static_cast<int>(c.passes)],
                              c.sums};
    return call_boxed(operator_of<RowNormFwdCall>(), call);
  });
  if (!present(c.residual)) std::get<2>(result) = Tensor();  // the operator makes it empty
  return result;
}

RowNormGradients backward_by(const Backend* backend, const BackwardCall& c) {
  if (backend) return backward(*backend, c);
  return std::make_from_tuple<RowNormGradients>(call_boxed(operator_of<RowNormBwdCall>(), c));
}

ForwardResult spread_forward(const Backend* backend, const ForwardCall& c, std::string_view groups) {
  // The first pass has what stands before the norm.
  Norm before = c;
  before.passes = Passes::kFirst;
  before.activation = 0;
  before.rounding = Rounding::kOnce;
  before.weight_offset = 0.0;
  before.grouped = c.grouped && present(c.residual_gate());
  if (!c.gate_first) before.gate_activation = 0;
  const StageTensors& all = c;
  const StageTensors of_h = c.gate_first ? all : without(all, c.gate());
  auto [own, none, h] = forward_by(backend, {before, of_h, c.input, kAbsent, kAbsent, 0.0, std::nullopt, c.residual});
  const OptionalTensor sums = join(std::move(own), groups, backend);

  // The second one normalises h, or what the stages before it make of the input once more.
  Norm rest = c;
  rest.passes = Passes::kSecond;
  StageTensors of_y = all;
  if (h.defined()) {
    rest.pre_activation = 0;
    rest.dropout = {};
    of_y = without(all, c.seed(), c.residual_gate());
  }
  const Tensor& input = h.defined() ? h : c.input;
  auto [y, stats, unused] =
      forward_by(backend, {rest, of_y, input, c.weight, c.bias, c.eps, c.y_dtype(), kAbsent, sums, c.wants_stats});
  return {std::move(y), std::move(stats), std::move(h)};
}

RowNormGradients spread_backward(const Backend* backend, const BackwardCall& c, std::string_view groups) {
  const auto [wants_dx, wants_dweight, wants_dbias, wants_dresidual, wants_dgate] = c.wants;
  if (!wants_dx && !wants_dresidual && !wants_dgate) return backward_by(backend, c);  // no row is read as a whole
  BackwardCall first = c;
  first.passes = Passes::kFirst;
  first.wants = {false, wants_dweight, wants_dbias, false, false};
  RowNormGradients result = backward_by(backend, first);
  const OptionalTensor sums = join(std::move(result.dx), groups, backend);
  BackwardCall second{c,       c,         c.dy, c.input, c.stats, c.weight,       c.bias_dtype,
                      c.wants, c.x_dtype, c.dh, c.x,     c.bias,  c.has_residual, sums};
  second.passes = Passes::kSecond;
  second.wants = {wants_dx, false, false, wants_dresidual, wants_dgate};
  auto others = backward_by(backend, second);
  result.dx = std::move(others.dx);
  result.dresidual = std::move(others.dresidual);
  result.dgate = std::move(others.dgate);
  return result;
}

namespace {

// The operator below autograd.
SpreadRowNormCall::Result spread_row_norm(const Backend& backend, const SpreadRowNormCall& given) {
  const ForwardCall call = norm_of(given);
  if (!accepts(call)) return reference(given);
  auto [y, stats, h] = spread_forward(&backend, call, given.groups);
  return verb_result<SpreadRowNormCall::Result>(std::move(y), std::move(h), call.input);
}

const Implements spread_row_norm_kernels{"spread_row_norm", {&kCuda, &kMeta}, Boxed<spread_row_norm>::kernel};

}  // namespace

}  // namespace kf
