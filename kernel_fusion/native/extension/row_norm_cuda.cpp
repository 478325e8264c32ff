// The CUDA operators: arguments -> request -> launch. Row counts beyond a grid's limit are far beyond a device's memory.
#include <ATen/ops/empty.h>

#include "cuda/launcher.h"
#include "cuda/requests.h"
#include "cuda/sum_partials.h"
#include "row_norm.h"

namespace kf {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// weight or bias, contiguous; its bytes are N elements, so a copy is no cost.
Tensor contiguous(const OptionalTensor& t) { return present(t) ? t->contiguous() : Tensor(); }
const void* data_or_null(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
int alignment_or_full(const void* p) { return p ? alignment_of(p) : 16; }

struct Stats {
  char* mean;
  char* rstd;
  Stats(const Tensor& stats, int64_t rows, bool rms)
      : mean(rms ? nullptr : static_cast<char*>(stats.data_ptr())),
        rstd(static_cast<char*>(stats.data_ptr()) + (rms ? 0 : rows * stats.element_size())) {}
};

}  // namespace

void forward_cuda(const ForwardCall& call, Tensor& y, Tensor& stats, Tensor&) {
  if (call.stages) driver::fail("the CUDA kernels of the row norms have no stages");
  const Rows x(call.input, call.num_dims);
  if (x.cols > INT32_MAX) driver::fail("rows of more than 2^31 - 1 elements are not supported, got N = " + std::to_string(x.cols));
  const Tensor weight = contiguous(call.weight), bias = contiguous(call.bias);
  const void *w = data_or_null(weight), *b = data_or_null(bias);
  const int flags = (call.wants_stats ? RowNormFields::kStats : 0) | (call.weight_offset != 0.0 ? RowNormFields::kOffset : 0) |
                    (x.strided ? RowNormFields::kStridedX : 0);
  const int row_bytes = static_cast<int>((x.cols * y.element_size()) & 15);
  const RowNormFields fields{static_cast<int32_t>(x.cols), call.rms, dtype_code(call.input.scalar_type()),
                             dtype_code(call.out_dtype), dtype_code(dtype_of(call.weight)), dtype_code(dtype_of(call.bias)),
                             flags, x.alignment, alignment_of(static_cast<char*>(y.data_ptr()) + row_bytes),
                             std::min(alignment_or_full(w), alignment_or_full(b)), 16};
  const auto stream = current_stream(call.input.device());
  const auto& kernel = find_kernel({call.input.device().index(), Kernel::kRowNormFwd, fields}, stream);
  RowNormFwdArgs args{x.data(), w, b, y.data_ptr(), nullptr, nullptr, x.rows, x.layout, call.eps, call.weight_offset};
  if (call.wants_stats) {
    const Stats s(stats, x.rows, call.rms);
    args.mean = s.mean;
    args.rstd = s.rstd;
  }
  launch(kernel, kernel.grid(x.rows), 1, stream, &args);
}

void backward_cuda(const BackwardCall& call, Tensor& dx, Tensor& dweight, Tensor& dbias, Tensor&) {
  if (call.stages) driver::fail("the CUDA kernels of the row norms have no stages");
  const Rows x(call.input, call.num_dims), dy(call.dy, call.num_dims);
  const Tensor weight = contiguous(call.weight), stats = call.stats.contiguous();
  const void* w = data_or_null(weight);
  const auto [wants_dx, wants_dweight, wants_dbias, wants_dresidual] = call.wants;
  const bool sums = wants_dweight || wants_dbias;
  const int flags = (wants_dx ? RowNormFields::kDX : 0) | (wants_dweight ? RowNormFields::kDWeight : 0) |
                    (wants_dbias ? RowNormFields::kDBias : 0) | (call.weight_offset != 0.0 ? RowNormFields::kOffset : 0) |
                    (x.strided ? RowNormFields::kStridedX : 0) | (dy.strided ? RowNormFields::kStridedY : 0);
  const int row_bytes = static_cast<int>((x.cols * call.input.element_size()) & 15);
  const RowNormFields fields{static_cast<int32_t>(x.cols), call.rms, dtype_code(call.input.scalar_type()),
                             dtype_code(call.dy.scalar_type()), dtype_code(dtype_of(call.weight)), -1, flags, x.alignment,
                             dy.alignment, alignment_or_full(w), alignment_of(reinterpret_cast<char*>(16) + row_bytes)};
  const auto stream = current_stream(call.input.device());
  const int device = call.input.device().index();
  const auto& kernel = find_kernel({device, Kernel::kRowNormBwd, fields}, stream);

  const Stats s(stats, x.rows, call.rms);
  RowNormBwdArgs args{dy.data(), x.data(), s.mean, s.rstd, w, wants_dx ? dx.data_ptr() : nullptr, nullptr, nullptr,
                      x.rows, 0, x.layout, dy.layout, call.weight_offset};
  const int64_t grid = kernel.grid(x.rows);
  if (!sums) return launch(kernel, grid, 1, stream, &args);

  const auto* split = kernel.splits_weight ? &find_kernel({device, Kernel::kRowNormBwdWeight, fields}, stream) : nullptr;
  const int64_t column_tiles = split ? split->grid(x.cols) : 1;
  // Split: enough slabs of rows to fill the device, at least 16 rows each.
  const int64_t num_partials =
      split ? std::max<int64_t>(1, std::min(ceil_div(x.rows, 16), ceil_div(split->max_blocks, column_tiles))) : grid / kernel.cluster;
  const PartialRows partials(call.input, num_partials, x.cols);
  args.dweight_partials = partials.data(0);
  args.dbias_partials = partials.data(1);
  args.partial_pitch = partials.pitch;
  if (wants_dx || !split) launch(kernel, grid, 1, stream, &args);
  if (split) launch(*split, column_tiles, num_partials, stream, &args);
  sum_partials(partials, wants_dweight ? &dweight : nullptr, wants_dbias ? &dbias : nullptr, stream);
}

}  // namespace kf
