// Pointwise chains on the CPU: how the work is cut into tasks. The shape alone decides the cuts, and partial sums are added in
// order, in double, so results do not depend on the number of threads.
#include <algorithm>
#include <memory>

#include "cpu/kernels.h"
#include "cpu/tasks.h"
#include "pointwise.h"

namespace kf {
namespace {

void run_loop(cpu::PointwiseLoop* loop, const cpu::ChainOperands& operands, at::TensorIteratorBase& iter) {
  const int count = iter.ntensors();
  const auto part = [&](char** data, const int64_t* strides, int64_t inner_size, int64_t outer_size) {
    loop(operands, {data, strides, strides + count, inner_size, outer_size});
  };
  share(iter.numel(), 1, [&](int64_t begin, int64_t end) { iter.serial_for_each(part, {begin, end}); });
}

// The operands of a call. `base` is the operand by whose offsets dropout numbers elements.
cpu::ChainOperands operands_of(const Chain& chain, at::TensorIteratorBase& iter, int base, std::array<bool, 2> wants) {
  size_t moved = 0;
  for (int k = 0; k < iter.ntensors(); ++k) moved += iter.tensor(k).nbytes();
  const auto* origin = static_cast<const char*>(iter.data_ptr(base));
  const bool wide = iter.dtype(base) == at::kDouble, streams = past_caches(moved, free_threads());
  cpu::ChainOperands operands{chain, {}, origin, {wants[0], wants[1]}, wide, streams};
  for (int k = 0; k < iter.ntensors(); ++k) operands.types[k] = cpu_dtype(iter.dtype(k));
  return operands;
}

}  // namespace

void pointwise_cpu(const Chain& chain, at::TensorIteratorBase& iter) {
  count(Counter::kCpuForward);
  prefer_huge_pages(iter.output());
  run_loop(cpu::kernels().pointwise, operands_of(chain, iter, 0, {}), iter);
}

void pointwise_bwd_cpu(const Chain& chain, at::TensorIteratorBase& iter, std::array<bool, 2> wants) {
  count(Counter::kCpuBackward);
  for (int k = 0; k < iter.noutputs(); ++k) prefer_huge_pages(iter.output(k));
  run_loop(cpu::kernels().pointwise_bwd, operands_of(chain, iter, wants[0] + wants[1], wants), iter);
}

void pointwise_bwd_columns_cpu(const ColumnCall& call, Tensor& da, Tensor& db) {
  count(Counter::kCpuBackward);
  prefer_huge_pages(da);
  const auto type = [](const Tensor& t) { return cpu_dtype(t.scalar_type()); };
  const bool streams = past_caches(call.dy.nbytes() + call.a.nbytes() + (da.defined() ? da.nbytes() : 0), free_threads());
  const cpu::ChainColumns args{call.chain, bytes(call.dy), bytes(call.a), bytes(call.b), const_cast<char*>(bytes(da)),
                               call.cols,  type(call.dy),  type(call.a),  type(call.b),  type(call.dy) == Dtype::kDouble,
                               streams};
  // There are at most 64 blocks of rows, so that partial rows stay a small part of the memory traffic.
  constexpr int64_t kStrip = 8192;
  const int64_t block_rows = std::max<int64_t>(8, ceil_div(call.rows, 64)), blocks = ceil_div(call.rows, block_rows);
  const int64_t strips = ceil_div(call.cols, kStrip);
  const std::unique_ptr<double[]> partials(new double[blocks * call.cols]);
  share(blocks * strips, block_rows * std::min(call.cols, kStrip), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task / strips, left = task % strips * kStrip, right = std::min(call.cols, left + kStrip);
      double* sums = partials.get() + block * call.cols;
      std::fill(sums + left, sums + right, 0.0);
      cpu::kernels().pointwise_bwd_columns(args, block * block_rows, std::min(call.rows, (block + 1) * block_rows), left, right,
                                           sums);
    }
  });
  sum_rows(1, blocks, call.cols, 1.0, [&](int64_t) { return RowsToSum{partials.get(), at::kDouble, db}; });
}

}  // namespace kf
