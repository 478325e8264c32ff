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

// What stands around the norm; see the `Stages` of extension/row_norm.h. Codes are positions in KF_ACTIVATIONS.
struct Stages {
  int pre_activation, activation;
  uint32_t threshold;  // of dropout; 0: none
  uint64_t seed;
};

// Beside `Forward`. residual is null, or h has its dtype and is contiguous.
struct ForwardStages : Stages {
  const void* residual;
  void* h;
  RowLayout residual_rows;
  Dtype residual_type;
};

// Beside `Backward`, whose x is h where there is a residual, and whose x_type is then that of dh and dresidual too.
struct BackwardStages : Stages {
  bool has_residual;
  const void* dh;    // null: none
  const void* x;     // the argument of the pre-activation; null: none
  const void* bias;  // as in `Forward`
  void* dresidual;   // null: not wanted
  RowLayout dh_rows, x_rows;
  Dtype dx_type;  // that of x as well
};

// Rows [begin, end).
struct Kernels {
  void (*forward)(const Forward&, int64_t begin, int64_t end);
  void (*backward)(const Backward&, int64_t begin, int64_t end);
  void (*forward_staged)(const Forward&, const ForwardStages&, int64_t begin, int64_t end);
  void (*backward_staged)(const Backward&, const BackwardStages&, int64_t begin, int64_t end);
};

// The kernels for this machine's instruction set, limited by ATEN_CPU_CAPABILITY.
const Kernels& kernels();

}  // namespace kf::cpu
