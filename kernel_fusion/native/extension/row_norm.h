// The row norms: their calls, as autograd and the operators of every device pass them on.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "operators.h"

namespace kf {

// A verb, which is layer_norm or rms_norm; they differ in the type of eps.
template <bool rms> using Eps = std::conditional_t<rms, std::optional<double>, double>;
template <bool rms>
using Verb = Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, Eps<rms>, double, OptionalDtype);

// The verb of a norm with stages: the output and h.
using StagedResult = std::tuple<Tensor, Tensor>;
using StagedVerb = StagedResult(const Tensor& input, const OptionalTensor& residual, int64_t num_dims,
                                const OptionalTensor& weight, const OptionalTensor& bias, double eps, double weight_offset,
                                OptionalDtype out_dtype, bool rms, std::string_view pre_activation,
                                std::string_view activation, double dropout_p, const OptionalTensor& seed);

// rms_norm's eps=None: the machine epsilon of the compute type.
double resolve_eps(const Tensor& input, std::optional<double> eps);

// Whether the kernels can serve a call. What they can't serve goes to the eager definition, which holds the error texts.
bool accepts(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
             double weight_offset, const OptionalDtype& out_dtype);

// The eager definition, kernel_fusion/backends/eager: raises, or serves the call with differentiable PyTorch operations.
Tensor reference(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                 double eps, double weight_offset, const OptionalDtype& out_dtype, bool rms);

// The stages around the norm: u = dropout(pre_activation(x)), h = residual + u, y = activation(norm(h) * w + b). h is rounded
// to the residual's dtype before it is normalised; without a residual it is not rounded.
struct Stages {
  OptionalTensor residual;  // of the input's shape
  int32_t pre_activation = 0, activation = 0;  // positions in KF_ACTIVATIONS, 0: none
  Dropout dropout;
  OptionalTensor seed;
};

// Those that the arguments of an operator name.
Stages make_stages(const OptionalTensor& residual, std::string_view pre_activation, std::string_view activation,
                   double dropout_p, const OptionalTensor& seed);

bool accepts(const Tensor& input, const Stages& stages);

// The definition of a norm with stages; `residual` of the result is h, or has no elements.
StagedResult staged_reference(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                              double eps, double weight_offset, const OptionalDtype& out_dtype, bool rms, const Stages& stages);

// What backward has of them. What it normalises again is `BackwardCall::input`: h where there is a residual, else x.
struct BackwardStages {
  OptionalTensor dh;  // the gradient that arrives at h, or none
  OptionalTensor x;   // where there are both a residual and a pre-activation: x itself
  OptionalTensor bias;  // where there is an activation, whose argument is computed again
  bool has_residual = false;
  int32_t pre_activation = 0, activation = 0;
  Dropout dropout;
  OptionalTensor seed;
};

// One direction on one device.
using ForwardResult = std::tuple<Tensor, Tensor, Tensor>;           // y, stats, h
using BackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // dx, dweight, dbias, dresidual
using Wanted = std::array<bool, 4>;                                 // of these

struct ForwardCall {
  const Tensor& input;
  int64_t num_dims;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  double eps, weight_offset;
  at::ScalarType out_dtype;
  bool rms, wants_stats;
  const Stages* stages = nullptr;  // null: none
};

// f(every tensor of the call).
template <class F> auto with_tensors(const ForwardCall& c, F&& f) {
  static const Stages none;
  const Stages& s = c.stages ? *c.stages : none;
  return f(c.input, c.weight, c.bias, s.residual, s.seed);
}

struct BackwardCall {
  const Tensor& dy;
  const Tensor& input;
  const Tensor& stats;
  int64_t num_dims;
  const OptionalTensor& weight;
  OptionalDtype bias_dtype;
  double weight_offset;
  bool rms;
  Wanted wants;
  at::ScalarType x_dtype;  // of dx
  const BackwardStages* stages = nullptr;  // null: none
};

template <class F> auto with_tensors(const BackwardCall& c, F&& f) {
  static const BackwardStages none;
  const BackwardStages& s = c.stages ? *c.stages : none;
  return f(c.dy, c.input, c.stats, c.weight, s.dh, s.x, s.bias, s.seed);
}

// Kernels fill what was allocated, at least one element, and leave alone what is undefined because nobody wants it.
// h is undefined without a residual. dresidual is the gradient of h, dh included, in the residual's dtype; dx is made of the
// same before it is rounded.
using ForwardKernel = void(const ForwardCall& call, Tensor& y, Tensor& stats, Tensor& h);
using BackwardKernel = void(const BackwardCall& call, Tensor& dx, Tensor& dweight, Tensor& dbias, Tensor& dresidual);

ForwardKernel forward_cpu, forward_cuda;
BackwardKernel backward_cpu, backward_cuda;

// Allocate, then fill. Forward takes calls that `accepts` accepts; backward checks its own.
ForwardResult forward(const Backend& backend, const ForwardCall& call);
BackwardResult backward(const Backend& backend, const BackwardCall& call);

}  // namespace kf
