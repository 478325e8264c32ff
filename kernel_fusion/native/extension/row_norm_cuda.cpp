// The CUDA operators: arguments -> key -> launch. Row counts beyond a grid's limit would not fit a device's memory.
#include "cuda/sum_partials.h"
#include "quantize.h"

namespace kf {
namespace {

// weight or bias, contiguous; they are small, so a copy costs nothing.
Tensor contiguous(const OptionalTensor& t) { return present(t) ? t->contiguous() : Tensor(); }

bool repeats_rows(const Tensor& t, int64_t num_dims) {
  for (int64_t i = 0; i < t.dim() - num_dims; ++i)
    if (t.stride(i) == 0 && t.size(i) > 1) return true;
  return false;
}

// The rows of a tensor. Kernels read whole units of 16 bytes, but nothing after the last row. A tensor that repeats rows is
// copied if others end with the last one.
Rows rows_of(const Tensor& t, int64_t num_dims) {
  Rows rows(t, num_dims);
  const bool whole = rows.cols * t.element_size() % 16 == 0;
  if (!whole && repeats_rows(t, num_dims)) return Rows(t.contiguous(), num_dims);
  return rows;
}
std::optional<Rows> rows_of(const OptionalTensor& t, int64_t num_dims) {
  return present(t) ? std::optional<Rows>(rows_of(*t, num_dims)) : std::nullopt;
}

// What is there once for a group of rows.
struct ColumnVectors {
  GroupRows weight, bias, gate;

  template <class Call>
  ColumnVectors(const Call& call, const OptionalTensor& bias)
      : weight(call.weight, call.num_dims, call.grouped), bias(bias, call.num_dims, call.grouped),
        gate(call.residual_gate(), call.num_dims, call.grouped) {}
  int alignment() const { return std::min({weight.alignment, bias.alignment, gate.alignment}); }
  RowGroups of(const Groups& groups) const { return {0, groups.step(), groups.inner, weight.pitch, bias.pitch, gate.pitch}; }
};

// The alignment of rows of a contiguous tensor that we allocated.
int own_alignment(int64_t cols, at::ScalarType type) {
  return alignment_of(reinterpret_cast<const void*>(cols * static_cast<int64_t>(c10::elementSize(type))));
}

// Launches on `grid` blocks for each group, in as many launches as the second coordinate of a grid takes.
template <class Args>
void launch_groups(const LoadedKernel& kernel, int64_t grid, int64_t groups, driver::Stream stream, Args& args) {
  constexpr int64_t kMost = 65535;
  for (int64_t first = 0; first < groups; first += kMost) {
    args.groups.first = first;
    launch(kernel, grid, std::min(kMost, groups - first), stream, &args);
  }
}

// The spec, as far as both directions have the same.
template <class Call>
RowNormSpec spec_of(const Call& call, Direction direction, int64_t cols, at::ScalarType x, at::ScalarType y, OptionalDtype bias,
                    OptionalDtype residual) {
  RowNormSpec spec{.direction = direction,
                   .rms = call.rms,
                   .cols = static_cast<int>(cols),
                   .x = cpu_dtype(x),
                   .y = cpu_dtype(y),
                   .weight = dtype_or_absent(dtype_of(call.weight)),
                   .bias = dtype_or_absent(bias),
                   .offset = call.weight_offset != 0.0,
                   .grads = {},
                   .residual = dtype_or_absent(residual),
                   .passes = call.passes};
  describe(call, call, spec);
  return spec;
}

// The arguments that both kernels have.
template <class Args, class Call>
void set_common(Args& args, const Call& call, const ColumnVectors& vectors, const Groups& groups) {
  args.groups = vectors.of(groups);
  args.gate = data_or_null(vectors.gate.tensor);
  args.weight_offset = call.weight_offset;
  if (!call.dropout) return;
  args.seed = call.seed()->const_data_ptr();
  args.dropout_last = call.dropout.last();
  args.dropout_scale = call.dropout.scale();
}

// The tensors of a forward as its kernels read them.
struct ForwardInputs {
  Rows x;
  Groups groups;
  std::optional<Rows> other;
  ColumnVectors vectors;

  explicit ForwardInputs(const ForwardCall& call)
      : x(rows_of(call.input, call.num_dims)), groups(groups_of(call)), other(rows_of(call.other(), call.num_dims)),
        vectors(call, call.bias) {
    check_length(x.cols);
  }

  RowNormSpec spec(const ForwardCall& call) const {
    const auto direction = call.wants_stats ? Direction::kForward : Direction::kInference;
    return spec_of(call, direction, x.cols, call.input.scalar_type(), call.y_dtype(), dtype_of(call.bias),
                   dtype_of(call.residual));
  }

  Access access(const ForwardCall& call, const Tensor& y) const {
    const auto row_bytes = (x.cols * y.element_size()) & 15;
    const auto* second_row = static_cast<const char*>(y.const_data_ptr()) + row_bytes;
    return {.x = x.alignment,
            .y = call.passes == Passes::kFirst ? 16 : alignment_of(second_row),
            .weight = vectors.alignment(),
            .strided_x = x.strided,
            .residual = other ? other->alignment : 16,
            .strided_residual = other && other->strided};
  }

  void launch(const LoadedKernel& kernel, const ForwardCall& call, const Tensor& y, const Tensor& stats, const Tensor& h,
              const CodeArgs& codes, driver::Stream stream) const {
    const Stats s(stats, x.rows, call.rms);
    const void *weight = data_or_null(vectors.weight.tensor), *bias = data_or_null(vectors.bias.tensor);
    RowNormFwdArgs args{x.data(), weight, bias, y.data_ptr(), s.mean, s.rstd, x.rows / groups.count, x.layout, call.eps};
    set_common(args, call, vectors, groups);
    args.codes = codes;
    if (other) {
      args.residual = other->data();
      args.residual_rows = other->layout;
    }
    if (present(call.sums)) args.h = call.sums->data_ptr();
    else if (h.defined()) args.h = h.data_ptr();
    launch_groups(kernel, kernel.grid(args.rows, groups.count), groups.count, stream, args);
  }
};

}  // namespace

void forward_cuda(const ForwardCall& call, Tensor& y, Tensor& stats, Tensor& h) {
  const ForwardInputs inputs(call);
  const OnDevice on(call.input.device());
  const auto& kernel = find_kernel({call.input.device(), inputs.spec(call), inputs.access(call, y)}, on.stream);
  inputs.launch(kernel, call, y, stats, h, {}, on.stream);
}

void quantized_row_norm_cuda(const ForwardCall& call, const Quantize& quantize, Tensor& y, Tensor& h, Quantized& to) {
  const ForwardInputs inputs(call);
  const OnDevice on(call.input.device());
  auto spec = inputs.spec(call);
  spec.codes = codes_of(quantize, inputs.x.cols);
  const auto& kernel = find_kernel({call.input.device(), spec, inputs.access(call, y)}, on.stream);
  const Tensor whole = kernel.splits && !quantize.keeps ? allocate(call.input.sizes(), y.options()) : y;
  inputs.launch(kernel, call, whole, {}, h, code_args(quantize, inputs.x.rows, to), on.stream);
  if (kernel.splits) quantize_cuda(whole, quantize, to);
}

namespace {

// The tensors of a backward as its kernels read them.
struct BackwardInputs {
  Rows x, dy;
  std::optional<Rows> other;
  ColumnVectors vectors;
  Tensor stats, dh;
  Groups groups;

  explicit BackwardInputs(const BackwardCall& call)
      : x(rows_of(call.input, call.num_dims)), dy(rows_of(call.dy, call.num_dims)),
        vectors(call, follows(call, call) ? call.bias : kAbsent), stats(call.stats.contiguous()), groups(groups_of(call)) {
    const auto [wants_dx, wants_dweight, wants_dbias, wants_dresidual, wants_dgate] = call.wants;
    if (wants_dx || wants_dresidual || wants_dgate) dh = contiguous(call.dh);
    if (present(call.row()) || (wants_dx && call.has_residual && call.pre_activation) || wants_dgate)
      other = rows_of(call.other(), call.num_dims);
  }

  RowNormSpec spec(const BackwardCall& call) const {
    const auto [wants_dx, wants_dweight, wants_dbias, wants_dresidual, wants_dgate] = call.wants;
    const Tensor& bias = vectors.bias.tensor;
    const auto bias_type = bias.defined() ? OptionalDtype(bias.scalar_type()) : std::nullopt;
    const auto residual = call.has_residual ? OptionalDtype(call.input.scalar_type()) : std::nullopt;
    auto spec = spec_of(call, Direction::kBackward, x.cols, call.x_dtype, call.dy.scalar_type(), bias_type, residual);
    std::copy_n(call.wants.begin(), 3, spec.grads);
    spec.dh = dh.defined();
    spec.dresidual = wants_dresidual || wants_dgate;
    spec.dgate = wants_dgate;
    // A pass over the sums would read and write as much as everything else.
    spec.one_row = spec.grouped && x.rows == groups.count && (wants_dweight || wants_dbias || wants_dgate);
    if (spec.one_row && wants_dbias) spec.bias = cpu_dtype(*call.bias_dtype);
    return spec;
  }

  Access access(const BackwardCall& call) const {
    const void* g = data_or_null(dh);
    return {.x = x.alignment,
            .y = dy.alignment,
            .weight = vectors.alignment(),
            .dx = own_alignment(x.cols, call.x_dtype),
            .strided_x = x.strided,
            .strided_y = dy.strided,
            .residual = g ? std::min(alignment_of(g), own_alignment(x.cols, dh.scalar_type())) : 16,
            .pre_x = other ? other->alignment : 16,
            .strided_pre_x = other && other->strided};
  }

  RowNormBwdArgs args(const BackwardCall& call) const {
    const Stats s(stats, x.rows, call.rms);
    RowNormBwdArgs args{dy.data(), x.data(), s.mean, s.rstd, data_or_null(vectors.weight.tensor)};
    args.rows = x.rows / groups.count;
    args.x_rows = x.layout;
    args.dy_rows = dy.layout;
    args.bias = data_or_null(vectors.bias.tensor);
    args.dh = data_or_null(dh);
    set_common(args, call, vectors, groups);
    if (other) {
      args.pre_x = other->data();
      args.pre_x_rows = other->layout;
    }
    return args;
  }
};

}  // namespace

void backward_cuda(const BackwardCall& call, RowNormGradients& to) {
  const auto [wants_dx, wants_dweight, wants_dbias, wants_dresidual, wants_dgate] = call.wants;
  const BackwardInputs inputs(call);
  const int64_t cols = inputs.x.cols, groups = inputs.groups.count, rows = inputs.x.rows / groups;
  check_length(cols);
  const auto device = call.input.device();
  auto spec = inputs.spec(call);
  const auto access = inputs.access(call);
  const OnDevice on(device);
  const auto& kernel = find_kernel({device, spec, access}, on.stream);

  RowNormBwdArgs args = inputs.args(call);
  args.dx = memory_or_null(to.dx);
  // A pass for the sums makes dgate of it.
  const Tensor dresidual = wants_dgate && !wants_dresidual ? allocate(call.input.sizes(), call.input.options()) : to.dresidual;
  args.dresidual = memory_or_null(dresidual);
  const int64_t grid = kernel.grid(rows, groups);
  const auto launch_main = [&] {
    RowNormBwdArgs its_args = args;
    if (present(call.sums)) its_args.dweight_partials = call.sums->data_ptr();
    launch_groups(kernel, grid, groups, on.stream, its_args);
  };
  if (!wants_dweight && !wants_dbias && !wants_dgate) return launch_main();

  spec.direction = Direction::kBackwardWeight;
  const auto* split = kernel.splits ? &find_kernel({device, spec, access}, on.stream) : nullptr;
  const int64_t column_tiles = split ? split->grid(cols) : 1;
  // Split: enough slabs of rows to fill the device, at least 16 rows each.
  const int64_t num_partials =
      split ? std::max<int64_t>(1, std::min(ceil_div(rows, 16), ceil_div(split->max_blocks, column_tiles * groups)))
            : grid / kernel.cluster;
  // A single partial row in the gradients' dtypes is the gradient.
  const auto is_sum = [&](const Tensor& t) { return !t.defined() || t.scalar_type() == acc_dtype(call.input); };
  std::optional<PartialRows> partials;
  if (spec.one_row || (spec.grouped && num_partials == 1 && is_sum(to.dweight) && is_sum(to.dbias) && is_sum(to.dgate))) {
    args.dweight_partials = memory_or_null(to.dweight);
    args.dbias_partials = memory_or_null(to.dbias);
    args.dgate_partials = memory_or_null(to.dgate);
  } else {
    partials.emplace(call.input, num_partials, cols * groups, wants_dgate ? 3 : 2);
    args.dweight_partials = partials->data(0);
    args.dbias_partials = partials->data(1);
    if (wants_dgate) args.dgate_partials = partials->data(2);
    args.partial_pitch = partials->pitch;
  }
  if (wants_dx || spec.dresidual || call.passes == Passes::kFirst || !split) launch_main();
  // With groups, a block's second coordinate is the group, otherwise the slab.
  if (split && spec.grouped) launch_groups(*split, column_tiles * num_partials, groups, on.stream, args);
  else if (split) launch(*split, column_tiles, num_partials, on.stream, &args);
  if (!partials) return;
  if (wants_dweight || wants_dbias) sum_partials(*partials, to.dweight, to.dbias, on.stream, spec.grouped);
  if (wants_dgate) sum_partials(*partials, to.dgate, {}, on.stream, spec.grouped, 2);
}

}  // namespace kf
