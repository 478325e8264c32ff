// The interface between the CPU operators and the kernels, which are compiled once per instruction set.
#pragma once

#include <cstdint>

#include "stage_options.h"
#include "shared/row_norm_args.h"

namespace kf {

// Offset of a row in elements, as in kernels/rows.cuh.
inline int64_t row_offset(const RowLayout& l, int64_t row) {
  if (row < l.inner) return row * l.stride[2];  // no division for contiguous tensors
  const int64_t outer = row / l.inner;
  return outer / l.middle * l.stride[0] + outer % l.middle * l.stride[1] + row % l.inner * l.stride[2];
}

}  // namespace kf

namespace kf::cpu {

// ---- Row norms -------------------------------------------------------------------------------------------------------------

// Rows of one type without stages have kernels of their own. These take bf16 in the order of `Interleaved` (cpu/interleaved.h),
// and everything per column has that order too. Rows with stages, or of two types, are `staged`.

// A contiguous weight or bias as given, with the offset to add, and whether to interleave it.
struct Parameter {
  const void* data;  // null: absent
  double offset;
  Dtype type;
  bool interleaved;

  // Whether rows of the accumulator type `acc` can use it unchanged.
  bool as_is(Dtype acc) const { return type == acc && offset == 0 && !interleaved; }
};

// Columns taken at a time: their data stay in the L1 cache.
inline constexpr int64_t kStretch = 2048;
inline int64_t stretches_of(int64_t cols) { return (cols + kStretch - 1) / kStretch; }

// Whether rows are so long that threads may share their columns, and how many of them forward takes together by stretches.
inline bool are_long(int64_t cols) { return cols >= 8 * kStretch; }
inline constexpr int64_t kLongRowsTogether = 8;

// With this few short rows, a thread leaves weight and bias to the kernel.
inline constexpr int64_t kShortRowsUnprepared = 4;

// weight and bias are prepared, or the kernel prepares them by stretches or reads them as they are; with stages they are
// prepared.
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

// With room for totals, this many rows of dweight and dbias are added in the accumulator type, and these sums in double. A
// multiple of the rows taken together.
inline constexpr int64_t kRowsSummed = 32;

struct Backward {
  const void* dy;
  const void* x;
  const void* mean;
  const void* rstd;
  const void* weight;
  void* dx;       // null: not wanted
  void* dweight;  // accumulator type, one row per block, filled by the kernel; null: not wanted
  void* dbias;
  int64_t cols;
  const void* dh;  // of x's type, added to dx; null: none
  RowLayout x_rows, dy_rows, dh_rows;
  bool rms;
  Dtype x_type, dy_type;
  bool streams;              // dx and dresidual go past the caches
  bool is_far;               // rows come from memory, or nearly fill a cache
  double* totals = nullptr;  // room for sums of dweight and dbias in double; null: all in the accumulator type
  int64_t groups = 1;        // as in `Forward`; a block is one of samples, each of so many rows
};

// At most kFewRows rows whose columns threads share. `parameter` has the weight as given; dweight and dbias are the results.
inline constexpr int64_t kFewRows = 64;
struct BackwardByColumns : Backward {
  int64_t rows;
  Parameter parameter;
  Dtype dweight_type, dbias_type;
};

// Backward sums up one strip of columns at a time, both by columns and by blocks of rows, so that a row's dx does not depend on
// other rows. A strip is a stretch, or half of one for shared rows of fewer than 16 stretches, to give work to 16 threads.
inline int64_t strip_width(int64_t cols) { return are_long(cols) && cols < 16 * kStretch ? kStretch / 2 : kStretch; }
inline int64_t strips_of(int64_t cols) { return (cols + strip_width(cols) - 1) / strip_width(cols); }

// A tensor of the input's shape that a stage reads.
struct StageRow {
  const void* data;  // null: absent
  RowLayout rows;
  Dtype type;
};

// The stages around the norm; see `Norm` in extension/row_norm.h. Codes are positions in KF_ACTIVATIONS.
struct Stages : StageOptions, StageRows<StageRow> {
  uint64_t seed;
  Dtype normalized, argument;  // what norm(h) and the activation's argument are rounded to; the accumulator type: not at all

  bool rounds() const { return normalized == Dtype::kHalf || normalized == Dtype::kBFloat16; }
};

// Goes with `Forward`. residual is null, or h has its dtype and is contiguous.
struct ForwardStages : Stages {
  const void* residual;
  void* h;
  RowLayout residual_rows;
  Dtype residual_type;
};

// Goes with `Backward`, whose x is h if there is a residual; dh and dresidual then have x_type too.
struct BackwardStages : Stages {
  bool has_residual;
  const void* x;     // the argument of the pre-activation; null: none
  const void* bias;  // prepared; null: absent
  void* dresidual;   // or the gradient of a stage's row; null: not wanted
  RowLayout x_rows;
  Dtype dx_type;  // x's too
};

// Prepares n elements of a parameter.
using PrepareParameter = void(const Parameter&, int64_t n, void* out);
// n elements of the accumulator type `acc`, rounded to `type`.
using RoundRow = void(Dtype acc, const void* row, int64_t n, Dtype type, void* out);
// Rows [begin, end).
using RowNormForward = void(const Forward&, int64_t begin, int64_t end);
// Long rows by pieces [begin, end), where piece row * stretches + s is stretch s of a row: the moments of each piece; the
// statistics of rows [begin, end), stored if wanted; the results.
struct StretchMoments {
  double center, rest, squares;  // of x - center: the mean, and the sum of squared deviations from it; RMSNorm: of x
};
struct RowStatistics {
  double mean, rstd;  // before rounding to the accumulator type
};
using RowNormForwardMoments = void(const Forward&, int64_t begin, int64_t end, StretchMoments* moments);
using RowNormForwardStatistics = void(const Forward&, int64_t begin, int64_t end, const StretchMoments* moments,
                                      RowStatistics* statistics);
using RowNormForwardStretches = void(const Forward&, int64_t begin, int64_t end, const RowStatistics* statistics);
using RowNormBackward = void(const Backward&, int64_t begin, int64_t end);
// Strips [begin, end): what each row adds to its sums, at strip * rows + row, with the strip of dweight and dbias; and dx from
// the sums of whole rows.
struct RowSums {
  double g, gx;
};
using RowNormBackwardSums = void(const BackwardByColumns&, int64_t begin, int64_t end, RowSums* sums);
using RowNormBackwardDx = void(const BackwardByColumns&, int64_t begin, int64_t end, const RowSums* sums);
using RowNormForwardStaged = void(const Forward&, const ForwardStages&, int64_t begin, int64_t end);
using RowNormBackwardStaged = void(const Backward&, const BackwardStages&, int64_t begin, int64_t end);

// ---- Pointwise chains ------------------------------------------------------------------------------------------------------

// The operands of a chain in either direction, ordered as in pointwise.h. `base` is the address of y or dy, whose offsets are
// dropout's positions.
struct ChainOperands {
  const Chain& chain;
  Dtype types[5];
  const char* base;
  bool wants[2];  // backward: da, db
  bool wide;      // computed in double
  bool streams;   // results go past the caches
};

// A two-dimensional part of the iteration, as from TensorIterator: strides in bytes, the inner dimension's first.
struct Region {
  char* const* data;
  const int64_t* inner;
  const int64_t* outer;
  int64_t inner_size, outer_size;
};
using PointwiseLoop = void(const ChainOperands&, const Region&);

// Backward for a row b under all rows of a: dy, a and da are contiguous matrices. Adds db of rows [begin, end) and columns
// [left, right) to `sums`.
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

// `inner` is 1: sums[i] = the sum of block begin + i, where each row has `blocks` blocks of `block` elements.
using ReduceRows = void(const Reduction&, int64_t blocks, int64_t block, int64_t begin, int64_t end, double* sums);
// sums[i - left] = the sum over reduced indices [begin, end) of outer index `outer`, for inner indices [left, right), at most
// kMaxColumns.
using ReduceColumns = void(const Reduction&, int64_t outer, int64_t begin, int64_t end, int64_t left, int64_t right,
                           double* sums);
inline constexpr int64_t kMaxColumns = 512;
// sums[i] = the sum of rows[r * pitch + i] over `count` rows of floats or doubles, for n columns, at most kMaxColumns.
using AddRows = void(Dtype type, const void* rows, int64_t count, int64_t pitch, int64_t n, double* sums);
// out[i] = sums[i] / divisor, rounded to the compute type and then to `type`.
using StoreSums = void(const double* sums, int64_t n, double divisor, Dtype type, void* out);

// ---- Softmax ---------------------------------------------------------------------------------------------------------------

// A row's offset in elements, for leading dimensions of any strides, innermost first.
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
  int64_t cols, mask_stride;  // x's columns are contiguous
  int64_t causal_rows;        // rows per matrix; row i keeps columns 0 ... i; 0: not causal
  double scale;
  Dtype type, mask_type = Dtype::kAbsent;  // kBool: what to keep, else added
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

// ---- Rotary embedding ------------------------------------------------------------------------------------------------------

// Where heads lie: strides in elements. Columns lie side by side.
struct HeadStrides {
  int64_t example, token, head;
  int64_t offset(int64_t of_example, int64_t of_token) const { return of_example * example + of_token * token; }
};

// Query or key.
struct RotaryHeads {
  const char* x;   // backward without a norm: null
  const char* dy;  // forward: null
  char* result;    // y or dx; null: not wanted
  HeadStrides x_rows, dy_rows, result_rows;
  int64_t count;       // of heads; 0: there is none
  const void* weight;  // of the accumulator type, with the offset; null: absent
  bool rounds_product, rounds_rotation;
};

struct Rotary {
  RotaryHeads of[2];
  const char *cos, *sin;     // contiguous rows of `half` elements
  int64_t table_example;     // the stride of examples, 0 where they share a table
  const int64_t* positions;  // contiguous; null: the number of the token
  int64_t position_example;
  int64_t tokens, cols, half;
  double eps;
  bool has_norm, interleaved, rounds_normalized;
  Dtype type, table_type;
};

// Tokens [begin, end) of all examples. Backward adds dweight of query and key to rows of `cols` doubles; null: not wanted.
using RotaryForward = void(const Rotary&, int64_t begin, int64_t end);
using RotaryBackward = void(const Rotary&, int64_t begin, int64_t end, double* const (&dweights)[2]);

// ---- Quantisation ----------------------------------------------------------------------------------------------------------

enum class Codes : int { kInt8, kE4m3, kE5m2 };

// Of `rows` rows of `cols` columns.
struct Quantization {
  Dtype type;  // of what is quantised
  Codes codes;
  int64_t rows, cols, block;  // columns that share a scale; 0: all
  const float* given;         // the scale; null: each row, or block of it, has its own
  uint8_t* values;            // contiguous
  float* scales;              // of block b of a row at b * rows + row
};
// Rows [begin, end), which lie in v from row `first` on.
using QuantizeRows = void(const Quantization&, const void* v, const RowLayout& layout, int64_t begin, int64_t end,
                          int64_t first);

// ---- One instruction set ---------------------------------------------------------------------------------------------------

struct Kernels {
  PrepareParameter* prepare;
  RoundRow* round_row;
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
  RotaryForward* rotary;
  RotaryBackward* rotary_bwd;
  QuantizeRows* quantize_rows;
};

// The kernels for this machine's instruction set, within ATEN_CPU_CAPABILITY.
const Kernels& kernels();

}  // namespace kf::cpu
