// The operators of quantised results. On a CPU rows are computed into memory that stays in a cache, a few at a time, and are
// quantised there. On CUDA a norm's own kernel makes its codes where it can (row_norm_cuda.cpp). Shapes for tracing come from
// Python (operators/meta.py), and so does what serves other devices (operators/stubs.py).
#include "quantize.h"

#include "cpu/norm_call.h"
#include "cuda/launcher.h"
#include "pointwise.h"
#include "shared/row_norm_args.h"
#include "verb.h"

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

// ---- On a CPU
// ----------------------------------------------------------------------------------------------------------------

cpu::Quantization quantization(const Quantize& quantize, at::ScalarType type, int64_t rows, int64_t cols, Quantized& to) {
  prefer_huge_pages(to.values);
  const auto* given = present(quantize.scale) ? quantize.scale->const_data_ptr<float>() : nullptr;
  auto* values = static_cast<uint8_t*>(to.values.mutable_data_ptr());
  return {cpu_dtype(type), quantize.code(), rows, cols, quantize.block, given, values, to.scales.mutable_data_ptr<float>()};
}

namespace {

void quantize_cpu(const Tensor& v, const Quantize& quantize, Quantized& to) {
  const Rows rows(v, std::min<int64_t>(v.dim(), 1));
  const cpu::Quantization q = quantization(quantize, v.scalar_type(), rows.rows, rows.cols, to);
  count(Counter::kCpuForward);
  share(rows.rows, rows.cols,
        [&](int64_t begin, int64_t end) { cpu::kernels().quantize_rows(q, rows.data(), rows.layout, begin, end, 0); });
}

void quantized_gate_cpu(const Tensor& gate, const Tensor& value, int32_t activation, const Quantize& quantize, Tensor& y,
                        Quantized& to) {
  const Chain chain{Combine::kGate, activation, 1.0, {}, nullptr};
  const Rows a(gate, 1), b(value, 1);
  const Dtype type = cpu_dtype(gate.scalar_type());
  const auto size = static_cast<int64_t>(gate.element_size());
  const cpu::ChainOperands operands{chain, {type, type, type}, nullptr, {}, type == Dtype::kDouble, false};
  const bool apart = a.strided || b.strided;  // rows of more than one stride, each of which is a region of its own
  const auto compute = [&](char* out, int64_t begin, int64_t end) {
    for (int64_t row = begin, count = apart ? 1 : end - begin; row < end; row += count) {
      const auto at = [&](const Rows& t) { return const_cast<char*>(bytes(t.tensor)) + row_offset(t.layout, row) * size; };
      char* const data[] = {out + (row - begin) * a.cols * size, at(a), at(b)};
      const int64_t inner[] = {size, size, size},
                    outer[] = {a.cols * size, a.layout.stride[2] * size, b.layout.stride[2] * size};
      cpu::kernels().pointwise(operands, {data, inner, outer, a.cols, count});
    }
  };
  quantize_rows_of(quantization(quantize, gate.scalar_type(), a.rows, a.cols, to), quantize.keeps ? &y : nullptr,
                   [&] { return compute; });
}

}  // namespace

// ---- On CUDA: arguments -> key -> launch
// -------------------------------------------------------------------------------------

Codes codes_of(const Quantize& quantize, int64_t cols) {
  constexpr int64_t kBlock = 128;
  const bool given = present(quantize.scale), blocks = !given && quantize.block && cols > quantize.block;
  if (blocks && quantize.block != kBlock)
    driver::fail("CUDA kernels make scales of blocks of 128 columns, not of " + std::to_string(quantize.block));
  return {quantize.code(), given ? Scales::kGiven : blocks ? Scales::kBlock : Scales::kRow, quantize.keeps};
}

CodeArgs code_args(const Quantize& quantize, int64_t rows, Quantized& to) {
  const float* scales = present(quantize.scale) ? quantize.scale->const_data_ptr<float>() : to.scales.const_data_ptr<float>();
  return {to.values.data_ptr(), const_cast<float*>(scales), rows};
}

namespace {

// Codes of activation(x) * other, or of x.
void launch_quantize(const Tensor& x, const Tensor& other, int32_t activation, const Quantize& quantize, void* v,
                     Quantized& to) {
  const Rows x_rows(x, std::min<int64_t>(x.dim(), 1));
  check_length(x_rows.cols);
  const int64_t vec = dividing_power(x_rows.cols, kVectorBytes / size_of(x.scalar_type()));
  QuantizeSpec spec{
      .cols = static_cast<int>(x_rows.cols), .x = cpu_dtype(x.scalar_type()), .codes = codes_of(quantize, x_rows.cols)};
  spec.codes.keeps = v != nullptr;
  QuantizeAccess access{.x = row_access(x_rows, vec)};
  QuantizeArgs args{x_rows.data(), nullptr, v, x_rows.rows, x_rows.layout, {}, code_args(quantize, x_rows.rows, to)};
  std::optional<Rows> other_rows;
  if (other.defined()) {
    other_rows.emplace(other, 1);
    spec.other = spec.x;
    spec.activation = activation;
    access.other = row_access(*other_rows, vec);
    args.other = other_rows->data();
    args.other_rows = other_rows->layout;
  }
  launch_over(args.rows, x.device(), spec, access, &args);
}

}  // namespace

void quantize_cuda(const Tensor& v, const Quantize& quantize, Quantized& to) {
  launch_quantize(v, {}, 0, quantize, nullptr, to);
}

namespace {

void quantized_gate_cuda(const Tensor& gate, const Tensor& value, int32_t activation, const Quantize& quantize, Tensor& y,
                         Quantized& to) {
  launch_quantize(gate, value, activation, quantize, quantize.keeps ? y.data_ptr() : nullptr, to);
}

constexpr Kernels quantize_kernels{quantize_cpu, quantize_cuda};
constexpr Kernels quantized_row_norm_kernels{quantized_row_norm_cpu, quantized_row_norm_cuda};
constexpr Kernels quantized_gate_kernels{quantized_gate_cpu, quantized_gate_cuda};

// ---- The operators
// -----------------------------------------------------------------------------------------------------------

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

}  // namespace

std::tuple<Tensor, Tensor> compute(const Backend& backend, const QuantizeCall& c) {
  const Quantize q{c.dtype, c.scale, c.block};
  check(q, c.input);
  check_memory(c.input);
  TORCH_CHECK(readable(c.input), "kernel_fusion::quantize: arguments that its kernels do not take");
  Quantized to(q, c.input);
  if (c.input.numel()) quantize_kernels(backend, c.input, q, to);
  else to.scales.fill_(1.0);  // of rows without columns
  return results(std::move(to));
}

namespace {

// A result that was computed apart, and its codes.
std::tuple<Tensor, Tensor, Tensor> quantized(const Backend& backend, Tensor y, const Quantize& q) {
  auto [values, scales] = compute(backend, QuantizeCall{y, q.dtype, q.scale, q.block});
  if (!q.keeps) y = allocate({0}, y.options());
  return {std::move(values), std::move(scales), std::move(y)};
}

}  // namespace

QuantizedRowNormCall::Result compute(const Backend& backend, const QuantizedRowNormCall& c) {
  const ForwardCall call = norm_of(c);
  const Quantize q{c.dtype, c.scale, c.block, c.keeps};
  check(q, call.input);
  TORCH_CHECK(present(q.scale) || call.num_dims == 1, "kernel_fusion: scales of rows go with one normalised dimension, got ",
              call.num_dims);
  if (!accepts(call) || call.input.numel() == 0) {
    auto [y, h] = call_boxed(operator_of<StagedRowNormCall>(), call);
    return std::tuple_cat(quantized(backend, std::move(y), q), std::tuple(std::move(h)));
  }
  call.tensors(check_all_memory);
  const auto options = call.input.options();
  Tensor y =
      q.keeps ? allocate(call.input.sizes(), options.dtype(call.y_dtype())) : allocate({0}, options.dtype(call.y_dtype()));
  Tensor h = present(call.residual) ? allocate(call.input.sizes(), options.dtype(call.residual->scalar_type()))
                                    : allocate({0}, options);
  Quantized to(q, call.input);
  quantized_row_norm_kernels(backend, call, q, y, h, to);
  return std::tuple_cat(results(std::move(to)), std::tuple(std::move(y), std::move(h)));
}

std::tuple<Tensor, Tensor, Tensor> compute(const Backend& backend, const QuantizedGateCall& c) {
  const Tensor &gate = c.gate, &value = c.value;
  const Quantize q{c.dtype, c.scale, c.block, c.keeps};
  check(q, gate);
  const PointwiseCall call{gate, value, "gate", c.activation, 1.0, 0.0, kAbsent};
  const bool alike = gate.sizes() == value.sizes() && gate.scalar_type() == value.scalar_type();
  if (!accepts(call) || !alike || gate.numel() == 0 || gate.dim() == 0)
    return quantized(backend, accepts(call) ? compute(backend, call) : reference(call), q);
  check_all_memory(gate, value);
  Tensor y = c.keeps ? allocate(gate.sizes(), gate.options()) : allocate({0}, gate.options());
  Quantized to(q, gate);
  quantized_gate_kernels(backend, gate, value, code_of(c.activation), q, y, to);
  return std::tuple_cat(results(std::move(to)), std::tuple(std::move(y)));
}

static const Part<QuantizeCall> quantize_part;
static const Part<QuantizedRowNormCall> quantized_row_norm_part;
static const Part<QuantizedGateCall> quantized_gate_part;

}  // namespace kf
