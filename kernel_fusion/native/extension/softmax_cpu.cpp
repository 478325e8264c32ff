// Softmax on the CPU: threads share the rows.
#include "backends.h"
#include "cpu/kernels.h"
#include "cpu/tasks.h"

namespace kf {

namespace {

// The leading dimensions, merged if their strides allow it.
cpu::RowStrides row_strides(const Tensor& t) {
  cpu::RowStrides rows{};
  for (int64_t d = t.dim() - 2; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    const int last = rows.dims - 1;
    if (last >= 0 && t.stride(d) == rows.size[last] * rows.stride[last]) {
      rows.size[last] *= t.size(d);
    } else {
      rows.size[rows.dims] = t.size(d);
      rows.stride[rows.dims++] = t.stride(d);
    }
  }
  return rows;
}

}  // namespace

void softmax_cpu(const SoftmaxCall& call, Tensor& y) {
  const int64_t cols = call.x.size(-1), rows = call.x.numel() / cols;
  const Tensor x = cols == 1 || call.x.stride(-1) == 1 ? call.x : call.x.contiguous();
  cpu::Softmax args{bytes(x), bytes(call.mask), static_cast<char*>(y.data_ptr()), row_strides(x)};
  args.cols = cols;
  args.causal_rows = call.causal ? x.size(-2) : 0;
  args.scale = call.scale;
  args.type = cpu_dtype(x.scalar_type());
  args.mask_type = mask_dtype(call.mask);
  if (call.mask.defined()) {
    args.mask_rows = row_strides(call.mask);
    args.mask_stride = call.mask.stride(-1);
  }
  count(Counter::kCpuForward);
  prefer_huge_pages(y);
  share(rows, cols, [&](int64_t begin, int64_t end) { cpu::kernels().softmax(args, begin, end); });
}

void softmax_bwd_cpu(const SoftmaxBwdCall& call, Tensor& dx) {
  const Tensor& y = call.y;
  const bool goes_with_y = (call.dy.scalar_type() == at::kDouble) == (y.scalar_type() == at::kDouble);
  const Tensor dy = goes_with_y ? call.dy : call.dy.to(y.scalar_type());
  const int64_t cols = y.size(-1), rows = y.numel() / cols;
  const bool streams = past_caches(dy.nbytes() + y.nbytes() + dx.nbytes(), free_threads());
  const Dtype dy_type = cpu_dtype(dy.scalar_type()), type = cpu_dtype(y.scalar_type());
  const cpu::SoftmaxBackward args{bytes(dy), bytes(y),       static_cast<char*>(dx.data_ptr()), cols, call.scale, dy_type, type,
                                  streams,   call.leaves_out};
  count(Counter::kCpuBackward);
  prefer_huge_pages(dx);
  share(rows, cols, [&](int64_t begin, int64_t end) { cpu::kernels().softmax_bwd(args, begin, end); });
}

}  // namespace kf
