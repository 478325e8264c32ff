// The operators of core/signatures.py: the arguments of each as a struct, its call, and their schemas.
// Written by `python -m kernel_fusion.operators.headers`.
#pragma once

// clang-format off
#include <array>
#include <tuple>

#include "operators.h"

namespace kf {

// call.arguments(f) is f(every argument), and call.tensors(f) is f(every tensor).
struct LayerNormCall {
  static constexpr const char* kName = "layer_norm"; using Result = Tensor;
  const Tensor &input; int64_t num_dims; const OptionalTensor &weight, &bias; double eps, weight_offset; OptionalDtype
    out_dtype;
  template <class F> auto arguments(F&& f) const { return f(input, num_dims, weight, bias, eps, weight_offset, out_dtype); }
  template <class F> auto tensors(F&& f) const { return f(input, weight, bias); }
};
struct RmsNormCall {
  static constexpr const char* kName = "rms_norm"; using Result = Tensor;
  const Tensor &input; int64_t num_dims; const OptionalTensor &weight, &bias; std::optional<double> eps; double weight_offset;
    OptionalDtype out_dtype;
  template <class F> auto arguments(F&& f) const { return f(input, num_dims, weight, bias, eps, weight_offset, out_dtype); }
  template <class F> auto tensors(F&& f) const { return f(input, weight, bias); }
};
struct StagedRowNormCall {
  static constexpr const char* kName = "staged_row_norm"; using Result = std::tuple<Tensor, Tensor>;
  const Tensor &input; const OptionalTensor &residual; int64_t num_dims; const OptionalTensor &weight, &bias; double eps,
    weight_offset; OptionalDtype out_dtype; bool rms; std::string_view pre_activation, activation; double dropout_p; const
    OptionalTensor &seed; std::string_view rounding; const OptionalTensor &gate; std::string_view gate_activation; bool
    gate_first, grouped; const OptionalTensor &residual_gate;
  template <class F> auto arguments(F&& f) const { return f(input, residual, num_dims, weight, bias, eps, weight_offset,
    out_dtype, rms, pre_activation, activation, dropout_p, seed, rounding, gate, gate_activation, gate_first, grouped,
    residual_gate); }
  template <class F> auto tensors(F&& f) const { return f(input, residual, weight, bias, seed, gate, residual_gate); }
};
struct PointwiseCall {
  static constexpr const char* kName = "pointwise"; using Result = Tensor;
  const Tensor &a; const OptionalTensor &b; std::string_view combine, activation; double scale, dropout_p; const OptionalTensor
    &seed;
  template <class F> auto arguments(F&& f) const { return f(a, b, combine, activation, scale, dropout_p, seed); }
  template <class F> auto tensors(F&& f) const { return f(a, b, seed); }
};
struct ReduceCall {
  static constexpr const char* kName = "reduce"; using Result = Tensor;
  const Tensor &input; at::IntArrayRef dim; bool keepdim; std::string_view kind; OptionalDtype dtype;
  template <class F> auto arguments(F&& f) const { return f(input, dim, keepdim, kind, dtype); }
  template <class F> auto tensors(F&& f) const { return f(input); }
};
struct SoftmaxCall {
  static constexpr const char* kName = "softmax"; using Result = Tensor;
  const Tensor &input; const OptionalTensor &mask; double scale; bool causal, log;
  template <class F> auto arguments(F&& f) const { return f(input, mask, scale, causal, log); }
  template <class F> auto tensors(F&& f) const { return f(input, mask); }
};
struct GroupNormCall {
  static constexpr const char* kName = "group_norm"; using Result = Tensor;
  const Tensor &input; int64_t num_groups; const OptionalTensor &weight, &bias, &add, &scale, &shift; double eps, scale_offset;
    std::string_view activation; OptionalDtype out_dtype;
  template <class F> auto arguments(F&& f) const { return f(input, num_groups, weight, bias, add, scale, shift, eps,
    scale_offset, activation, out_dtype); }
  template <class F> auto tensors(F&& f) const { return f(input, weight, bias, add, scale, shift); }
};
struct TokenLogprobCall {
  static constexpr const char* kName = "token_logprob"; using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
  const Tensor &input, &ids; const OptionalTensor &mask, &temperature, &weight; double scale, softcap; int64_t ignore_index;
    std::string_view extra; bool predicts;
  template <class F> auto arguments(F&& f) const { return f(input, ids, mask, temperature, weight, scale, softcap, ignore_index,
    extra, predicts); }
  template <class F> auto tensors(F&& f) const { return f(input, ids, mask, temperature, weight); }
};
struct QkNormRopeCall {
  static constexpr const char* kName = "qk_norm_rope"; using Result = std::tuple<Tensor, Tensor>;
  const Tensor &query; const OptionalTensor &key, &query_weight, &key_weight; const Tensor &cos, &sin; const OptionalTensor
    &positions; std::optional<double> eps; double weight_offset; bool interleaved; std::string_view rounding;
  template <class F> auto arguments(F&& f) const { return f(query, key, query_weight, key_weight, cos, sin, positions, eps,
    weight_offset, interleaved, rounding); }
  template <class F> auto tensors(F&& f) const { return f(query, key, query_weight, key_weight, cos, sin, positions); }
};
struct RowNormFwdCall {
  static constexpr const char* kName = "row_norm_fwd"; using Result = std::tuple<Tensor, Tensor, Tensor>;
  const Tensor &input; int64_t num_dims; const OptionalTensor &weight, &bias; double eps, weight_offset; OptionalDtype
    out_dtype; bool rms; const OptionalTensor &residual; std::string_view pre_activation, activation; double dropout_p; const
    OptionalTensor &seed; std::string_view rounding; const OptionalTensor &gate; std::string_view gate_activation; bool
    gate_first, grouped; const OptionalTensor &residual_gate; std::string_view passes; const OptionalTensor &sums;
  template <class F> auto arguments(F&& f) const { return f(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms,
    residual, pre_activation, activation, dropout_p, seed, rounding, gate, gate_activation, gate_first, grouped, residual_gate,
    passes, sums); }
  template <class F> auto tensors(F&& f) const { return f(input, weight, bias, residual, seed, gate, residual_gate, sums); }
};
struct RowNormBwdCall {
  static constexpr const char* kName = "row_norm_bwd"; using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
  const Tensor &dy, &input, &stats; int64_t num_dims; const OptionalTensor &weight; OptionalDtype bias_dtype; double
    weight_offset; bool rms; std::array<bool, 5> output_mask; OptionalDtype x_dtype; const OptionalTensor &dh, &x, &bias; bool
    has_residual; std::string_view pre_activation, activation; double dropout_p; const OptionalTensor &seed; std::string_view
    rounding; const OptionalTensor &gate; std::string_view gate_activation; bool gate_first, grouped; const OptionalTensor
    &residual_gate; std::string_view passes; const OptionalTensor &sums;
  template <class F> auto arguments(F&& f) const { return f(dy, input, stats, num_dims, weight, bias_dtype, weight_offset, rms,
    output_mask, x_dtype, dh, x, bias, has_residual, pre_activation, activation, dropout_p, seed, rounding, gate,
    gate_activation, gate_first, grouped, residual_gate, passes, sums); }
  template <class F> auto tensors(F&& f) const { return f(dy, input, stats, weight, dh, x, bias, seed, gate, residual_gate,
    sums); }
};
struct PointwiseFwdCall {
  static constexpr const char* kName = "pointwise_fwd"; using Result = std::tuple<Tensor, Tensor>;
  const Tensor &a; const OptionalTensor &b; std::string_view combine, activation; double scale, dropout_p; const OptionalTensor
    &seed;
  template <class F> auto arguments(F&& f) const { return f(a, b, combine, activation, scale, dropout_p, seed); }
  template <class F> auto tensors(F&& f) const { return f(a, b, seed); }
};
struct PointwiseBwdCall {
  static constexpr const char* kName = "pointwise_bwd"; using Result = std::tuple<Tensor, Tensor>;
  const Tensor &dy, &a; const OptionalTensor &b; std::string_view combine, activation; double scale, dropout_p; const
    OptionalTensor &seed; std::array<bool, 2> output_mask;
  template <class F> auto arguments(F&& f) const { return f(dy, a, b, combine, activation, scale, dropout_p, seed, output_mask);
    }
  template <class F> auto tensors(F&& f) const { return f(dy, a, b, seed); }
};
struct SoftmaxBwdCall {
  static constexpr const char* kName = "softmax_bwd"; using Result = Tensor;
  const Tensor &dy, &y; double scale; bool leaves_out, log;
  template <class F> auto arguments(F&& f) const { return f(dy, y, scale, leaves_out, log); }
  template <class F> auto tensors(F&& f) const { return f(dy, y); }
};
struct GroupNormFwdCall {
  static constexpr const char* kName = "group_norm_fwd"; using Result = std::tuple<Tensor, Tensor>;
  const Tensor &input; int64_t num_groups; const OptionalTensor &weight, &bias, &add, &scale, &shift; double eps, scale_offset;
    std::string_view activation; OptionalDtype out_dtype;
  template <class F> auto arguments(F&& f) const { return f(input, num_groups, weight, bias, add, scale, shift, eps,
    scale_offset, activation, out_dtype); }
  template <class F> auto tensors(F&& f) const { return f(input, weight, bias, add, scale, shift); }
};
struct GroupNormBwdCall {
  static constexpr const char* kName = "group_norm_bwd"; using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor>;
  const Tensor &dy, &input, &stats; int64_t num_groups; const OptionalTensor &weight, &bias, &add, &scale, &shift; double
    scale_offset; std::string_view activation; std::array<bool, 6> output_mask;
  template <class F> auto arguments(F&& f) const { return f(dy, input, stats, num_groups, weight, bias, add, scale, shift,
    scale_offset, activation, output_mask); }
  template <class F> auto tensors(F&& f) const { return f(dy, input, stats, weight, bias, add, scale, shift); }
};
struct TokenLogprobBwdCall {
  static constexpr const char* kName = "token_logprob_bwd"; using Result = Tensor;
  const Tensor &input, &ids, &largest, &log_sum, &dlogprob; const OptionalTensor &da, &db, &dc, &mask, &temperature, &weight;
    double scale, softcap; int64_t ignore_index;
  template <class F> auto arguments(F&& f) const { return f(input, ids, largest, log_sum, dlogprob, da, db, dc, mask,
    temperature, weight, scale, softcap, ignore_index); }
  template <class F> auto tensors(F&& f) const { return f(input, ids, largest, log_sum, dlogprob, da, db, dc, mask, temperature,
    weight); }
};
struct QkNormRopeBwdCall {
  static constexpr const char* kName = "qk_norm_rope_bwd"; using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  const Tensor &dy; const OptionalTensor &dy_key, &query, &key, &query_weight, &key_weight; const Tensor &cos, &sin; const
    OptionalTensor &positions; std::optional<double> eps; double weight_offset; bool interleaved; std::string_view rounding;
    std::array<bool, 4> output_mask;
  template <class F> auto arguments(F&& f) const { return f(dy, dy_key, query, key, query_weight, key_weight, cos, sin,
    positions, eps, weight_offset, interleaved, rounding, output_mask); }
  template <class F> auto tensors(F&& f) const { return f(dy, dy_key, query, key, query_weight, key_weight, cos, sin,
    positions); }
};
struct QuantizeCall {
  static constexpr const char* kName = "quantize"; using Result = std::tuple<Tensor, Tensor>;
  const Tensor &input; at::ScalarType dtype; const OptionalTensor &scale; int64_t block;
  template <class F> auto arguments(F&& f) const { return f(input, dtype, scale, block); }
  template <class F> auto tensors(F&& f) const { return f(input, scale); }
};
struct QuantizedRowNormCall {
  static constexpr const char* kName = "quantized_row_norm"; using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  const Tensor &input; const OptionalTensor &residual; at::ScalarType dtype; const OptionalTensor &scale; int64_t block; bool
    keeps; int64_t num_dims; const OptionalTensor &weight, &bias; double eps, weight_offset; OptionalDtype out_dtype; bool rms;
    std::string_view pre_activation, activation; double dropout_p; const OptionalTensor &seed; std::string_view rounding; const
    OptionalTensor &gate; std::string_view gate_activation; bool gate_first, grouped; const OptionalTensor &residual_gate;
  template <class F> auto arguments(F&& f) const { return f(input, residual, dtype, scale, block, keeps, num_dims, weight, bias,
    eps, weight_offset, out_dtype, rms, pre_activation, activation, dropout_p, seed, rounding, gate, gate_activation,
    gate_first, grouped, residual_gate); }
  template <class F> auto tensors(F&& f) const { return f(input, residual, scale, weight, bias, seed, gate, residual_gate); }
};
struct QuantizedGateCall {
  static constexpr const char* kName = "quantized_gate"; using Result = std::tuple<Tensor, Tensor, Tensor>;
  const Tensor &gate, &value; std::string_view activation; at::ScalarType dtype; const OptionalTensor &scale; int64_t block;
    bool keeps;
  template <class F> auto arguments(F&& f) const { return f(gate, value, activation, dtype, scale, block, keeps); }
  template <class F> auto tensors(F&& f) const { return f(gate, value, scale); }
};
struct SpreadRowNormCall {
  static constexpr const char* kName = "spread_row_norm"; using Result = std::tuple<Tensor, Tensor>;
  const Tensor &input; const OptionalTensor &residual; int64_t num_dims; const OptionalTensor &weight, &bias; double eps,
    weight_offset; OptionalDtype out_dtype; bool rms; std::string_view groups, pre_activation, activation; double dropout_p;
    const OptionalTensor &seed; std::string_view rounding; const OptionalTensor &gate; std::string_view gate_activation; bool
    gate_first, grouped; const OptionalTensor &residual_gate;
  template <class F> auto arguments(F&& f) const { return f(input, residual, num_dims, weight, bias, eps, weight_offset,
    out_dtype, rms, groups, pre_activation, activation, dropout_p, seed, rounding, gate, gate_activation, gate_first, grouped,
    residual_gate); }
  template <class F> auto tensors(F&& f) const { return f(input, residual, weight, bias, seed, gate, residual_gate); }
};

inline constexpr const char* kSchemas = R"(
layer_norm(Tensor input, int num_dims, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, float weight_offset=0., ScalarType? out_dtype=None) -> Tensor
rms_norm(Tensor input, int num_dims, Tensor? weight=None, Tensor? bias=None, float? eps=None, float weight_offset=0., ScalarType? out_dtype=None) -> Tensor
staged_row_norm(Tensor input, Tensor? residual, int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, ScalarType? out_dtype, bool rms, str pre_activation='identity', str activation='identity', float dropout_p=0.0, Tensor? seed=None, str rounding='once', Tensor? gate=None, str gate_activation='identity', bool gate_first=False, bool grouped=False, Tensor? residual_gate=None) -> (Tensor output, Tensor residual)
pointwise(Tensor a, Tensor? b, str combine, str activation, float scale, float dropout_p, Tensor? seed) -> Tensor
reduce(Tensor input, int[] dim, bool keepdim, str kind, ScalarType? dtype) -> Tensor
softmax(Tensor input, Tensor? mask, float scale, bool causal, bool log=False) -> Tensor
group_norm(Tensor input, int num_groups, Tensor? weight, Tensor? bias, Tensor? add, Tensor? scale, Tensor? shift, float eps, float scale_offset, str activation, ScalarType? out_dtype) -> Tensor
token_logprob(Tensor input, Tensor ids, Tensor? mask, Tensor? temperature, Tensor? weight, float scale, float softcap, int ignore_index, str extra, bool predicts) -> (Tensor logprob, Tensor largest, Tensor log_sum, Tensor extra, Tensor predicted)
qk_norm_rope(Tensor query, Tensor? key, Tensor? query_weight, Tensor? key_weight, Tensor cos, Tensor sin, Tensor? positions, float? eps, float weight_offset, bool interleaved, str rounding) -> (Tensor query, Tensor key)
row_norm_fwd(Tensor input, int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, ScalarType? out_dtype, bool rms, Tensor? residual=None, str pre_activation='identity', str activation='identity', float dropout_p=0.0, Tensor? seed=None, str rounding='once', Tensor? gate=None, str gate_activation='identity', bool gate_first=False, bool grouped=False, Tensor? residual_gate=None, str passes='both', Tensor? sums=None) -> (Tensor y, Tensor stats, Tensor h)
row_norm_bwd(Tensor dy, Tensor input, Tensor stats, int num_dims, Tensor? weight, ScalarType? bias_dtype, float weight_offset, bool rms, bool[5] output_mask, ScalarType? x_dtype=None, Tensor? dh=None, Tensor? x=None, Tensor? bias=None, bool has_residual=False, str pre_activation='identity', str activation='identity', float dropout_p=0.0, Tensor? seed=None, str rounding='once', Tensor? gate=None, str gate_activation='identity', bool gate_first=False, bool grouped=False, Tensor? residual_gate=None, str passes='both', Tensor? sums=None) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, Tensor dgate)
pointwise_fwd(Tensor a, Tensor? b, str combine, str activation, float scale, float dropout_p, Tensor? seed) -> (Tensor y, Tensor bits)
pointwise_bwd(Tensor dy, Tensor a, Tensor? b, str combine, str activation, float scale, float dropout_p, Tensor? seed, bool[2] output_mask) -> (Tensor da, Tensor db)
softmax_bwd(Tensor dy, Tensor y, float scale, bool leaves_out=False, bool log=False) -> Tensor
group_norm_fwd(Tensor input, int num_groups, Tensor? weight, Tensor? bias, Tensor? add, Tensor? scale, Tensor? shift, float eps, float scale_offset, str activation, ScalarType? out_dtype) -> (Tensor y, Tensor stats)
group_norm_bwd(Tensor dy, Tensor input, Tensor stats, int num_groups, Tensor? weight, Tensor? bias, Tensor? add, Tensor? scale, Tensor? shift, float scale_offset, str activation, bool[6] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dadd, Tensor dscale, Tensor dshift)
token_logprob_bwd(Tensor input, Tensor ids, Tensor largest, Tensor log_sum, Tensor dlogprob, Tensor? da, Tensor? db, Tensor? dc, Tensor? mask, Tensor? temperature, Tensor? weight, float scale, float softcap, int ignore_index) -> Tensor
qk_norm_rope_bwd(Tensor dy, Tensor? dy_key, Tensor? query, Tensor? key, Tensor? query_weight, Tensor? key_weight, Tensor cos, Tensor sin, Tensor? positions, float? eps, float weight_offset, bool interleaved, str rounding, bool[4] output_mask) -> (Tensor dquery, Tensor dkey, Tensor dquery_weight, Tensor dkey_weight)
quantize(Tensor input, ScalarType dtype, Tensor? scale, int block) -> (Tensor values, Tensor scale)
quantized_row_norm(Tensor input, Tensor? residual, ScalarType dtype, Tensor? scale, int block, bool keeps, int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, ScalarType? out_dtype, bool rms, str pre_activation='identity', str activation='identity', float dropout_p=0.0, Tensor? seed=None, str rounding='once', Tensor? gate=None, str gate_activation='identity', bool gate_first=False, bool grouped=False, Tensor? residual_gate=None) -> (Tensor values, Tensor scale, Tensor output, Tensor residual)
quantized_gate(Tensor gate, Tensor value, str activation, ScalarType dtype, Tensor? scale, int block, bool keeps) -> (Tensor values, Tensor scale, Tensor output)
spread_row_norm(Tensor input, Tensor? residual, int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, ScalarType? out_dtype, bool rms, str groups, str pre_activation='identity', str activation='identity', float dropout_p=0.0, Tensor? seed=None, str rounding='once', Tensor? gate=None, str gate_activation='identity', bool gate_first=False, bool grouped=False, Tensor? residual_gate=None) -> (Tensor output, Tensor residual)
)";

}  // namespace kf
