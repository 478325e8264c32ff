// The row norms. A call is one object, filled once where an operator begins and passed on by reference; the plain norm is the
// norm without stages. Only `norm_call`, `plain_call` and `backward_call` list the operators' arguments and types.
#pragma once

#include <c10/util/Exception.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

#include "stage_arguments.h"

namespace kf {

// A norm without its tensors:
//     h = residual + residual_gate * dropout(pre_activation(x)),  y = activation(norm(h) * (weight_offset + weight) + bias)
// h is rounded to the residual's dtype before it is normalised; without a residual it is not rounded. kHf rounds norm(h) to
// that dtype (without a residual, to x's) and, with a weight, the activation's argument to the promoted dtype of that and the
// weight's. With a gate there are no other stages:
//     y = (norm(x) * (weight_offset + weight) + bias) * gate_activation(gate)
// or, with `gate_first`, the norm is of the unrounded x * gate_activation(gate).
struct Norm : StageOptions {
  int64_t num_dims;
  double weight_offset;
  bool rms;

  bool is_hf() const { return rounding == Rounding::kHf; }
};

struct ForwardCall : Norm, StageTensors {
  const Tensor& input;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  double eps;
  OptionalDtype out_dtype;                   // none: the input's
  const OptionalTensor& residual = kAbsent;  // of the input's shape
  bool wants_stats = false;

  at::ScalarType y_dtype() const { return out_dtype.value_or(input.scalar_type()); }
  // The row beside the input: a stage's or the residual, at most one of them.
  const OptionalTensor& other() const { return present(row()) ? row() : residual; }
  // Another rounding is no stage, and neither are groups.
  bool has_stages() const {
    StageOptions none;
    none.rounding = rounding;
    none.grouped = grouped;
    return present(other()) || none != *this;
  }
};

// Backward normalises `input` again: h with a residual, else x.
struct BackwardCall : Norm, StageTensors {
  const Tensor& dy;
  const Tensor& input;
  const Tensor& stats;
  const OptionalTensor& weight;
  OptionalDtype bias_dtype;
  std::array<bool, 5> wants;   // dx, dweight, dbias, dresidual or the gradient of a stage's row, dgate of the residual
  at::ScalarType x_dtype;      // of dx
  const OptionalTensor& dh;    // the gradient at h, or none
  const OptionalTensor& x;     // x itself, with both a residual and a pre-activation or a gate
  const OptionalTensor& bias;  // with an activation, whose argument is recomputed, a gate, or groups
  bool has_residual;

  // The row beside the input: a stage's, or x.
  const OptionalTensor& other() const { return present(row()) ? row() : x; }
  bool has_other() const { return has_residual || present(row()); }  // whose gradient may be wanted
};

// Groups of rows that share weight, bias and the residual's gate (core/groups.py): row r is one of group r / inner % count.
template <class Int> struct GroupsOf {
  Int count = 1, inner = 1;
  Int step() const { return inner == 1 ? count : Int(1); }  // from a row of a group to its next one
};
using Groups = GroupsOf<int64_t>;

// The groups of an input's rows, for parameters whose shape broadcasts to the input's; none if dimensions alternate.
template <class Int>
std::optional<GroupsOf<Int>> find_groups(c10::ArrayRef<Int> input, c10::ArrayRef<Int> parameter, int64_t num_dims) {
  GroupsOf<Int> groups;
  const auto leading = input.size() - num_dims, own = parameter.size() - num_dims;
  int changes = 0;
  bool begins = false, before = false, any = false;  // whether the parameters have the first, and the last, of the dimensions
  for (size_t d = 0; d < leading; ++d) {
    if (one(input[d])) continue;
    const bool has = d + own >= leading && !one(parameter[d + own - leading]);
    if (!any) begins = has;
    else changes += has != before;
    any = true;
    before = has;
    if (has) groups.count *= input[d];
    else if (begins) groups.inner *= input[d];
  }
  return changes > 1 ? std::nullopt : std::optional(groups);
}

// The parameter whose shape says which groups there are; absent without any.
template <class Call> const OptionalTensor& of_groups(const Call& c) {
  return !c.grouped ? kAbsent : present(c.weight) ? c.weight : present(c.bias) ? c.bias : c.residual_gate();
}
template <class Call> Groups groups_of(const Call& c) {
  const OptionalTensor& parameter = of_groups(c);
  return present(parameter) ? find_groups(c.input.sizes(), parameter->sizes(), c.num_dims).value() : Groups();
}

// The columns of weight, bias or the residual's gate: each group's begin a pitch apart.
struct GroupRows {
  Tensor tensor;       // undefined without a parameter
  int64_t pitch = 0;   // in elements
  int alignment = 16;  // of the columns of every group, in bytes

  GroupRows() = default;
  GroupRows(const OptionalTensor& t, int64_t num_dims, bool grouped);
};

// The statistics of rows in memory; null: absent.
struct Stats {
  char *mean = nullptr, *rstd = nullptr;
  Stats(const Tensor& stats, int64_t rows, bool rms) {
    if (!stats.defined()) return;
    rstd = static_cast<char*>(const_cast<void*>(stats.const_data_ptr()));
    if (!rms) mean = std::exchange(rstd, rstd + rows * stats.element_size());
  }
};

// f(every tensor of the call).
template <class F> auto with_tensors(const ForwardCall& c, F&& f) {
  return std::apply([&](const auto*... stages) { return f(c.input, c.weight, c.bias, c.residual, *stages...); }, c.all);
}
template <class F> auto with_tensors(const BackwardCall& c, F&& f) {
  return std::apply([&](const auto*... stages) { return f(c.dy, c.input, c.stats, c.weight, c.dh, c.x, c.bias, *stages...); },
                    c.all);
}

// ---- Operators: from their arguments, and back -----------------------------------------------------------------------------

// rms_norm's eps=None: the machine epsilon of the compute type.
inline double resolve_eps(const Tensor&, double eps) { return eps; }
double resolve_eps(const Tensor& input, std::optional<double> eps);

inline ForwardCall norm_call(const Tensor& input, const OptionalTensor& residual, const Stages& stages, int64_t num_dims,
                             const OptionalTensor& weight, const OptionalTensor& bias, double eps, double weight_offset,
                             OptionalDtype out_dtype, bool rms) {
  return {{stages.options, num_dims, weight_offset, rms}, stages.tensors, input, weight, bias, eps, out_dtype, residual};
}

// The call of layer_norm, whose eps is a double, or of rms_norm, whose eps is optional.
template <class Eps>
ForwardCall plain_call(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias, Eps eps,
                       double weight_offset, OptionalDtype out_dtype) {
  constexpr bool kRms = !std::is_same_v<Eps, double>;
  return norm_call(input, kAbsent, {}, num_dims, weight, bias, resolve_eps(input, eps), weight_offset, out_dtype, kRms);
}

// Each operator has the arguments of `norm_call`, those of the stages last.
template <auto make, class> struct Calls;
template <class... Rest, ForwardCall (*make)(const Tensor&, const OptionalTensor&, const Stages&, Rest...), class... Staged>
struct Calls<make, Types<Staged...>> {
  static ForwardCall staged(const Tensor& input, const OptionalTensor& residual, Rest... rest, Staged... stages) {
    return make(input, residual, stages_of(stages...), rest...);
  }
  static ForwardCall forward(const Tensor& input, Rest... rest, const OptionalTensor& residual, Staged... stages) {
    return make(input, residual, stages_of(stages...), rest...);
  }

  static BackwardCall backward(const Tensor& dy, const Tensor& input, const Tensor& stats, int64_t num_dims,
                               const OptionalTensor& weight, OptionalDtype bias_dtype, double weight_offset, bool rms,
                               std::array<bool, 5> wants, OptionalDtype x_dtype, const OptionalTensor& dh,
                               const OptionalTensor& x, const OptionalTensor& bias, bool has_residual, Staged... stages) {
    const auto [options, tensors] = stages_of(stages...);
    const auto dx_dtype = x_dtype.value_or(input.scalar_type());
    const Norm norm{options, num_dims, weight_offset, rms};
    return {norm, tensors, dy, input, stats, weight, bias_dtype, wants, dx_dtype, dh, x, bias, has_residual};
  }
};

// The calls of staged_row_norm and its definition, of row_norm_fwd, and of row_norm_bwd.
inline constexpr auto staged_call = &Calls<norm_call, StageArguments>::staged;
inline constexpr auto forward_call = &Calls<norm_call, StageArguments>::forward;
inline constexpr auto backward_call = &Calls<norm_call, StageArguments>::backward;

// f(the arguments that make this call); those of staged_row_norm.
template <class F> auto with_arguments(const ForwardCall& c, F&& f) {
  return with_stages(c, c, [&](const auto&... stages) {
    return f(c.input, c.residual, c.num_dims, c.weight, c.bias, c.eps, c.weight_offset, c.out_dtype, c.rms, stages...);
  });
}
template <class F> auto with_arguments(const BackwardCall& c, F&& f) {
  return with_stages(c, c, [&](const auto&... stages) {
    return f(c.dy, c.input, c.stats, c.num_dims, c.weight, c.bias_dtype, c.weight_offset, c.rms, c.wants, c.x_dtype, c.dh, c.x,
             c.bias, c.has_residual, stages...);
  });
}

// ---- Results ---------------------------------------------------------------------------------------------------------------

using StagedResult = std::tuple<Tensor, Tensor>;           // y, h
using ForwardResult = std::tuple<Tensor, Tensor, Tensor>;  // y, stats, h

// Undefined where it is not wanted.
struct RowNormGradients {
  Tensor dx, dweight, dbias, dresidual, dgate;
  std::array<Tensor*, 5> all() { return {&dx, &dweight, &dbias, &dresidual, &dgate}; }
};
using BackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // those, as an operator returns them

// An operator returns defined tensors; a missing result is an empty one.
void define(Tensor& t, const Tensor& input, OptionalDtype dtype);

// A verb's result: y, or y and h.
template <class Result> Result verb_result(Tensor y, Tensor h, const Tensor& input) {
  if constexpr (std::is_same_v<Result, Tensor>) {
    return y;
  } else {
    define(h, input, input.scalar_type());
    return {std::move(y), std::move(h)};
  }
}

// Whether the kernels can serve a call. Other calls go to the eager definition, which has the error texts.
bool accepts(const ForwardCall& call);

// The eager definition, kernel_fusion/backends/eager: raises, or serves the call with differentiable PyTorch operations.
StagedResult reference(const ForwardCall& call);

// ---- Devices ---------------------------------------------------------------------------------------------------------------

// Kernels fill at least one allocated element, and leave undefined tensors, which nobody wants, alone. h is undefined without a
// residual. dresidual is the gradient of h, dh included, in the residual's dtype, and dx is made from it before it is rounded;
// with a gate that is a row it is the gate's gradient, in the gate's dtype.
using ForwardKernel = void(const ForwardCall& call, Tensor& y, Tensor& stats, Tensor& h);
using BackwardKernel = void(const BackwardCall& call, RowNormGradients& to);

ForwardKernel forward_cpu, forward_cuda;
BackwardKernel backward_cpu, backward_cuda;

// Allocate, then fill. Forward takes calls that `accepts` accepts; backward checks its own.
ForwardResult forward(const Backend& backend, const ForwardCall& call);
RowNormGradients backward(const Backend& backend, const BackwardCall& call);

}  // namespace kf
