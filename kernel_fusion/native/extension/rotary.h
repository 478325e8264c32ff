// The rotary embedding of query and key, which may be normalised by an RMSNorm per head before.
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

// The arguments of backward: dy of query and key; query and key themselves if there is a norm; and which gradients are wanted,
// those of query and key and of their weights.
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

// x, or a copy whose columns lie side by side.
inline Tensor with_dense_columns(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

// The kernels fill results that were allocated before. An undefined result is not wanted.
using RotaryKernel = void(const RotaryCall& call, Tensor& query, Tensor& key);
using RotaryBwdKernel = void(const RotaryBwdCall& call, RotaryGradients& gradients);
RotaryKernel rotary_cpu, rotary_cuda;
RotaryBwdKernel rotary_bwd_cpu, rotary_bwd_cuda;

// Whether the kernels can serve a call. Other calls go to the definition in backends/eager, which serves them or says what is
// wrong.
bool accepts(const RotaryCall& call);
RotaryResult reference(const RotaryCall& call);

// With a norm, the CUDA kernels hold whole heads in registers, so heads are at most this long.
inline constexpr int64_t kLongestHead = 512;

// Whether this is a call on a GPU that the CUDA kernels do not serve. Python then looks for another backend.
inline bool is_of_other_kernels(const Tensor& query, bool norm) {
  return query.is_cuda() &&
         (!cuda_enabled(query.device().index()) || (norm && query.dim() == 4 && query.sym_size(3) > kLongestHead));
}
inline bool is_of_other_kernels(const RotaryCall& c) { return is_of_other_kernels(c.query, c.eps.has_value()); }
RotaryResult by_other_kernels(const RotaryCall& call);

// The operator and its backward on a device.
RotaryResult rotary(const Backend& backend, const RotaryCall& call);
RotaryGradients rotary_bwd(const Backend& backend, const RotaryBwdCall& call);

}  // namespace kf
