// The row norms. A call is one object, filled once where an operator begins and passed on by reference; the plain norm is the
// norm with nothing around it. The lists of the operators' arguments stand here and nowhere else: the
// types of the operators are those of `plain_call`, `staged_call`, `forward_call` and `backward_call`.
#pragma once

#include <c10/util/Exception.h>

#include <array>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "operators.h"

namespace kf {

// What a norm computes, tensors apart:
//     h = residual + dropout(pre_activation(x)),  y = activation(norm(h) * (weight_offset + weight) + bias)
// h is rounded to the residual's dtype before it is normalised; without a residual it is not rounded. With `hf` norm(h)
// is rounded to that dtype, or without a residual to x's, and, where there is a weight, the argument of the activation to the
// promoted dtype of that and the weight's. With a gate there are no other stages:
//     y = (norm(x) * (weight_offset + weight) + bias) * gate_activation(gate)
// or, with `gate_first`, the norm is that of x * gate_activation(gate), which is not rounded.
struct Norm {
  int64_t num_dims;
  double weight_offset;
  bool rms;
  int32_t pre_activation = 0, activation = 0;  // positions in KF_ACTIVATIONS, 0: none
  Dropout dropout;
  bool hf = false;
  int32_t gate_activation = 0;
  bool gate_first = false;
};

inline const OptionalTensor kAbsent;

struct ForwardCall : Norm {
  const Tensor& input;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  double eps;
  OptionalDtype out_dtype;                   // none: that of the input
  const OptionalTensor& residual = kAbsent;  // of the input's shape
  const OptionalTensor& seed = kAbsent;      // of dropout
  const OptionalTensor& gate = kAbsent;      // of the input's shape
  bool wants_stats = false;

  at::ScalarType y_dtype() const { return out_dtype.value_or(input.scalar_type()); }
  // The row beside the input: the residual or the gate, at most one of the two.
  const OptionalTensor& other() const { return present(gate) ? gate : residual; }
  bool has_stages() const { return present(other()) || pre_activation || activation || dropout; }
};

// What backward normalises again is `input`: h where there is a residual, else x.
struct BackwardCall : Norm {
  const Tensor& dy;
  const Tensor& input;
  const Tensor& stats;
  const OptionalTensor& weight;
  OptionalDtype bias_dtype;
  std::array<bool, 4> wants;   // dx, dweight, dbias, dresidual, which is the gradient of the gate where there is one
  at::ScalarType x_dtype;      // of dx
  const OptionalTensor& dh;    // the gradient that arrives at h, or none
  const OptionalTensor& x;     // where there are both a residual and a pre-activation: x itself
  const OptionalTensor& bias;  // where there is an activation, whose argument is computed again, or a gate
  bool has_residual;
  const OptionalTensor& seed;  // of dropout
  const OptionalTensor& gate;

  // The row beside the input: x or the gate.
  const OptionalTensor& other() const { return present(gate) ? gate : x; }
  bool has_other() const { return has_residual || present(gate); }  // whose gradient may be wanted
};

// Whether each group of columns, along the dimension before the normalised ones, has parameters of its own: they may have that
// dimension where there is a gate.
template <class Call> bool is_grouped(const Call& c) {
  const auto has = [&](const OptionalTensor& t) { return present(t) && t->dim() > c.num_dims; };
  return present(c.gate) && c.input.dim() > c.num_dims && (has(c.weight) || has(c.bias));
}
template <class Call> int64_t groups_of(const Call& c) {
  return is_grouped(c) ? c.input.size(c.input.dim() - c.num_dims - 1) : 1;
}

// f(every tensor of the call).
template <class F> auto with_tensors(const ForwardCall& c, F&& f) { return f(c.input, c.weight, c.bias, c.other(), c.seed); }
template <class F> auto with_tensors(const BackwardCall& c, F&& f) {
  return f(c.dy, c.input, c.stats, c.weight, c.dh, c.x, c.bias, c.seed, c.gate);
}

// ---- Operators: from their arguments, and back -----------------------------------------------------------------------------

// rms_norm's eps=None: the machine epsilon of the compute type.
inline double resolve_eps(const Tensor&, double eps) { return eps; }
double resolve_eps(const Tensor& input, std::optional<double> eps);

// Whether the rounding of this name is that of Hugging Face's norms; raises where none is called so.
inline bool is_hf(std::string_view rounding) {
  TORCH_CHECK_VALUE(rounding == "hf" || rounding == "once", "kernel_fusion: no rounding is called '", rounding, "'");
  return rounding == "hf";
}
inline std::string_view rounding_of(const Norm& norm) { return norm.hf ? "hf" : "once"; }

inline Norm norm_of(int64_t num_dims, double weight_offset, bool rms, std::string_view pre_activation,
                    std::string_view activation, Dropout dropout, std::string_view rounding, bool gated,
                    std::string_view gate_activation, bool gate_first) {
  const int32_t of_gate = code_of(gate_activation);  // raises also where there is no gate to apply it to
  return {num_dims,
          weight_offset,
          rms,
          code_of(pre_activation),
          code_of(activation),
          dropout,
          is_hf(rounding),
          gated ? of_gate : 0,
          gated && gate_first};
}

// The call of layer_norm, whose eps is a double, or of rms_norm, whose eps is optional.
template <class Eps>
ForwardCall plain_call(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias, Eps eps,
                       double weight_offset, OptionalDtype out_dtype) {
  return {{num_dims, weight_offset, !std::is_same_v<Eps, double>}, input, weight, bias, resolve_eps(input, eps), out_dtype};
}

// That of staged_row_norm and its definition.
inline ForwardCall staged_call(const Tensor& input, const OptionalTensor& residual, int64_t num_dims,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps, double weight_offset,
                               OptionalDtype out_dtype, bool rms, std::string_view pre_activation, std::string_view activation,
                               double dropout_p, const OptionalTensor& seed, std::string_view rounding,
                               const OptionalTensor& gate, std::string_view gate_activation, bool gate_first) {
  const Norm norm = norm_of(num_dims, weight_offset, rms, pre_activation, activation, dropout_of(dropout_p, seed), rounding,
                            present(gate), gate_activation, gate_first);
  return {norm, input, weight, bias, eps, out_dtype, residual, norm.dropout ? seed : kAbsent, gate};
}

// That of row_norm_fwd, where the residual stands behind what every norm has.
inline ForwardCall forward_call(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, double weight_offset, OptionalDtype out_dtype, bool rms,
                                const OptionalTensor& residual, std::string_view pre_activation, std::string_view activation,
                                double dropout_p, const OptionalTensor& seed, std::string_view rounding,
                                const OptionalTensor& gate, std::string_view gate_activation, bool gate_first) {
  return staged_call(input, residual, num_dims, weight, bias, eps, weight_offset, out_dtype, rms, pre_activation, activation,
                     dropout_p, seed, rounding, gate, gate_activation, gate_first);
}

// That of row_norm_bwd.
inline BackwardCall backward_call(const Tensor& dy, const Tensor& input, const Tensor& stats, int64_t num_dims,
                                  const OptionalTensor& weight, OptionalDtype bias_dtype, double weight_offset, bool rms,
                                  std::array<bool, 4> wants, OptionalDtype x_dtype, const OptionalTensor& dh,
                                  const OptionalTensor& x, const OptionalTensor& bias, bool has_residual,
                                  std::string_view pre_activation, std::string_view activation, double dropout_p,
                                  const OptionalTensor& seed, std::string_view rounding, const OptionalTensor& gate,
                                  std::string_view gate_activation, bool gate_first) {
  const Norm norm = norm_of(num_dims, weight_offset, rms, pre_activation, activation, dropout_of(dropout_p, seed), rounding,
                            present(gate), gate_activation, gate_first);
  return {norm,
          dy,
          input,
          stats,
          weight,
          bias_dtype,
          wants,
          x_dtype.value_or(input.scalar_type()),
          dh,
          x,
          bias,
          has_residual,
          norm.dropout ? seed : kAbsent,
          gate};
}

// f(the arguments that make this call).
template <class F> auto with_arguments(const ForwardCall& c, F&& f) {
  return f(c.input, c.residual, c.num_dims, c.weight, c.bias, c.eps, c.weight_offset, c.out_dtype, c.rms,
           kActivationNames[c.pre_activation], kActivationNames[c.activation], c.dropout.p(), c.seed, rounding_of(c), c.gate,
           kActivationNames[c.gate_activation], c.gate_first);
}
template <class F> auto with_arguments(const BackwardCall& c, F&& f) {
  return f(c.dy, c.input, c.stats, c.num_dims, c.weight, c.bias_dtype, c.weight_offset, c.rms, c.wants, c.x_dtype, c.dh, c.x,
           c.bias, c.has_residual, kActivationNames[c.pre_activation], kActivationNames[c.activation], c.dropout.p(), c.seed,
           rounding_of(c), c.gate, kActivationNames[c.gate_activation], c.gate_first);
}

// ---- Results ---------------------------------------------------------------------------------------------------------------

using StagedResult = std::tuple<Tensor, Tensor>;                    // y, h
using ForwardResult = std::tuple<Tensor, Tensor, Tensor>;           // y, stats, h
using BackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // dx, dweight, dbias, dresidual

// An operator returns defined tensors: without elements where there is no result.
void define(Tensor& t, const Tensor& input, OptionalDtype dtype);

// What a verb returns: y, or y and h.
template <class Result> Result verb_result(Tensor y, Tensor h, const Tensor& input) {
  if constexpr (std::is_same_v<Result, Tensor>) {
    return y;
  } else {
    define(h, input, input.scalar_type());
    return {std::move(y), std::move(h)};
  }
}

// Whether the kernels can serve a call. What they can't serve goes to the eager definition, which holds the error texts.
bool accepts(const ForwardCall& call);

// The eager definition, kernel_fusion/backends/eager: raises, or serves the call with differentiable PyTorch operations.
StagedResult reference(const ForwardCall& call);

// ---- Devices ---------------------------------------------------------------------------------------------------------------

// Kernels fill what was allocated, at least one element, and leave alone what is undefined because nobody wants it.
// h is undefined without a residual. dresidual is the gradient of h, dh included, in the residual's dtype, and dx is made of
// the same before it is rounded; with a gate it is the gradient of the gate, in the gate's dtype.
using ForwardKernel = void(const ForwardCall& call, Tensor& y, Tensor& stats, Tensor& h);
using BackwardKernel = void(const BackwardCall& call, Tensor& dx, Tensor& dweight, Tensor& dbias, Tensor& dresidual);

ForwardKernel forward_cpu, forward_cuda;
BackwardKernel backward_cpu, backward_cuda;

// Allocate, then fill. Forward takes calls that `accepts` accepts; backward checks its own.
ForwardResult forward(const Backend& backend, const ForwardCall& call);
BackwardResult backward(const Backend& backend, const BackwardCall& call);

}  // namespace kf
