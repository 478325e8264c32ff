// Softmax on the CPU: threads share the rows.
#include "backends.h"
#include "cpu/kernels.h"
#include "cpu/tasks.h"

namespace kf {

void softmax_cpu(const SoftmaxVerbCall& call, Tensor& y) {
  const Rows x(call.input, 1);
  const bool masked = present(call.mask);
  const Rows mask = masked ? rows_of_mask(*call.mask) : x;
  const cpu::Softmax args{bytes(x.tensor),
                          masked ? bytes(mask.tensor) : nullptr,
                          static_cast<char*>(y.data_ptr()),
                          x.layout,
                          mask.layout,
                          x.cols,
                          masked && !repeats_column(*call.mask),
                          call.causal ? call.input.size(-2) : 0,
                          call.scale,
                          cpu_dtype(call.input.scalar_type()),
                          mask_dtype(call.mask)};
  count(Counter::kCpuForward);
  prefer_huge_pages(y);
  share(x.rows, x.cols, [&](int64_t begin, int64_t end) { cpu::kernels().softmax(args, begin, end); });
}

void softmax_bwd_cpu(const SoftmaxBwdCall& call, Tensor& dx) {
  const Tensor& y = call.y;
  const Tensor dy = mixes(y.scalar_type(), call.dy.scalar_type()) ? call.dy : call.dy.to(y.scalar_type());
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
