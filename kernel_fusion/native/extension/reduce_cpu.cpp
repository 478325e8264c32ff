// Reductions on the CPU: rows, or how columns are cut into tasks, as for pointwise chains (pointwise_cpu.cpp).
#include <algorithm>
#include <memory>

#include "cpu/kernels.h"
#include "cpu/tasks.h"
#include "reduce.h"

namespace kf {

namespace {

// inner is more than 1: tiles of columns, and blocks of the reduced index if tiles are too few to share.
void reduce_columns(const cpu::Reduction& args, int64_t outer, double divisor, Tensor& out) {
  constexpr int64_t kEnoughTasks = 64, kLeastRows = 128;
  const int64_t tiles = ceil_div(args.inner, cpu::kMaxColumns);
  const int64_t wanted = ceil_div(kEnoughTasks, outer * tiles);
  const int64_t block_rows = std::max(std::min(args.reduced, kLeastRows), ceil_div(args.reduced, wanted));
  const int64_t blocks = ceil_div(args.reduced, block_rows);
  const std::unique_ptr<double[]> partials(blocks > 1 ? new double[outer * blocks * args.inner] : nullptr);
  share(outer * blocks * tiles, block_rows * std::min(args.inner, cpu::kMaxColumns), [&](int64_t begin, int64_t end) {
    double local[cpu::kMaxColumns];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t o = task / tiles / blocks, block = task / tiles % blocks, left = task % tiles * cpu::kMaxColumns;
      const int64_t right = std::min(args.inner, left + cpu::kMaxColumns), first = block * block_rows;
      double* sums = blocks > 1 ? partials.get() + (o * blocks + block) * args.inner + left : local;
      cpu::kernels().reduce_columns(args, o, first, std::min(args.reduced, first + block_rows), left, right, sums);
      if (blocks == 1) store_sums(sums, right - left, divisor, out, o * args.inner + left);
    }
  });
  if (blocks == 1) return;
  sum_rows(outer, blocks, args.inner, divisor,
           [&](int64_t o) { return RowsToSum{partials.get() + o * blocks * args.inner, at::kDouble, out, o * args.inner}; });
}

}  // namespace

void reduce_cpu(const Reduction& call, Tensor& out) {
  const cpu::Reduction args{call.map,
                            static_cast<const char*>(call.in),
                            cpu_dtype(call.in_type),
                            call.reduced,
                            call.inner,
                            call.outer_stride,
                            call.reduced_stride,
                            call.inner_stride,
                            call.in_type == at::kDouble || out.scalar_type() == at::kDouble,
                            call.divisor,
                            cpu_dtype(out.scalar_type()),
                            static_cast<char*>(out.data_ptr())};
  count(Counter::kCpuForward);
  if (call.inner == 1) run_rows(cpu::kernels().reduce_rows, args, call.outer);
  else reduce_columns(args, call.outer, call.divisor, out);
}

}  // namespace kf
