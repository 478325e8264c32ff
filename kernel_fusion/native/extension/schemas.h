// The operators' schemas, a line each: operators/schemas.py says what they mean.
// Written by `python -m kernel_fusion.operators.headers`.
#pragma once

namespace kf {

inline constexpr const char* kSchemas = R"(
layer_norm(Tensor input, int num_dims, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, float weight_offset=0., ScalarType? out_dtype=None) -> Tensor
rms_norm(Tensor input, int num_dims, Tensor? weight=None, Tensor? bias=None, float? eps=None, float weight_offset=0., ScalarType? out_dtype=None) -> Tensor
staged_row_norm(Tensor input, Tensor? residual, int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, ScalarType? out_dtype, bool rms, str pre_activation='identity', str activation='identity', float dropout_p=0.0, Tensor? seed=None, str rounding='once', Tensor? gate=None, str gate_activation='identity', bool gate_first=False, bool grouped=False, Tensor? residual_gate=None) -> (Tensor output, Tensor residual)
pointwise(Tensor a, Tensor? b, str combine, str activation, float scale, float dropout_p, Tensor? seed) -> Tensor
reduce(Tensor input, int[] dim, bool keepdim, str kind, ScalarType? dtype) -> Tensor
softmax(Tensor input, Tensor? mask, float scale, bool causal) -> Tensor
qk_norm_rope(Tensor query, Tensor? key, Tensor? query_weight, Tensor? key_weight, Tensor cos, Tensor sin, Tensor? positions, float? eps, float weight_offset, bool interleaved, str rounding) -> (Tensor query, Tensor key)
row_norm_fwd(Tensor input, int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, ScalarType? out_dtype, bool rms, Tensor? residual=None, str pre_activation='identity', str activation='identity', float dropout_p=0.0, Tensor? seed=None, str rounding='once', Tensor? gate=None, str gate_activation='identity', bool gate_first=False, bool grouped=False, Tensor? residual_gate=None) -> (Tensor y, Tensor stats, Tensor h)
row_norm_bwd(Tensor dy, Tensor input, Tensor stats, int num_dims, Tensor? weight, ScalarType? bias_dtype, float weight_offset, bool rms, bool[5] output_mask, ScalarType? x_dtype=None, Tensor? dh=None, Tensor? x=None, Tensor? bias=None, bool has_residual=False, str pre_activation='identity', str activation='identity', float dropout_p=0.0, Tensor? seed=None, str rounding='once', Tensor? gate=None, str gate_activation='identity', bool gate_first=False, bool grouped=False, Tensor? residual_gate=None) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, Tensor dgate)
pointwise_fwd(Tensor a, Tensor? b, str combine, str activation, float scale, float dropout_p, Tensor? seed) -> (Tensor y, Tensor bits)
pointwise_bwd(Tensor dy, Tensor a, Tensor? b, str combine, str activation, float scale, float dropout_p, Tensor? seed, bool[2] output_mask) -> (Tensor da, Tensor db)
softmax_bwd(Tensor dy, Tensor y, float scale, bool leaves_out=False) -> Tensor
qk_norm_rope_bwd(Tensor dy, Tensor? dy_key, Tensor? query, Tensor? key, Tensor? query_weight, Tensor? key_weight, Tensor cos, Tensor sin, Tensor? positions, float? eps, float weight_offset, bool interleaved, str rounding, bool[4] output_mask) -> (Tensor dquery, Tensor dkey, Tensor dquery_weight, Tensor dkey_weight)
quantize(Tensor input, ScalarType dtype, Tensor? scale, int block) -> (Tensor values, Tensor scale)
quantized_row_norm(Tensor input, Tensor? residual, ScalarType dtype, Tensor? scale, int block, bool keeps, int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, ScalarType? out_dtype, bool rms, str pre_activation='identity', str activation='identity', float dropout_p=0.0, Tensor? seed=None, str rounding='once', Tensor? gate=None, str gate_activation='identity', bool gate_first=False, bool grouped=False, Tensor? residual_gate=None) -> (Tensor values, Tensor scale, Tensor output, Tensor residual)
quantized_gate(Tensor gate, Tensor value, str activation, ScalarType dtype, Tensor? scale, int block, bool keeps) -> (Tensor values, Tensor scale, Tensor output)
)";

}  // namespace kf
