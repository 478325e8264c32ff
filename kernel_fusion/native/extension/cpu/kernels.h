// The interface between the CPU operators and the kernels, which are compiled once per instruction set.
#pragma once

#include <cstdint>

#include "stage_options.h"
#include "shared/row_norm_args.h"

namespace kf {

// Offset of a row in elements; the host twin of kernels/rows.cuh.
inline int64_t row_offset(const RowLayout& l, int64_t row) {
  if (row < l.inner) return row * l.stride[2];  // as of every contiguous tensor, and without a division
  const int64_t outer = row / l.inner;
  return outer / l.middle * l.stride[0] + outer % l.middle * l.stride[1] + row % l.inner * l.stride[2];
}

}  // namespace kf

namespace kf::cpu {

// ---- Row norms -------------------------------------------------------------------------------------------------------------

// Rows of one type with nothing around the norm have kernels of their own. These take bf16 in the order of `Interleaved`
// (cpu/interleaved.h), in which all that belongs to the columns then lies. Rows with stages, or of two types, are `staged`.

// weight or bias, side by side, to which the offset is to be added, and which are to be `interleaved`.
struct Parameter {
  const void* data;  // null: absent
  double offset;
  Dtype type;
  bool interleaved;

  // Whether it is as rows of the accumulator type `acc` take it.
  bool as_is(Dtype acc) const { return type == acc && offset == 0 && !interleaved; }
};

// Columns that are taken at a time: what belongs to them stays in the L1 cache.
inline constexpr int64_t kStretch = 2048;
inline int64_t stretches_of(int64_t cols) { return (cols + kStretch - 1) / kStretch; }

// Whether rows are so long that threads may share their columns; and how many such rows forward takes together, stretch by
// stretch.
inline bool are_long(int64_t cols) { return cols >= 8 * kStretch; }
inline constexpr int64_t kLongRowsTogether = 8;

// A thread that has so few shorter rows leaves weight and bias to the kernel too.
inline constexpr int64_t kShortRowsUnprepared = 4;

// weight and bias are prepared, or left to the kernel, which prepares them stretch by stretch or reads them as they are; with
// stages they are prepared.
struct Forward {
  const void* x;
  Parameter weight, bias;
  void* y;
  void* mean;  // null: not wanted
  void* rstd;  // null: not wanted
  int64_t cols;
  RowLayout x_rows;
  double eps;
  bool rms;
  Dtype x_type, y_type;
  bool streams;        // y goes past the caches
  int64_t groups = 1;  // row r has columns [r % groups * cols, ... + cols) of weight and bias; the kernels with stages alone
};

// Where there is room for totals, so many rows of dweight and dbias are added up in the accumulator type, and these sums in
// double. A multiple of the rows that are taken together.
inline constexpr int64_t kRowsSummed = 32;

struct Backward {
  const void* dy;
  const void* x;
  const void* mean;
  const void* rstd;
  const void* weight;
  void* dx;       // null: not wanted
  void* dweight;  // accumulator type, one row of the block's own, made by the kernel; null: not wanted
  void* dbias;
  int64_t cols;
  const void* dh;  // of x's type, added to dx; null: none
  RowLayout x_rows, dy_rows, dh_rows;
  bool rms;
  Dtype x_type, dy_type;
  bool streams;              // dx and dresidual go past the caches
  bool is_far;               // rows come from memory, or from a cache that they nearly fill
  double* totals = nullptr;  // room for sums of dweight and dbias; null: all rows are added up in the accumulator type
  int64_t groups = 1;        // as in `Forward`; a block is one of samples, each of so many rows
};

// Few rows, at most kFewRows, of which threads share the columns. The weight stands in `parameter`, as it is given; dweight and
// dbias are the results themselves.
inline constexpr int64_t kFewRows = 64;
struct BackwardByColumns : Backward {
  int64_t rows;
  Parameter parameter;
  Dtype dweight_type, dbias_type;
};

// Backward sums up a strip of columns at a time, the same by columns and by blocks of rows, lest dx of a row depend on the
// others: a stretch, or in rows of fewer than 16 stretches that threads may share half of one, so that there is something for
// 16 threads. They take 0.12 ms for 64 x 16384 fp16 instead of 0.16, and two threads as long as before (Xeon).
inline int64_t strip_width(int64_t cols) { return are_long(cols) && cols < 16 * kStretch ? kStretch / 2 : kStretch; }
inline int64_t strips_of(int64_t cols) { return (cols + strip_width(cols) - 1) / strip_width(cols); }

// A tensor of the input's shape that a stage reads.
struct StageRow {
  const void* data;  // null: there is none
  RowLayout rows;
  Dtype type;
};

// What stands around the norm; see the `Norm` of extension/row_norm.h. Codes are positions in KF_ACTIVATIONS.
struct Stages : StageOptions, StageRows<StageRow> {
  uint64_t seed;
  Dtype normalized, argument;  // what norm(h) and the argument of the activation are rounded to; the accumulator type: nothing

  bool rounds() const { return normalized == Dtype::kHalf || normalized == Dtype::kBFloat16; }
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
  const void* x;     // the argument of the pre-activation; null: none
  const void* bias;  // prepared; null: absent
  void* dresidual;   // that of a stage's row where there is one; null: not wanted
  RowLayout x_rows;
  Dtype dx_type;  // that of x as well
};

// n elements as rows take them.
using PrepareParameter = void(const Parameter&, int64_t n, void* out);
// Rows [begin, end).
using RowNormForward = void(const Forward&, int64_t begin, int64_t end);
// Of long rows the pieces [begin, end), where piece row * stretches + s is stretch s of a row: what its statistics are made of,
// at moments[piece]; the statistics of the rows [begin, end), which are stored where they are wanted; and the results.
struct StretchMoments {
  double center, rest, squares;  // of x - center: the mean, and the sum of the squares of the deviations from it; RMSNorm: of x
};
struct RowStatistics {
  double mean, rstd;  // before they are rounded to the accumulator type
};
using RowNormForwardMoments = void(const Forward&, int64_t begin, int64_t end, StretchMoments* moments);
using RowNormForwardStatistics = void(const Forward&, int64_t begin, int64_t end, const StretchMoments* moments,
                                      RowStatistics* statistics);
using RowNormForwardStretches = void(const Forward&, int64_t begin, int64_t end, const RowStatistics* statistics);
using RowNormBackward = void(const Backward&, int64_t begin, int64_t end);
// The strips [begin, end): what each row adds to the sums that it needs, at strip * rows + row, with the strip of dweight and
// dbias; and dx, from the sums of the whole rows.
struct RowSums {
  double g, gx;
};
using RowNormBackwardSums = void(const BackwardByColumns&, int64_t begin, int64_t end, RowSums* sums);
using RowNormBackwardDx = void(const BackwardByColumns&, int64_t begin, int64_t end, const RowSums* sums);
using RowNormForwardStaged = void(const Forward&, const ForwardStages&, int64_t begin, int64_t end);
using RowNormBackwardStaged = void(const Backward&, const BackwardStages&, int64_t begin, int64_t end);

// ---- Pointwise chains ------------------------------------------------------------------------------------------------------

// The operands of a chain in either direction; see pointwise.h for their order. `base` is the address of the tensor whose
// offsets are the positions of dropout: y or dy.
struct ChainOperands {
  const Chain& chain;
  Dtype types[5];
  const char* base;
  bool wants[2];  // backward: da, db
  bool wide;      // computed in double
  bool streams;   // results go past the caches
};

// A two-dimensional part of the iteration, as a loop of TensorIterator gets it: strides in bytes, the inner dimension's first.
struct Region {
  char* const* data;
  const int64_t* inner;
  const int64_t* outer;
  int64_t inner_size, outer_size;
};
using PointwiseLoop = void(const ChainOperands&, const Region&);

// Backward where b is one row for all rows of a: dy, a and da are contiguous matrices, b is a row. Adds db of rows [begin, end)
// and columns [left, right) to `sums`.
struct ChainColumns {
  const Chain& chain;
  const char* dy;
  const char* a;
  const char* b;
  char* da;  // null: not wanted
  int64_t cols;
  Dtype dy_type, a_type, b_type;
  bool wide;
  bool streams;  // da goes past the caches
};
using PointwiseColumns = void(const ChainColumns&, int64_t begin, int64_t end, int64_t left, int64_t right, double* sums);

// ---- Reductions ------------------------------------------------------------------------------------------------------------

// Strides in elements.
struct Reduction {
  Map map;
  const char* in;
  Dtype type;
  int64_t reduced, inner;
  int64_t outer_stride, reduced_stride, inner_stride;
  bool wide;  // computed in double
};

// `inner` is 1: sums[i] = the sum of block begin + i, where every row is cut into `blocks` blocks of `block` elements.
using ReduceRows = void(const Reduction&, int64_t blocks, int64_t block, int64_t begin, int64_t end, double* sums);
// sums[i - left] = the sum over the reduced indices [begin, end) of outer index `outer`, for the inner indices [left, right),
// at most kMaxColumns of them.
using ReduceColumns = void(const Reduction&, int64_t outer, int64_t begin, int64_t end, int64_t left, int64_t right,
                           double* sums);
inline constexpr int64_t kMaxColumns = 512;
// sums[i] = the sum of rows[r * pitch + i] of `count` rows of floats or doubles, for n columns, at most kMaxColumns.
using AddRows = void(Dtype type, const void* rows, int64_t count, int64_t pitch, int64_t n, double* sums);
// out[i] = sums[i] / divisor, rounded to the compute type and then to `type`.
using StoreSums = void(const double* sums, int64_t n, double divisor, Dtype type, void* out);

// ---- Softmax ---------------------------------------------------------------------------------------------------------------

// The offset of a row in elements, for leading dimensions of any strides, innermost first.
struct RowStrides {
  static constexpr int kMaxDims = 64;
  int dims;
  int64_t size[kMaxDims], stride[kMaxDims];
  int64_t offset(int64_t row) const {
    int64_t result = 0;
    for (int d = 0; d + 1 < dims; ++d) {
      result += row % size[d] * stride[d];
      row /= size[d];
    }
    return dims ? result + row * stride[dims - 1] : 0;
  }
};

struct Softmax {
  const char* x;
  const char* mask;
  char* y;  // contiguous
  RowStrides x_rows, mask_rows;
  int64_t cols, mask_stride;  // x's columns lie side by side
  int64_t causal_rows;        // rows of each matrix, of which row i keeps columns 0 ... i; 0: not causal
  double scale;
  Dtype type, mask_type = Dtype::kAbsent;  // kBool: what to keep, else what is added
};

// Contiguous rows.
struct SoftmaxBackward {
  const char* dy;
  const char* y;
  char* dx;
  int64_t cols;
  double scale;
  Dtype dy_type, type;
  bool streams;     // dx goes past the caches
  bool leaves_out;  // dx is 0 where y is
};

using SoftmaxForwardRows = void(const Softmax&, int64_t begin, int64_t end);
using SoftmaxBackwardRows = void(const SoftmaxBackward&, int64_t begin, int64_t end);

// ---- One instruction set ---------------------------------------------------------------------------------------------------

struct Kernels {
  PrepareParameter* prepare;
  RowNormForward* forward;
  RowNormForwardMoments* forward_moments;
  RowNormForwardStatistics* forward_statistics;
  RowNormForwardStretches* forward_stretches;
  RowNormBackward* backward;
  RowNormBackwardSums* backward_sums;
  RowNormBackwardDx* backward_dx;
  RowNormForwardStaged* forward_staged;
  RowNormBackwardStaged* backward_staged;
  PointwiseLoop* pointwise;
  PointwiseLoop* pointwise_bwd;
  PointwiseColumns* pointwise_bwd_columns;
  ReduceRows* reduce_rows;
  ReduceColumns* reduce_columns;
  AddRows* add_rows;
  StoreSums* store_sums;
  SoftmaxForwardRows* softmax;
  SoftmaxBackwardRows* softmax_bwd;
};

// The kernels for this machine's instruction set, limited by ATEN_CPU_CAPABILITY.
const Kernels& kernels();

}  // namespace kf::cpu
