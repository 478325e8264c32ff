// Quantised results on CUDA: arguments -> key -> launch. A norm's own kernel makes its codes where it can (row_norm_cuda.cpp).
#include "backends.h"
#include "cuda/launcher.h"
#include "shared/row_norm_args.h"

namespace kf {

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

void quantized_gate_cuda(const Tensor& gate, const Tensor& value, int32_t activation, const Quantize& quantize, Tensor& y,
                         Quantized& to) {
  launch_quantize(gate, value, activation, quantize, quantize.keeps ? y.data_ptr() : nullptr, to);
}

}  // namespace kf
