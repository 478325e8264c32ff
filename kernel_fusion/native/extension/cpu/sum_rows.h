// Sums over partial rows, which the blocks of a backward pass or of a reduction leave behind.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "cpu/cpu_dtype.h"
#include "cpu/kernels.h"
#include "cpu/tasks.h"

namespace kf {

inline void store_sums(const double* sums, int64_t n, double divisor, at::Tensor& out, int64_t first) {
  auto* p = static_cast<char*>(out.data_ptr()) + first * static_cast<int64_t>(out.element_size());
  cpu::kernels().store_sums(sums, n, divisor, cpu_dtype(out.scalar_type()), p);
}

// out[first + i] = (sum over r of rows[r * cols + i]) / divisor, in double.
template <class A> void sum_rows(const A* rows, int64_t count, int64_t cols, double divisor, at::Tensor& out, int64_t first) {
  constexpr int64_t kLeast = 64, kElements = 4096;  // of a tile: so few columns that there are tiles for many threads
  const int64_t tile = std::clamp(kElements / count / kLeast * kLeast, kLeast, cpu::kMaxColumns);
  constexpr auto kType = std::is_same_v<A, double> ? cpu::Dtype::kDouble : cpu::Dtype::kFloat;
  share((cols + tile - 1) / tile, tile * count, [&](int64_t begin, int64_t end) {
    for (int64_t start = begin * tile; start < std::min(cols, end * tile); start += tile) {
      const int64_t width = std::min(tile, cols - start);
      double sums[cpu::kMaxColumns];
      cpu::kernels().add_rows(kType, rows + start, count, cols, width, sums);
      store_sums(sums, width, divisor, out, first + start);
    }
  });
}

}  // namespace kf
