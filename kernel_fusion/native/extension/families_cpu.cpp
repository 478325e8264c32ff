// Pointwise chains, reductions and softmax on the CPU: how the work is cut into tasks. The cuts are functions of the shape, and
// partial sums are joined in their order, in double: results do not depend on the number of threads.
#include <algorithm>
#include <memory>

#include "counters.h"
#include "cpu/cpu_dtype.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/sum_rows.h"
#include "cpu/tasks.h"
#include "families.h"

namespace kf {
namespace {

const char* bytes(const Tensor& t) { return static_cast<const char*>(data_or_null(t)); }

// ---- Pointwise -------------------------------------------------------------------------------------------------------------

void run_loop(cpu::PointwiseLoop* loop, const cpu::ChainOperands& operands, at::TensorIteratorBase& iter) {
  const int count = iter.ntensors();
  const auto part = [&](char** data, const int64_t* strides, int64_t inner_size, int64_t outer_size) {
    loop(operands, {data, strides, strides + count, inner_size, outer_size});
  };
  share(iter.numel(), 1, [&](int64_t begin, int64_t end) { iter.serial_for_each(part, {begin, end}); });
}

// `base`: the operand whose offsets are the positions of dropout.
cpu::ChainOperands operands_of(const Chain& chain, at::TensorIteratorBase& iter, int base, std::array<bool, 2> wants) {
  size_t moved = 0;
  for (int k = 0; k < iter.ntensors(); ++k) moved += iter.tensor(k).nbytes();
  cpu::ChainOperands operands{chain, {}, static_cast<const char*>(iter.data_ptr(base)), {wants[0], wants[1]},
                              iter.dtype(base) == at::kDouble, past_caches(moved, free_threads())};
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
  const cpu::ChainColumns args{call.chain, bytes(call.dy), bytes(call.a), bytes(call.b),
                               da.defined() ? static_cast<char*>(da.data_ptr()) : nullptr, call.cols,
                               cpu_dtype(call.dy.scalar_type()), cpu_dtype(call.a.scalar_type()),
                               cpu_dtype(call.b.scalar_type()), call.dy.scalar_type() == at::kDouble,
                               past_caches(call.dy.nbytes() + call.a.nbytes() + (da.defined() ? da.nbytes() : 0), free_threads())};
  // At most 64 blocks of rows, so that their partial rows stay a small part of the traffic.
  constexpr int64_t kStrip = 8192;
  const int64_t block_rows = std::max<int64_t>(8, ceil_div(call.rows, 64)), blocks = ceil_div(call.rows, block_rows);
  const int64_t strips = ceil_div(call.cols, kStrip);
  const std::unique_ptr<double[]> partials(new double[blocks * call.cols]);
  share(blocks * strips, block_rows * std::min(call.cols, kStrip), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task / strips, left = task % strips * kStrip, right = std::min(call.cols, left + kStrip);
      double* sums = partials.get() + block * call.cols;
      std::fill(sums + left, sums + right, 0.0);
      cpu::kernels().pointwise_bwd_columns(args, block * block_rows, std::min(call.rows, (block + 1) * block_rows), left,
                                           right, sums);
    }
  });
  sum_rows(1, blocks, call.cols, 1.0, [&](int64_t) { return RowsToSum{partials.get(), at::kDouble, db}; });
}

// ---- Reductions ------------------------------------------------------------------------------------------------------------

namespace {

// inner is 1: rows, of which long ones are cut into blocks.
void reduce_rows(const cpu::Reduction& args, int64_t outer, double divisor, Tensor& out) {
  constexpr int64_t kBatch = 256, kBlock = 32768;
  const int64_t blocks = ceil_div(args.reduced, kBlock);
  if (blocks == 1) {
    share(outer, args.reduced, [&](int64_t begin, int64_t end) {
      double sums[kBatch];
      for (int64_t row = begin; row < end; row += kBatch) {
        const int64_t n = std::min(kBatch, end - row);
        cpu::kernels().reduce_rows(args, 1, args.reduced, row, row + n, sums);
        store_sums(sums, n, divisor, out, row);
      }
    });
    return;
  }
  const std::unique_ptr<double[]> partials(new double[outer * blocks]);
  share(outer * blocks, kBlock, [&](int64_t begin, int64_t end) {
    cpu::kernels().reduce_rows(args, blocks, kBlock, begin, end, partials.get() + begin);
  });
  for (int64_t row = 0; row < outer; ++row) {
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += partials[row * blocks + block];
    store_sums(&sum, 1, divisor, out, row);
  }
}

// inner is more than 1: tiles of columns, and blocks of the reduced index where the tiles are too few to share out.
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
  sum_rows(outer, blocks, args.inner, divisor, [&](int64_t o) {
    return RowsToSum{partials.get() + o * blocks * args.inner, at::kDouble, out, o * args.inner};
  });
}

}  // namespace

void reduce_cpu(const ReduceCall& call, Tensor& out) {
  const cpu::Reduction args{call.map, static_cast<const char*>(call.in), cpu_dtype(call.in_type), call.reduced, call.inner,
                            call.outer_stride, call.reduced_stride, call.inner_stride,
                            call.in_type == at::kDouble || out.scalar_type() == at::kDouble};
  count(Counter::kCpuForward);
  (call.inner == 1 ? reduce_rows : reduce_columns)(args, call.outer, call.divisor, out);
}

// ---- Softmax ---------------------------------------------------------------------------------------------------------------

namespace {

// The leading dimensions, merged where their strides allow it.
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
  if (call.mask.defined()) {
    const bool keep = call.mask.scalar_type() == at::kBool;
    args.mask_rows = row_strides(call.mask);
    args.mask_stride = call.mask.stride(-1);
    args.mask_kind = keep ? cpu::MaskKind::kKeep : cpu::MaskKind::kAdd;
    if (!keep) args.mask_type = cpu_dtype(call.mask.scalar_type());
  }
  count(Counter::kCpuForward);
  prefer_huge_pages(y);
  share(rows, cols, [&](int64_t begin, int64_t end) { cpu::kernels().softmax(args, begin, end); });
}

void softmax_bwd_cpu(const Tensor& grad, const Tensor& y, double scale, bool leaves_out, Tensor& dx) {
  const Tensor dy = (grad.scalar_type() == at::kDouble) == (y.scalar_type() == at::kDouble) ? grad : grad.to(y.scalar_type());
  const int64_t cols = y.size(-1), rows = y.numel() / cols;
  const cpu::SoftmaxBackward args{bytes(dy), bytes(y), static_cast<char*>(dx.data_ptr()), cols, scale,
                                  cpu_dtype(dy.scalar_type()), cpu_dtype(y.scalar_type()),
                                  past_caches(dy.nbytes() + y.nbytes() + dx.nbytes(), free_threads()), leaves_out};
  count(Counter::kCpuBackward);
  prefer_huge_pages(dx);
  share(rows, cols, [&](int64_t begin, int64_t end) { cpu::kernels().softmax_bwd(args, begin, end); });
}

}  // namespace kf
