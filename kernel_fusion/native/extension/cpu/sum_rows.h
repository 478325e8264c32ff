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

// Rows of `type`, float or double, whose sums belong in `out` from element `first` on.
struct RowsToSum {
  const void* rows;
  at::ScalarType type;
  at::Tensor& out;
  int64_t first = 0;
};

// out[first + i] = (sum over r of rows[r * cols + i]) / divisor, over `count` rows, in double, for each of so many outputs: those of
// rows_to_sum(0), rows_to_sum(1), ... One region of threads adds them all up: with two, backward of 1000 x 1024 fp16 took 16 threads
// 132 us instead of 118 (Xeon).
template <class F> void sum_rows(int64_t outputs, int64_t count, int64_t cols, double divisor, F&& rows_to_sum) {
  constexpr int64_t kLeast = 64, kElements = 4096;  // of a tile: so few columns that there are tiles for many threads
  const int64_t width = std::clamp(kElements / count / kLeast * kLeast, kLeast, cpu::kMaxColumns), tiles = (cols + width - 1) / width;
  share(outputs * tiles, width * count, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t start = tile % tiles * width, n = std::min(width, cols - start);
      const RowsToSum of = rows_to_sum(tile / tiles);
      const auto* rows = static_cast<const char*>(of.rows) + start * static_cast<int64_t>(c10::elementSize(of.type));
      double sums[cpu::kMaxColumns];
      cpu::kernels().add_rows(cpu_dtype(of.type), rows, count, cols, n, sums);
      store_sums(sums, n, divisor, of.out, of.first + start);
    }
  });
}

}  // namespace kf
