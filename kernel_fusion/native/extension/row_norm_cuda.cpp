// The CUDA operators: arguments -> request -> launch. Row counts beyond a grid's limit are far beyond a device's memory.
#include <ATen/ops/empty.h>

#include "cuda/launcher.h"
#include "row_norm.h"

namespace kf {
namespace {

// The position in core/spec.py's DTYPES.
int code(const OptionalDtype& type) {
  if (!type) return -1;
  switch (*type) {
    case at::kHalf: return 0;
    case at::kBFloat16: return 1;
    case at::kFloat: return 2;
    default: return 3;
  }
}

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

// The finish: sums of the partial rows, into dweight and dbias at once.
void sum_partials(KernelRequest request, const Tensor& partials, int64_t num_partials, int64_t pitch, Tensor& dweight,
                  Tensor& dbias, std::array<bool, 3> wants, driver::Stream stream) {
  const int32_t acc = code(partials.scalar_type());
  request.kernel = 3;
  request.x = request.y = acc;
  request.weight = wants[1] ? code(dweight.scalar_type()) : -1;
  request.bias = wants[2] ? code(dbias.scalar_type()) : -1;
  request.rms = request.flags = 0;
  request.align_x = request.align_y = request.align_weight = request.align_dx = 16;
  const auto* base = static_cast<const char*>(partials.const_data_ptr());
  const SumPartialsArgs args{{base, base + num_partials * pitch * partials.element_size()},
                             {wants[1] ? dweight.data_ptr() : nullptr, wants[2] ? dbias.data_ptr() : nullptr},
                             num_partials, pitch};
  const auto& kernel = find_kernel(request, stream);
  launch(kernel, kernel.grid(request.cols), 2, stream, &args);
}

}  // namespace

void forward_cuda(const ForwardCall& call, Tensor& y, Tensor& stats) {
  const Rows x(call.input, call.num_dims);
  if (x.cols > INT32_MAX) driver::fail("rows of more than 2^31 - 1 elements are not supported, got N = " + std::to_string(x.cols));
  const Tensor weight = contiguous(call.weight), bias = contiguous(call.bias);
  const void *w = data_or_null(weight), *b = data_or_null(bias);
  const int flags = (call.wants_stats ? KernelRequest::kStats : 0) | (call.weight_offset != 0.0 ? KernelRequest::kOffset : 0) |
                    (x.strided ? KernelRequest::kStridedX : 0);
  const int row_bytes = static_cast<int>((x.cols * y.element_size()) & 15);
  const KernelRequest request{call.input.device().index(), 0, static_cast<int32_t>(x.cols), call.rms,
                              code(call.input.scalar_type()), code(call.out_dtype), code(dtype_of(call.weight)),
                              code(dtype_of(call.bias)), flags, x.alignment,
                              alignment_of(static_cast<char*>(y.data_ptr()) + row_bytes),
                              std::min(alignment_or_full(w), alignment_or_full(b)), 16};
  const auto stream = current_stream(call.input.device());
  const auto& kernel = find_kernel(request, stream);
  RowNormFwdArgs args{x.data(), w, b, y.data_ptr(), nullptr, nullptr, x.rows, x.layout, call.eps, call.weight_offset};
  if (call.wants_stats) {
    const Stats s(stats, x.rows, call.rms);
    args.mean = s.mean;
    args.rstd = s.rstd;
  }
  launch(kernel, kernel.grid(x.rows), 1, stream, &args);
}

void backward_cuda(const BackwardCall& call, Tensor& dx, Tensor& dweight, Tensor& dbias) {
  const Rows x(call.input, call.num_dims), dy(call.dy, call.num_dims);
  const Tensor weight = contiguous(call.weight), stats = call.stats.contiguous();
  const void* w = data_or_null(weight);
  const auto [wants_dx, wants_dweight, wants_dbias] = call.wants;
  const bool sums = wants_dweight || wants_dbias;
  const int flags = (wants_dx ? KernelRequest::kDX : 0) | (wants_dweight ? KernelRequest::kDWeight : 0) |
                    (wants_dbias ? KernelRequest::kDBias : 0) | (call.weight_offset != 0.0 ? KernelRequest::kOffset : 0) |
                    (x.strided ? KernelRequest::kStridedX : 0) | (dy.strided ? KernelRequest::kStridedY : 0);
  const int row_bytes = static_cast<int>((x.cols * call.input.element_size()) & 15);
  KernelRequest request{call.input.device().index(), 1, static_cast<int32_t>(x.cols), call.rms,
                        code(call.input.scalar_type()), code(call.dy.scalar_type()), code(dtype_of(call.weight)), -1, flags,
                        x.alignment, dy.alignment, alignment_or_full(w), alignment_of(reinterpret_cast<char*>(16) + row_bytes)};
  const auto stream = current_stream(call.input.device());
  const auto& kernel = find_kernel(request, stream);

  const Stats s(stats, x.rows, call.rms);
  RowNormBwdArgs args{dy.data(), x.data(), s.mean, s.rstd, w, wants_dx ? dx.data_ptr() : nullptr, nullptr, nullptr,
                      x.rows, 0, x.layout, dy.layout, call.weight_offset};
  const int64_t grid = kernel.grid(x.rows);
  if (!sums) return launch(kernel, grid, 1, stream, &args);

  const int64_t pitch = ceil_div(x.cols, 32) * 32;
  const auto* split = kernel.splits_weight ? &(request.kernel = 2, find_kernel(request, stream)) : nullptr;
  const int64_t column_tiles = split ? split->grid(x.cols) : 1;
  // Split: enough slabs of rows to fill the device, at least 16 rows each.
  const int64_t num_partials =
      split ? std::max<int64_t>(1, std::min(ceil_div(x.rows, 16), ceil_div(split->max_blocks, column_tiles))) : grid / kernel.cluster;
  const Tensor partials = at::empty({2, num_partials, pitch}, call.input.options().dtype(acc_dtype(call.input)));
  auto* base = static_cast<char*>(partials.data_ptr());
  args.dweight_partials = base;
  args.dbias_partials = base + num_partials * pitch * partials.element_size();
  args.partial_pitch = pitch;
  if (wants_dx || !split) launch(kernel, grid, 1, stream, &args);
  if (split) launch(*split, column_tiles, num_partials, stream, &args);
  sum_partials(request, partials, num_partials, pitch, dweight, dbias, call.wants, stream);
}

}  // namespace kf
