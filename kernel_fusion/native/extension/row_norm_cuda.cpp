// The CUDA operators: arguments -> key -> launch. Row counts beyond a grid's limit are far beyond a device's memory.
#include <ATen/ops/empty.h>

#include "backends.h"
#include "cuda/launcher.h"
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

// The alignment of the rows of a contiguous tensor of our own making.
int own_alignment(int64_t cols, at::ScalarType type) {
  return alignment_of(reinterpret_cast<const void*>(cols * static_cast<int64_t>(c10::elementSize(type))));
}

void check_length(int64_t cols) {
  if (cols > INT32_MAX) driver::fail("rows of more than 2^31 - 1 elements are not supported, got N = " + std::to_string(cols));
}

RowNormSpec forward_spec(const ForwardCall& call, int64_t cols) {
  return {.direction = call.wants_stats ? Direction::kForward : Direction::kInference,
          .rms = call.rms,
          .cols = static_cast<int>(cols),
          .x = cpu_dtype(call.input.scalar_type()),
          .y = cpu_dtype(call.y_dtype()),
          .weight = dtype_or_absent(dtype_of(call.weight)),
          .bias = dtype_or_absent(dtype_of(call.bias)),
          .offset = call.weight_offset != 0.0,
          .grads = {},
          .residual = dtype_or_absent(dtype_of(call.residual)),
          .pre_activation = call.pre_activation,
          .activation = call.activation,
          .dropout = bool(call.dropout),
          .hf = call.hf};
}

}  // namespace

void forward_cuda(const ForwardCall& call, Tensor& y, Tensor& stats, Tensor& h) {
  const Rows x(call.input, call.num_dims);
  check_length(x.cols);
  const auto residual = rows_of(call.residual, call.num_dims);
  const Tensor weight = contiguous(call.weight), bias = contiguous(call.bias);
  const void *w = data_or_null(weight), *b = data_or_null(bias);
  const auto row_bytes = (x.cols * y.element_size()) & 15;
  const Access access{.x = x.alignment,
                      .y = alignment_of(static_cast<const char*>(y.const_data_ptr()) + row_bytes),
                      .weight = std::min(alignment_or_full(w), alignment_or_full(b)),
                      .strided_x = x.strided,
                      .residual = residual ? residual->alignment : 16,
                      .strided_residual = residual && residual->strided};
  const OnDevice on(call.input.device());
  const auto& kernel = find_kernel({call.input.device(), forward_spec(call, x.cols), access}, on.stream);
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

  RowNormSpec spec(const BackwardCall& call) const {
    const auto [wants_dx, wants_dweight, wants_dbias, wants_dresidual] = call.wants;
    return {.direction = Direction::kBackward,
            .rms = call.rms,
            .cols = static_cast<int>(x.cols),
            .x = cpu_dtype(call.x_dtype),
            .y = cpu_dtype(call.dy.scalar_type()),
            .weight = dtype_or_absent(dtype_of(call.weight)),
            .bias = dtype_or_absent(dtype_of(bias)),
            .offset = call.weight_offset != 0.0,
            .grads = {wants_dx, wants_dweight, wants_dbias},
            .residual = call.has_residual ? cpu_dtype(call.input.scalar_type()) : Dtype::kAbsent,
            .pre_activation = call.pre_activation,
            .activation = call.activation,
            .dropout = bool(call.dropout),
            .dh = dh.defined(),
            .dresidual = wants_dresidual,
            .hf = call.hf};
  }

  Access access(const BackwardCall& call) const {
    const void* g = data_or_null(dh);
    return {.x = x.alignment,
            .y = dy.alignment,
            .weight = std::min(alignment_or_full(data_or_null(weight)), alignment_or_full(data_or_null(bias))),
            .dx = own_alignment(x.cols, call.x_dtype),
            .strided_x = x.strided,
            .strided_y = dy.strided,
            .residual = g ? std::min(alignment_of(g), own_alignment(x.cols, dh.scalar_type())) : 16,
            .pre_x = pre_x ? pre_x->alignment : 16,
            .strided_pre_x = pre_x && pre_x->strided};
  }

  RowNormBwdArgs args(const BackwardCall& call) const {
    const Stats s(stats, x.rows, call.rms);
    RowNormBwdArgs args{dy.data(),
                        x.data(),
                        s.mean,
                        s.rstd,
                        data_or_null(weight),
                        nullptr,
                        nullptr,
                        nullptr,
                        x.rows,
                        0,
                        x.layout,
                        dy.layout,
                        call.weight_offset,
                        data_or_null(bias),
                        data_or_null(dh)};
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
  const auto device = call.input.device();
  auto spec = inputs.spec(call);
  const auto access = inputs.access(call);
  const OnDevice on(device);
  const auto& kernel = find_kernel({device, spec, access}, on.stream);

  RowNormBwdArgs args = inputs.args(call);
  if (wants_dx) args.dx = dx.data_ptr();
  if (wants_dresidual) args.dresidual = dresidual.data_ptr();
  const int64_t grid = kernel.grid(rows);
  if (!wants_dweight && !wants_dbias) return launch(kernel, grid, 1, on.stream, &args);

  spec.direction = Direction::kBackwardWeight;
  const auto* split = kernel.splits_weight ? &find_kernel({device, spec, access}, on.stream) : nullptr;
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
