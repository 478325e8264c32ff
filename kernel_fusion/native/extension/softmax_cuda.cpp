// Softmax on CUDA: arguments -> request -> launch.
#include <algorithm>
#include <bit>

#include "backends.h"
#include "cuda/launcher.h"
#include "cuda/requests.h"
#include "cuda/vectors.h"
#include "shared/softmax_args.h"

namespace kf {
namespace {

// The number of vectors of a row rounded up to 2^k or 3 * 2^k: what a kernel is compiled for.
int32_t softmax_capacity(int64_t vectors) {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(vectors)));
  return static_cast<int32_t>(power >= 4 && vectors <= power / 4 * 3 ? power / 4 * 3 : power);
}

void check_softmax_cols(int64_t cols) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (cols > kMost)
    driver::fail("softmax kernels take rows of at most 2^30 elements, got " + std::to_string(cols) +
                 "; the backend 'eager' computes longer ones");
}

int32_t row_alignment(const Rows& rows, int64_t vec) {
  return std::min<int32_t>(rows.alignment, static_cast<int32_t>(vec * size_of(rows.tensor.scalar_type())));
}

}  // namespace

void softmax_cuda(const SoftmaxCall& call, Tensor& y) {
  const Rows x(call.x, 1);
  check_softmax_cols(x.cols);
  const bool masked = call.mask.defined(), repeats = masked && call.mask.stride(-1) == 0;
  const Rows mask = masked ? Rows(repeats ? call.mask.narrow(-1, 0, 1) : call.mask, 1) : x;
  const int64_t vec = dividing_power(x.cols, kVectorBytes / size_of(call.x.scalar_type()));
  SoftmaxFields fields{};
  fields.x = dtype_code(call.x.scalar_type());
  fields.mask = -1;
  fields.causal = call.causal;
  fields.vec = static_cast<int32_t>(vec);
  fields.capacity = softmax_capacity(x.cols / vec);
  if (masked) {
    const bool boolean = mask.tensor.scalar_type() == at::kBool;
    fields.mask = boolean ? SoftmaxFields::kBooleanMask : dtype_code(mask.tensor.scalar_type());
    fields.strided_mask = mask.strided;
  }
  fields.mask_repeats = repeats;
  fields.strided_x = x.strided;
  fields.align_x = row_alignment(x, vec);
  fields.align_mask = masked && !repeats ? row_alignment(mask, vec) : 16;
  const auto device = call.x.device();
  const OnDevice on(device);
  const auto& kernel = find_kernel({device.index(), Kernel::kSoftmax, fields}, on.stream);
  const SoftmaxArgs args{x.data(), masked ? mask.data() : nullptr, y.data_ptr(), x.rows, x.cols,
                         call.causal ? call.x.size(-2) : 1, x.layout, mask.layout, call.scale};
  launch(kernel, kernel.grid(x.rows), 1, on.stream, &args);
}

void softmax_bwd_cuda(const SoftmaxBwdCall& call, Tensor& dx) {
  const Tensor &dy = call.dy, &y = call.y;
  const Rows dy_rows(dy, 1), y_rows(y, 1);
  check_softmax_cols(y_rows.cols);
  const int64_t vec = dividing_power(y_rows.cols, kVectorBytes / size_of(y.scalar_type()));
  const SoftmaxBwdFields fields{dtype_code(dy.scalar_type()), dtype_code(y.scalar_type()), dtype_code(dx.scalar_type()),
                                call.leaves_out, static_cast<int32_t>(vec), softmax_capacity(y_rows.cols / vec), dy_rows.strided,
                                y_rows.strided, row_alignment(dy_rows, vec), row_alignment(y_rows, vec)};
  const auto device = y.device();
  const OnDevice on(device);
  const auto& kernel = find_kernel({device.index(), Kernel::kSoftmaxBwd, fields}, on.stream);
  const SoftmaxBwdArgs args{dy_rows.data(), y_rows.data(), dx.data_ptr(), y_rows.rows, y_rows.cols, dy_rows.layout,
                            y_rows.layout, call.scale};
  launch(kernel, kernel.grid(y_rows.rows), 1, on.stream, &args);
}

}  // namespace kf
