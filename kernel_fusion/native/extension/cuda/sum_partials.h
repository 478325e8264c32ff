// Column sums in two steps: the blocks of one kernel write partial rows, and another kernel adds those in a fixed order.
#pragma once

#include <ATen/core/Tensor.h>

#include <bit>

#include "cuda/launcher.h"

namespace kf {

// The number of a block's threads along the columns (kernels/sums.cuh), for rows of this many vectors: a warp, or fewer threads
// if columns are few or most of the last tile would lie outside the row. It is part of kernels' keys.
inline int32_t tile_lanes(int64_t vectors) {
  if (vectors < 32) return static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(vectors)));
  const auto covered = [&](int64_t lanes) { return ceil_div(vectors, lanes) * lanes; };
  if (covered(32) * 4 <= vectors * 5) return 32;
  return covered(16) * 4 <= vectors * 5 ? 16 : 8;
}

// Memory for `count` partial rows of two or more sums over `cols` columns, in the accumulator type of `like`. Each row is
// padded to a multiple of kPartialCols.
struct PartialRows {
  int64_t count, cols, pitch;
  at::Tensor tensor;  // of shape [sums][count][pitch]

  PartialRows(const at::Tensor& like, int64_t count, int64_t cols, int64_t sums = 2)
      : count(count), cols(cols), pitch(ceil_div(cols, kPartialCols) * kPartialCols),
        tensor(allocate({sums, count, pitch}, like.options().dtype(acc_dtype(like)))) {}
  char* data(int which) const {
    return static_cast<char*>(tensor.data_ptr()) + which * count * pitch * static_cast<int64_t>(tensor.element_size());
  }
};

// Adds the partial rows of sum `from` and the next one into `first` and `second`, as far as those are defined, in one launch.
// `any` asks for a kernel that takes any number of columns, for callers whose columns depend on the number of rows.
inline void sum_partials(const PartialRows& partials, const at::Tensor& first, const at::Tensor& second, driver::Stream stream,
                         bool any = false, int from = 0) {
  const auto type = [](const at::Tensor& t) { return t.defined() ? cpu_dtype(t.scalar_type()) : Dtype::kAbsent; };
  const SumPartialsSpec spec{any ? 0 : static_cast<int>(partials.cols), cpu_dtype(partials.tensor.scalar_type()), type(first),
                             type(second)};
  const auto& kernel = find_kernel({partials.tensor.device(), spec, Access{}}, stream);
  const SumPartialsArgs args{{partials.data(from), second.defined() ? partials.data(from + 1) : nullptr},
                             {memory_or_null(first), memory_or_null(second)},
                             partials.count,
                             partials.pitch,
                             partials.cols};
  launch(kernel, kernel.grid(partials.cols), 2, stream, &args);
}

}  // namespace kf
