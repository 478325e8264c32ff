// The interface between the CPU operators and the kernels, which are compiled once per instruction set.
#pragma once

#include <cstdint>

#include "shared/row_norm_args.h"

namespace kf {

// Offset of a row in elements; the host twin of kernels/rows.cuh.
inline int64_t row_offset(const RowLayout& l, int64_t row) {
  const int64_t outer = row / l.inner;
  return outer / l.middle * l.stride[0] + outer % l.middle * l.stride[1] + row % l.inner * l.stride[2];
}

}  // namespace kf

namespace kf::cpu {

enum class Dtype : int { kHalf, kBFloat16, kFloat, kDouble };

// weight and bias arrive in the accumulator type, the offset already added; null where absent.
struct Forward {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  void* mean;  // null: not wanted
  void* rstd;  // null: not wanted
  int64_t cols;
  RowLayout x_rows;
  double eps;
  bool rms;
  Dtype x_type, y_type;
};

struct Backward {
  const void* dy;
  const void* x;
  const void* mean;
  const void* rstd;
  const void* weight;
  void* dx;       // null: not wanted
  void* dweight;  // accumulator type, one row of the block's own, added to; null: not wanted
  void* dbias;
  int64_t cols;
  RowLayout x_rows, dy_rows;
  bool rms;
  Dtype x_type, dy_type;
};

// Rows [begin, end).
struct Kernels {
  void (*forward)(const Forward&, int64_t begin, int64_t end);
  void (*backward)(const Backward&, int64_t begin, int64_t end);
};

// The kernels for this machine's instruction set, limited by ATEN_CPU_CAPABILITY.
const Kernels& kernels();

}  // namespace kf::cpu
