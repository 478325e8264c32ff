// Quantised results on the CPU: rows are computed into memory that stays in a cache, a few at a time, and are quantised there.
#include "cpu/norm_call.h"

#include "backends.h"

namespace kf {

cpu::Quantization quantization(const Quantize& quantize, at::ScalarType type, int64_t rows, int64_t cols, Quantized& to) {
  prefer_huge_pages(to.values);
  const auto* given = present(quantize.scale) ? quantize.scale->const_data_ptr<float>() : nullptr;
  auto* values = static_cast<uint8_t*>(to.values.mutable_data_ptr());
  return {cpu_dtype(type), quantize.code(), rows, cols, quantize.block, given, values, to.scales.mutable_data_ptr<float>()};
}

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

}  // namespace kf
