// The CUDA operators: arguments -> request -> launch. Row counts beyond a grid's limit are far beyond a device's memory.
#include <ATen/ops/empty.h>

#include "backends.h"
#include "cuda/launcher.h"
#include "cuda/requests.h"
#include "cuda/sum_partials.h"

namespace kf {
namespace {

// weight or bias, contiguous; its bytes are N elements, so a copy is no cost.
Tensor contiguous(const OptionalTensor& t) { return present(t) ? t->contiguous() : Tensor(); }
int alignment_or_full(const void* p) { return p ? alignment_of(p) : 16; }

struct Stats {
  char* mean;
  char* rstd;
  Stats(const Tensor& stats, int64_t rows, bool rms)
      : mean(rms ? nullptr : static_cast<char*>(stats.data_ptr())),
        rstd(static_cast<char*>(stats.data_ptr()) + (rms ? 0 : rows * stats.element_size())) {}
};

std::optional<Rows> rows_of(const OptionalTensor& t, int64_t num_dims) {
  return present(t) ? std::optional<Rows>(std::in_place, *t, num_dims) : std::nullopt;
}

int flag_if(bool condition, RowNormFields::Flag flag) { return condition ? flag : 0; }

// The alignment of the rows of a contiguous tensor of our own making.
int own_alignment(int64_t cols, at::ScalarType type) {
  return alignment_of(reinterpret_cast<const void*>(cols * static_cast<int64_t>(c10::elementSize(type))));
}

void check_length(int64_t cols) {
  if (cols > INT32_MAX) driver::fail("rows of more than 2^31 - 1 elements are not supported, got N = " + std::to_string(cols));
}

RowNormFields forward_fields(const ForwardCall& call, const Rows& x, const std::optional<Rows>& residual, const Tensor& y,
                             int weight_alignment) {
  using F = RowNormFields;
  const int flags = flag_if(call.wants_stats, F::kStats) | flag_if(call.weight_offset != 0.0, F::kOffset) |
                    flag_if(x.strided, F::kStridedX) | flag_if(bool(call.dropout), F::kDropout) |
                    flag_if(residual && residual->strided, F::kStridedResidual);
  const int row_bytes = static_cast<int>((x.cols * y.element_size()) & 15);
  return {static_cast<int32_t>(x.cols), call.rms, dtype_code(call.input.scalar_type()), dtype_code(call.y_dtype()),
          dtype_code(dtype_of(call.weight)), dtype_code(dtype_of(call.bias)), flags, x.alignment,
          alignment_of(static_cast<const char*>(y.const_data_ptr()) + row_bytes), weight_alignment, 16,
          dtype_code(dtype_of(call.residual)), call.pre_activation, call.activation,
          residual ? residual->alignment : 16};
}

}  // namespace

void forward_cuda(const ForwardCall& call, Tensor& y, Tensor& stats, Tensor& h) {
  const Rows x(call.input, call.num_dims);
  check_length(x.cols);
  const auto residual = rows_of(call.residual, call.num_dims);
  const Tensor weight = contiguous(call.weight), bias = contiguous(call.bias);
  const void *w = data_or_null(weight), *b = data_or_null(bias);
  const auto fields = forward_fields(call, x, residual, y, std::min(alignment_or_full(w), alignment_or_full(b)));
  const OnDevice on(call.input.device());
  const auto& kernel = find_kernel({call.input.device().index(), Kernel::kRowNormFwd, fields}, on.stream);
  RowNormFwdArgs args{x.data(), w, b, y.data_ptr(), nullptr, nullptr, x.rows, x.layout, call.eps, call.weight_offset};
  if (call.wants_stats) {
    const Stats s(stats, x.rows, call.rms);
    args.mean = s.mean;
    args.rstd = s.rstd;
  }
  if (residual) {
    args.residual = residual->data();
    args.residual_rows = residual->layout;
    args.h = h.data_ptr();
  }
  if (call.dropout) {
    args.seed = call.seed->const_data_ptr();
    args.dropout_last = call.dropout.last();
    args.dropout_scale = call.dropout.scale();
  }
  launch(kernel, kernel.grid(x.rows), 1, on.stream, &args);
}

namespace {

// The tensors of a backward as its kernels read them.
struct BackwardInputs {
  Rows x, dy;
  std::optional<Rows> pre_x;
  Tensor weight, bias, stats, dh;

  explicit BackwardInputs(const BackwardCall& call)
      : x(call.input, call.num_dims), dy(call.dy, call.num_dims), weight(contiguous(call.weight)),
        stats(call.stats.contiguous()) {
    const bool wants_dx = call.wants[0], wants_dresidual = call.wants[3];
    if (call.activation) bias = contiguous(call.bias);
    if (wants_dx || wants_dresidual) dh = contiguous(call.dh);
    if (wants_dx && call.has_residual && call.pre_activation) pre_x.emplace(*call.x, call.num_dims);
  }

  RowNormFields fields(const BackwardCall& call) const {
    using F = RowNormFields;
    const auto [wants_dx, wants_dweight, wants_dbias, wants_dresidual] = call.wants;
    const int flags = flag_if(wants_dx, F::kDX) | flag_if(wants_dweight, F::kDWeight) | flag_if(wants_dbias, F::kDBias) |
                      flag_if(wants_dresidual, F::kDResidual) | flag_if(call.weight_offset != 0.0, F::kOffset) |
                      flag_if(x.strided, F::kStridedX) | flag_if(dy.strided, F::kStridedY) |
                      flag_if(bool(call.dropout), F::kDropout) | flag_if(dh.defined(), F::kDH) |
                      flag_if(pre_x && pre_x->strided, F::kStridedPreX);
    const void *w = data_or_null(weight), *b = data_or_null(bias), *g = data_or_null(dh);
    const int dh_alignment = g ? std::min(alignment_of(g), own_alignment(x.cols, dh.scalar_type())) : 16;
    return {static_cast<int32_t>(x.cols), call.rms, dtype_code(call.x_dtype), dtype_code(call.dy.scalar_type()),
            dtype_code(dtype_of(call.weight)), b ? dtype_code(bias.scalar_type()) : -1, flags, x.alignment, dy.alignment,
            std::min(alignment_or_full(w), alignment_or_full(b)), own_alignment(x.cols, call.x_dtype),
            call.has_residual ? dtype_code(call.input.scalar_type()) : -1, call.pre_activation, call.activation,
            dh_alignment, pre_x ? pre_x->alignment : 16};
  }

  RowNormBwdArgs args(const BackwardCall& call) const {
    const Stats s(stats, x.rows, call.rms);
    RowNormBwdArgs args{dy.data(), x.data(), s.mean, s.rstd, data_or_null(weight), nullptr, nullptr, nullptr,
                        x.rows, 0, x.layout, dy.layout, call.weight_offset, data_or_null(bias), data_or_null(dh)};
    if (pre_x) {
      args.pre_x = pre_x->data();
      args.pre_x_rows = pre_x->layout;
    }
    if (call.dropout) {
      args.seed = call.seed->const_data_ptr();
      args.dropout_last = call.dropout.last();
      args.dropout_scale = call.dropout.scale();
    }
    return args;
  }
};

}  // namespace

void backward_cuda(const BackwardCall& call, Tensor& dx, Tensor& dweight, Tensor& dbias, Tensor& dresidual) {
  const auto [wants_dx, wants_dweight, wants_dbias, wants_dresidual] = call.wants;
  const BackwardInputs inputs(call);
  const int64_t rows = inputs.x.rows, cols = inputs.x.cols;
  const auto fields = inputs.fields(call);
  const OnDevice on(call.input.device());
  const int device = call.input.device().index();
  const auto& kernel = find_kernel({device, Kernel::kRowNormBwd, fields}, on.stream);

  RowNormBwdArgs args = inputs.args(call);
  if (wants_dx) args.dx = dx.data_ptr();
  if (wants_dresidual) args.dresidual = dresidual.data_ptr();
  const int64_t grid = kernel.grid(rows);
  if (!wants_dweight && !wants_dbias) return launch(kernel, grid, 1, on.stream, &args);

  const auto* split = kernel.splits_weight ? &find_kernel({device, Kernel::kRowNormBwdWeight, fields}, on.stream) : nullptr;
  const int64_t column_tiles = split ? split->grid(cols) : 1;
  // Split: enough slabs of rows to fill the device, at least 16 rows each.
  const int64_t num_partials =
      split ? std::max<int64_t>(1, std::min(ceil_div(rows, 16), ceil_div(split->max_blocks, column_tiles)))
            : grid / kernel.cluster;
  const PartialRows partials(call.input, num_partials, cols);
  args.dweight_partials = partials.data(0);
  args.dbias_partials = partials.data(1);
  args.partial_pitch = partials.pitch;
  if (wants_dx || wants_dresidual || !split) launch(kernel, grid, 1, on.stream, &args);
  if (split) launch(*split, column_tiles, num_partials, on.stream, &args);
  sum_partials(partials, wants_dweight ? &dweight : nullptr, wants_dbias ? &dbias : nullptr, on.stream);
}

}  // namespace kf
