// The rotary embedding of query and key, of the RMSNorm of each head where there is one.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "operators.h"

namespace kf {

// The arguments of the operators, as their schemas have them (operators/schemas.py); shapes as in core/rotary.py.
struct RotaryCall {
  const Tensor& query;
  const OptionalTensor &key, &query_weight, &key_weight;
  const Tensor &cos, &sin;
  const OptionalTensor& positions;
  std::optional<double> eps;
  double weight_offset;
  bool interleaved;
  std::string_view rounding;
};
inline constexpr auto rotary_call =
    &made<RotaryCall, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
          const Tensor&, const OptionalTensor&, std::optional<double>, double, bool, std::string_view>;
template <class F> auto with_arguments(const RotaryCall& c, F&& f) {
  return f(c.query, c.key, c.query_weight, c.key_weight, c.cos, c.sin, c.positions, c.eps, c.weight_offset, c.interleaved,
           c.rounding);
}

// dy of query and key, these themselves if there is a norm, and which gradients are wanted: of both and of their weights.
struct RotaryBwdCall {
  const Tensor& dy;
  const OptionalTensor &dy_key, &query, &key, &query_weight, &key_weight;
  const Tensor &cos, &sin;
  const OptionalTensor& positions;
  std::optional<double> eps;
  double weight_offset;
  bool interleaved;
  std::string_view rounding;
  std::array<bool, 4> wants;
};
inline constexpr auto rotary_bwd_call =
    &made<RotaryBwdCall, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
          const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, const OptionalTensor&,
          std::optional<double>, double, bool, std::string_view, std::array<bool, 4>>;
template <class F> auto with_arguments(const RotaryBwdCall& c, F&& f) {
  return f(c.dy, c.dy_key, c.query, c.key, c.query_weight, c.key_weight, c.cos, c.sin, c.positions, c.eps, c.weight_offset,
           c.interleaved, c.rounding, c.wants);
}

using RotaryResult = std::tuple<Tensor, Tensor>;
using RotaryGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Heads whose columns lie side by side.
inline Tensor with_dense_columns(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

// They fill what was allocated; what is undefined nobody wants.
using RotaryKernel = void(const RotaryCall& call, Tensor& query, Tensor& key);
using RotaryBwdKernel = void(const RotaryBwdCall& call, RotaryGradients& gradients);
RotaryKernel rotary_cpu, rotary_cuda;
RotaryBwdKernel rotary_bwd_cpu, rotary_bwd_cuda;

// Whether the kernels can serve a call; else the definition in backends/eager does, or says what is wrong.
bool accepts(const RotaryCall& call);
RotaryResult reference(const RotaryCall& call);

// CUDA's kernels have whole heads in registers, if a norm goes before.
inline constexpr int64_t kLongestHead = 512;

// Whether the call is one of a GPU that CUDA's kernels don't serve; Python then looks for others.
inline bool is_of_other_kernels(const Tensor& query, bool norm) {
  return query.is_cuda() &&
         (!cuda_enabled(query.device().index()) || (norm && query.dim() == 4 && query.sym_size(3) > kLongestHead));
}
inline bool is_of_other_kernels(const RotaryCall& c) { return is_of_other_kernels(c.query, c.eps.has_value()); }
RotaryResult by_other_kernels(const RotaryCall& call);

// The operator on a device, and its backward.
RotaryResult rotary(const Backend& backend, const RotaryCall& call);
RotaryGradients rotary_bwd(const Backend& backend, const RotaryBwdCall& call);

}  // namespace kf
