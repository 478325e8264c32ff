// What the row-norm operators share between autograd, CPU and CUDA: the check of arguments and the geometry of rows.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <optional>
#include <tuple>

#include "shared/row_norm_args.h"

namespace kf {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;

inline at::ScalarType acc_dtype(const Tensor& input) { return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

inline bool present(const OptionalTensor& t) { return t.has_value() && t->defined(); }
inline OptionalDtype dtype_of(const OptionalTensor& t) {
  return present(t) ? OptionalDtype(t->scalar_type()) : std::nullopt;
}

// A verb, which is layer_norm or rms_norm; they differ in the type of eps.
template <bool rms> using Eps = std::conditional_t<rms, std::optional<double>, double>;
template <bool rms>
using Verb = Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, Eps<rms>, double, OptionalDtype);

inline const void* data_or_null(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }

template <class Signature> auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// rms_norm's eps=None: the machine epsilon of the compute type.
double resolve_eps(const Tensor& input, std::optional<double> eps);

// Whether the kernels can serve a call. What they can't serve goes to the eager definition, which holds the error texts.
bool accepts(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
             double weight_offset, const OptionalDtype& out_dtype);

// The eager definition, kernel_fusion/backends/eager: raises, or serves the call with differentiable PyTorch operations.
Tensor reference(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                 double eps, double weight_offset, const OptionalDtype& out_dtype, bool rms);

// A tensor seen as rows whose elements lie side by side. `tensor` is the given one, or a copy where its normalised
// dimensions are not contiguous or its leading ones need more than three strides.
struct Rows {
  Tensor tensor;
  int64_t rows, cols;
  RowLayout layout;
  bool strided;  // more than one stride
  int alignment; // of every row, in bytes, at most 16

  Rows(const Tensor& t, int64_t num_dims);
  const void* data() const { return tensor.const_data_ptr(); }
};

// The largest power of two, at most 16, that divides the address.
int alignment_of(const void* p);

// The stages around the norm: u = dropout(pre_activation(x)), h = residual + u, y = activation(norm(h) * w + b). h is rounded
// to the residual's dtype before it is normalised; without a residual it is not rounded.
struct Stages {
  OptionalTensor residual;  // of the input's shape
  int32_t pre_activation = 0, activation = 0;  // positions in KF_ACTIVATIONS, 0: none
  uint32_t threshold = 0;                      // of dropout (shared/philox.h); 0: none
  OptionalTensor seed;
};

// What backward has of them. What it normalises again is `BackwardCall::input`: h where there is a residual, else x.
struct BackwardStages {
  OptionalTensor dh;  // the gradient that arrives at h, or none
  OptionalTensor x;   // where there are both a residual and a pre-activation: x itself
  OptionalTensor bias;  // where there is an activation, whose argument is computed again
  bool has_residual = false;
  int32_t pre_activation = 0, activation = 0;
  uint32_t threshold = 0;
  OptionalTensor seed;
};

// One direction on one device.
using ForwardResult = std::tuple<Tensor, Tensor>;           // y, stats
using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;  // dx, dweight, dbias

struct ForwardCall {
  const Tensor& input;
  int64_t num_dims;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  double eps, weight_offset;
  at::ScalarType out_dtype;
  bool rms, wants_stats;
};

struct BackwardCall {
  const Tensor& dy;
  const Tensor& input;
  const Tensor& stats;
  int64_t num_dims;
  const OptionalTensor& weight;
  OptionalDtype bias_dtype;
  double weight_offset;
  bool rms;
  std::array<bool, 3> wants;
};

// Kernels fill what was allocated, at least one element, and leave alone what is undefined because nobody wants it.
using ForwardKernel = void(const ForwardCall& call, Tensor& y, Tensor& stats);
using BackwardKernel = void(const BackwardCall& call, Tensor& dx, Tensor& dweight, Tensor& dbias);

ForwardKernel forward_cpu, forward_cuda;
BackwardKernel backward_cpu, backward_cuda;

// One device. Without kernels it stands for tracing: shapes and dtypes alone.
struct Backend {
  c10::DispatchKey key;
  ForwardKernel* forward;
  BackwardKernel* backward;
};
inline constexpr Backend kCpu{c10::DispatchKey::CPU, forward_cpu, backward_cpu};
inline constexpr Backend kCuda{c10::DispatchKey::CUDA, forward_cuda, backward_cuda};
inline constexpr Backend kMeta{c10::DispatchKey::Meta, nullptr, nullptr};

// Allocate, then fill. Forward takes calls that `accepts` accepts; backward checks its own.
ForwardResult forward(const Backend& backend, const ForwardCall& call);
BackwardResult backward(const Backend& backend, const BackwardCall& call);

}  // namespace kf
