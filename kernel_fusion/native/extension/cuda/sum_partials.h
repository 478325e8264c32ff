// Column sums in two steps: the blocks of a kernel write partial rows, and a kernel of its own adds them in a fixed order.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda/launcher.h"

namespace kf {

// `count` partial rows of two sums over `cols` columns, in the accumulator type of `like`, each row 32 columns aligned.
struct PartialRows {
  int64_t count, cols, pitch;
  at::Tensor tensor;  // [2][count][pitch]

  PartialRows(const at::Tensor& like, int64_t count, int64_t cols);
  char* data(int which) const {
    return static_cast<char*>(tensor.data_ptr()) + which * count * pitch * static_cast<int64_t>(tensor.element_size());
  }
};

// Adds the partial rows into each sum that is not null, both at once.
void sum_partials(const PartialRows& partials, at::Tensor* first, at::Tensor* second, driver::Stream stream);

}  // namespace kf
