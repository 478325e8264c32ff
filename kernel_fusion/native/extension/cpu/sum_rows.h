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

// What is to be added up, rows of `type`, float or double, and where the sums belong: in `out` from element `first` on.
struct RowSum {
  const void* rows;
  cpu::Dtype type;
  at::Tensor& out;
  int64_t first = 0;
};

// Of each of several: out[first + i] = (sum over r of rows[r * cols + i]) / divisor, over `count` rows, in double. Which they are says
// sum_of(0), sum_of(1), ...: one region of threads adds them all up.
template <class F> void sum_rows(int64_t sums, int64_t count, int64_t cols, double divisor, F&& sum_of) {
  constexpr int64_t kLeast = 64, kElements = 4096;  // of a tile: so few columns that there are tiles for many threads
  const int64_t width = std::clamp(kElements / count / kLeast * kLeast, kLeast, cpu::kMaxColumns), tiles = (cols + width - 1) / width;
  share(sums * tiles, width * count, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t start = tile % tiles * width, n = std::min(width, cols - start);
      const RowSum sum = sum_of(tile / tiles);
      const int64_t size = sum.type == cpu::Dtype::kDouble ? sizeof(double) : sizeof(float);
      double columns[cpu::kMaxColumns];
      cpu::kernels().add_rows(sum.type, static_cast<const char*>(sum.rows) + start * size, count, cols, n, columns);
      store_sums(columns, n, divisor, sum.out, sum.first + start);
    }
  });
}

}  // namespace kf
