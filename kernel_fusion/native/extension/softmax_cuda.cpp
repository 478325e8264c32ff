// Softmax on CUDA: arguments -> key -> launch.
#include <algorithm>
#include <bit>

#include "backends.h"
#include "cuda/launcher.h"
#include "shared/reduce_args.h"

namespace kf {
namespace {

// The number of vectors in a row, rounded up to 2^k or 3 * 2^k, for which a kernel is compiled.
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

}  // namespace

void softmax_cuda(const SoftmaxVerbCall& call, Tensor& y) {
  const Rows x(call.input, 1);
  check_softmax_cols(x.cols);
  const bool masked = present(call.mask), repeats = masked && repeats_column(*call.mask);
  const Rows mask = masked ? rows_of_mask(*call.mask) : x;
  const int64_t vec = dividing_power(x.cols, kVectorBytes / size_of(call.input.scalar_type()));
  const SoftmaxSpec spec{cpu_dtype(call.input.scalar_type()), mask_dtype(call.mask), call.causal, call.scale != 1};
  SoftmaxAccess access{static_cast<int>(vec), softmax_capacity(x.cols / vec), row_access(x, vec)};
  if (masked) {
    access.other = repeats ? RowAccess{.strided = mask.strided} : row_access(mask, vec);
    access.mask_repeats = repeats;
  }
  const SoftmaxArgs args{x.data(),  masked ? mask.data() : nullptr,        y.data_ptr(), x.rows,
                         x.cols,    call.causal ? call.input.size(-2) : 1, x.layout,     mask.layout,
                         call.scale};
  launch_over(x.rows, call.input.device(), spec, access, &args);
}

void softmax_bwd_cuda(const SoftmaxBwdCall& call, Tensor& dx) {
  const Tensor &dy = call.dy, &y = call.y;
  const Rows dy_rows(dy, 1), y_rows(y, 1);
  check_softmax_cols(y_rows.cols);
  const int64_t vec = dividing_power(y_rows.cols, kVectorBytes / size_of(y.scalar_type()));
  const SoftmaxBwdSpec spec{cpu_dtype(dy.scalar_type()), cpu_dtype(y.scalar_type()), cpu_dtype(dx.scalar_type()),
                            call.leaves_out};
  const SoftmaxAccess access{static_cast<int>(vec), softmax_capacity(y_rows.cols / vec), row_access(y_rows, vec),
                             row_access(dy_rows, vec)};
  const SoftmaxBwdArgs args{dy_rows.data(), y_rows.data(),  dx.data_ptr(), y_rows.rows,
                            y_rows.cols,    dy_rows.layout, y_rows.layout, call.scale};
  launch_over(y_rows.rows, y.device(), spec, access, &args);
}

}  // namespace kf
