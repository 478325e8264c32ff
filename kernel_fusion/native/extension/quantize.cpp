// The operators of quantised results: checks, allocation, registration. Shapes for tracing come from Python
// (operators/meta.py), and so does what serves other devices (operators/stubs.py).
#include "quantize.h"

#include "backends.h"
#include "dispatch.h"

namespace kf {

Quantized::Quantized(const Quantize& quantize, const Tensor& like) {
  values = allocate(like.sizes(), like.options().dtype(quantize.dtype));
  const auto floats = like.options().dtype(at::kFloat);
  if (present(quantize.scale)) {
    scales = allocate({0}, floats);
    return;
  }
  const auto leading = like.sizes().slice(0, like.dim() - 1);
  c10::SmallVector<int64_t, 6> shape(leading.begin(), leading.end());
  if (quantize.block) shape.insert(shape.begin(), ceil_div(like.size(-1), quantize.block));
  else shape.push_back(1);
  scales = allocate(shape, floats);
  if (quantize.block) scales = scales.movedim(0, -1);
}

namespace {

void check(const Quantize& q, const Tensor& input) {
  TORCH_CHECK_VALUE(q.dtype == at::kChar || q.dtype == at::kFloat8_e4m3fn || q.dtype == at::kFloat8_e5m2,
                    "kernel_fusion: codes are int8, float8_e4m3fn or float8_e5m2, not ", q.dtype);
  TORCH_CHECK_VALUE(q.block >= 0, "kernel_fusion: `block` must not be negative, got ", q.block);
  TORCH_CHECK(input.dim() > 0 || present(q.scale), "kernel_fusion: a scale of rows needs a dimension");
  if (!present(q.scale)) return;
  check_memory(q.scale);
  TORCH_CHECK(q.scale->scalar_type() == at::kFloat && q.scale->numel() == 1 && q.scale->device() == input.device(),
              "kernel_fusion: `scale` must be one float32 number on the device of the input");
}

std::tuple<Tensor, Tensor> results(Quantized&& quantized) { return {std::move(quantized.values), std::move(quantized.scales)}; }

std::tuple<Tensor, Tensor> quantize(const Backend& backend, const Tensor& input, at::ScalarType dtype,
                                    const OptionalTensor& scale, int64_t block) {
  const Quantize q{dtype, scale, block};
  check(q, input);
  check_memory(input);
  TORCH_CHECK(readable(input), "kernel_fusion::quantize: arguments that its kernels do not take");
  Quantized to(q, input);
  if (input.numel()) backend.quantize(input, q, to);
  else to.scales.fill_(1.0);  // of rows without columns
  return results(std::move(to));
}

// A result that was computed apart, and its codes.
std::tuple<Tensor, Tensor, Tensor> quantized(const Backend& backend, Tensor y, const Quantize& q) {
  auto [values, scales] = quantize(backend, y, q.dtype, q.scale, q.block);
  if (!q.keeps) y = allocate({0}, y.options());
  return {std::move(values), std::move(scales), std::move(y)};
}

using QuantizedNorm = std::tuple<Tensor, Tensor, Tensor, Tensor>;

QuantizedNorm quantized_row_norm(const Backend& backend, const ForwardCall& call, const Quantize& q) {
  check(q, call.input);
  TORCH_CHECK(present(q.scale) || call.num_dims == 1, "kernel_fusion: scales of rows go with one normalised dimension, got ",
              call.num_dims);
  if (!accepts(call) || call.input.numel() == 0) {
    static const auto& op = find_op("kernel_fusion::staged_row_norm");
    auto [y, h] = call_operator<StagedResult>(op, call);
    return std::tuple_cat(quantized(backend, std::move(y), q), std::tuple(std::move(h)));
  }
  with_tensors(call, check_all_memory);
  const auto options = call.input.options();
  Tensor y =
      q.keeps ? allocate(call.input.sizes(), options.dtype(call.y_dtype())) : allocate({0}, options.dtype(call.y_dtype()));
  Tensor h = present(call.residual) ? allocate(call.input.sizes(), options.dtype(call.residual->scalar_type()))
                                    : allocate({0}, options);
  Quantized to(q, call.input);
  backend.quantized_row_norm(call, q, y, h, to);
  return std::tuple_cat(results(std::move(to)), std::tuple(std::move(y), std::move(h)));
}

std::tuple<Tensor, Tensor, Tensor> quantized_gate(const Backend& backend, const Tensor& gate, const Tensor& value,
                                                  std::string_view activation, at::ScalarType dtype,
                                                  const OptionalTensor& scale, int64_t block, bool keeps) {
  const Quantize q{dtype, scale, block, keeps};
  check(q, gate);
  const PointwiseCall call{gate, value, "gate", activation, 1.0, 0.0, kAbsent};
  const bool alike = gate.sizes() == value.sizes() && gate.scalar_type() == value.scalar_type();
  if (!accepts(call) || !alike || gate.numel() == 0 || gate.dim() == 0)
    return quantized(backend, accepts(call) ? pointwise(backend, call) : reference(call), q);
  check_all_memory(gate, value);
  Tensor y = keeps ? allocate(gate.sizes(), gate.options()) : allocate({0}, gate.options());
  Quantized to(q, gate);
  backend.quantized_gate(gate, value, code_of(activation), q, y, to);
  return std::tuple_cat(results(std::move(to)), std::tuple(std::move(y)));
}

template <auto make> struct NormOperator;
template <class... Rest, ForwardCall (*make)(const Tensor&, const OptionalTensor&, Rest...)> struct NormOperator<make> {
  static QuantizedNorm run(const Backend& backend, const Tensor& input, const OptionalTensor& residual, at::ScalarType dtype,
                           const OptionalTensor& scale, int64_t block, bool keeps, Rest... rest) {
    return quantized_row_norm(backend, make(input, residual, rest...), {dtype, scale, block, keeps});
  }
};

const Implements quantize_kernels[] = {
    {"quantize", {&kCpu, &kCuda}, Boxed<&quantize>::kernel},
    {"quantized_row_norm", {&kCpu, &kCuda}, Boxed<&NormOperator<staged_call>::run>::kernel},
    {"quantized_gate", {&kCpu, &kCuda}, Boxed<&quantized_gate>::kernel},
};

}  // namespace

}  // namespace kf
