// The row norms. A call is one object, filled once where an operator begins and passed on by reference; the plain norm is the
// norm without stages.
#pragma once

#include <c10/util/Exception.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

#include "backends.h"
#include "dispatch.h"
#include "stage_arguments.h"

namespace kf {

inline constexpr std::string_view kPassesNames[] = {"both", "first", "second"};

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
  Passes passes = Passes::kBoth;

  bool is_hf() const { return rounding == Rounding::kHf; }
};

struct ForwardCall : Norm, StageTensors {
  static constexpr const char* kName = "staged_row_norm";
  using Result = StagedRowNormCall::Result;
  const Tensor& input;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  double eps;
  OptionalDtype out_dtype;                   // none: the input's
  const OptionalTensor& residual = kAbsent;  // of the input's shape
  const OptionalTensor& sums = kAbsent;      // of all pieces of the rows, for the second pass
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

  // The arguments of staged_row_norm.
  template <class F> auto arguments(F&& f) const {
    return with_stages(*this, *this, [&](const auto&... stages) {
      return f(input, residual, num_dims, weight, bias, eps, weight_offset, out_dtype, rms, stages...);
    });
  }
  template <class F> auto tensors(F&& f) const {
    return std::apply([&](const auto*... stages) { return f(input, weight, bias, residual, sums, *stages...); }, all);
  }
};

// Backward normalises `input` again: h with a residual, else x.
struct BackwardCall : Norm, StageTensors {
  using Result = RowNormBwdCall::Result;
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
  const OptionalTensor& sums = kAbsent;  // of all pieces of the rows, for the second pass

  // The row beside the input: a stage's, or x.
  const OptionalTensor& other() const { return present(row()) ? row() : x; }
  bool has_other() const { return has_residual || present(row()); }  // whose gradient may be wanted

  // The arguments of row_norm_bwd.
  template <class F> auto arguments(F&& f) const {
    return with_stages(*this, *this, [&](const auto&... stages) {
      return f(dy, input, stats, num_dims, weight, bias_dtype, weight_offset, rms, wants, OptionalDtype(x_dtype), dh, x, bias,
               has_residual, stages..., kPassesNames[static_cast<int>(passes)], sums);
    });
  }
  template <class F> auto tensors(F&& f) const {
    return std::apply([&](const auto*... stages) { return f(dy, input, stats, weight, dh, x, bias, sums, *stages...); }, all);
  }
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

// rms_norm's eps=None: the machine epsilon of the compute type.
inline double resolve_eps(const Tensor&, double eps) { return eps; }
double resolve_eps(const Tensor& input, std::optional<double> eps);

inline Passes passes_of(std::string_view name) { return named<Passes>(kPassesNames, name, "passes"); }

// The call of an operator. layer_norm and rms_norm have no stages.
template <class Call> ForwardCall norm_of(const Call& c) {
  if constexpr (requires { c.rms; }) {
    const auto [options, tensors] = stages_of(c);
    Norm norm{options, c.num_dims, c.weight_offset, c.rms};
    const auto* sums = &kAbsent;
    if constexpr (requires { c.passes; }) {
      norm.passes = passes_of(c.passes);
      sums = &c.sums;
    }
    return {norm, tensors, c.input, c.weight, c.bias, c.eps, c.out_dtype, c.residual, *sums};
  } else {
    constexpr bool kRms = std::is_same_v<Call, RmsNormCall>;
    return {{{}, c.num_dims, c.weight_offset, kRms}, {}, c.input, c.weight, c.bias, resolve_eps(c.input, c.eps), c.out_dtype};
  }
}
inline BackwardCall norm_of(const RowNormBwdCall& c) {
  const auto [options, tensors] = stages_of(c);
  const auto dx_dtype = c.x_dtype.value_or(c.input.scalar_type());
  const Norm norm{options, c.num_dims, c.weight_offset, c.rms, passes_of(c.passes)};
  return {norm,          tensors,  c.dy, c.input, c.stats, c.weight,       c.bias_dtype,
          c.output_mask, dx_dtype, c.dh, c.x,     c.bias,  c.has_residual, c.sums};
}

// ---- Results ---------------------------------------------------------------------------------------------------------------

using ForwardResult = RowNormFwdCall::Result;  // y, or in a first pass the sums; stats, h

// Undefined where it is not wanted. After a first pass dx is the sums.
struct RowNormGradients {
  Tensor dx, dweight, dbias, dresidual, dgate;
  std::array<Tensor*, 5> all() { return {&dx, &dweight, &dbias, &dresidual, &dgate}; }
};

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

// The same by the operators row_norm_fwd and row_norm_bwd, unless a backend is given to call directly.
ForwardResult forward_by(const Backend* backend, const ForwardCall& call);
RowNormGradients backward_by(const Backend* backend, const BackwardCall& call);

// The same for rows that are spread over the ranks of process groups (row_norm_spread.cpp).
ForwardResult spread_forward(const Backend* backend, const ForwardCall& call, std::string_view groups);
RowNormGradients spread_backward(const Backend* backend, const BackwardCall& call, std::string_view groups);

}  // namespace kf
