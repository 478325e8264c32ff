// The CPU kernels as operators call them, compiled once per instruction set. A null pointer stands for what is absent or
// not wanted; `streams` sends results past the caches.
#pragma once

#include <cstdint>

#include "stage_options.h"
#include "shared/row_norm_args.h"

namespace kf {

// A row's offset in elements, as in kernels/rows.cuh.
inline int64_t row_offset(const RowLayout& l, int64_t row) {
  if (row < l.inner) return row * l.stride[2];  // spares contiguous tensors the divisions
  const int64_t outer = row / l.inner;
  return outer / l.middle * l.stride[0] + outer % l.middle * l.stride[1] + row % l.inner * l.stride[2];
}

}  // namespace kf

namespace kf::cpu {

// ---- Row norms -------------------------------------------------------------------------------------------------------------

// Rows of one type without stages have kernels of their own, which take bf16, and all that is per column, in the order
// of `Interleaved` (cpu/simd.h). Other rows are `staged`.

// A contiguous weight or bias, and what to do with it.
struct Parameter {
  const void* data;
  double offset;
  Dtype type;
  bool interleaved;

  bool as_is(Dtype acc) const { return type == acc && offset == 0 && !interleaved; }
};

// The columns taken at a time: their data stay in the L1 cache.
inline constexpr int64_t kStretch = 2048;
inline int64_t stretches_of(int64_t cols) { return (cols + kStretch - 1) / kStretch; }

// Whether threads may share a row's columns, and how many such rows forward takes together.
inline bool are_long(int64_t cols) { return cols >= 8 * kStretch; }
inline constexpr int64_t kLongRowsTogether = 8;

// With at most this many short rows the kernel itself prepares weight and bias.
inline constexpr int64_t kShortRowsUnprepared = 4;

// Weight and bias may be as given: the kernel then prepares them by stretches, or reads them as they are.
struct Forward {
  const void* x;
  Parameter weight, bias;
  void* y;
  void* mean;
  void* rstd;
  int64_t cols;
  RowLayout x_rows;
  double eps;
  bool rms;
  Dtype x_type, y_type;
  bool streams;
  int64_t groups = 1;  // row r has weight and bias from r % groups * cols on; with stages only
};

// With totals, this many rows of dweight and dbias are added in the accumulator type, their sums in double. A multiple
// of the rows taken together.
inline constexpr int64_t kRowsSummed = 32;

struct Backward {
  const void* dy;
  const void* x;
  const void* mean;
  const void* rstd;
  const void* weight;
  void* dx;
  void* dweight;  // accumulator type, one row per block
  void* dbias;
  int64_t cols;
  const void* dh;  // of x's type, added to dx
  RowLayout x_rows, dy_rows, dh_rows;
  bool rms;
  Dtype x_type, dy_type;
  bool streams;
  bool is_far;               // rows come from memory, or nearly fill a cache
  double* totals = nullptr;  // the column sums in double; null: none
  int64_t groups = 1;        // as in `Forward`; a block is of samples
  bool restores = true;      // dweight and dbias of bare bf16 rows leave `Interleaved`'s order
  void* dgate = nullptr;     // staged kernels alone
};

// With at most this many rows, threads share the columns. `parameter` is the weight as given; dweight and dbias are results.
inline constexpr int64_t kFewRows = 64;
struct BackwardByColumns : Backward {
  int64_t rows;
  Parameter parameter;
  Dtype dweight_type, dbias_type;
};

// Backward sums by strips of columns and blocks of rows, so a row's dx depends on no other row. A strip is a stretch,
// or half of one where shared rows are too short to give 16 threads work.
inline int64_t strip_width(int64_t cols) { return are_long(cols) && cols < 16 * kStretch ? kStretch / 2 : kStretch; }
inline int64_t strips_of(int64_t cols) { return (cols + strip_width(cols) - 1) / strip_width(cols); }

// A stage's tensor of the input's shape.
struct StageRow {
  const void* data;
  RowLayout rows;
  Dtype type;
};

// The stages around the norm, as in extension/row_norm.h. Codes are positions in KF_ACTIVATIONS.
struct Stages : StageOptions, StageRows<StageRow> {
  uint64_t seed;
  Dtype normalized, argument;  // what norm(h) and the activation's argument are rounded to

  bool rounds() const { return normalized == Dtype::kHalf || normalized == Dtype::kBFloat16; }
};

// residual is null, or h has its dtype and is contiguous.
struct ForwardStages : Stages {
  const void* residual;
  void* h;
  RowLayout residual_rows;
  Dtype residual_type;
  Parameter residual_gate{};  // in its own type, or prepared
};

// With a residual, x of `Backward` is h, whose type dh and dresidual have.
struct BackwardStages : Stages {
  bool has_residual;
  const void* x;     // if a pre-activation or residual gate needs it
  const void* bias;  // prepared
  void* dresidual;   // or of a stage's row
  RowLayout x_rows;
  Dtype dx_type;                        // x's too
  const void* residual_gate = nullptr;  // prepared
};

// A row's own, all of x's type.
struct OwnParameters {
  const void *weight, *gate;                  // of row 0, as given; null: absent
  int64_t weight_pitch, gate_pitch;           // to the next row's, in bytes
  double offset;                              // of the weight
  void *dweight, *dbias, *dgate, *dresidual;  // contiguous; null: not wanted
  const void* u;                              // what the gate multiplies, if dgate is wanted
  RowLayout u_rows;
};

using PrepareParameter = void(const Parameter&, int64_t n, void* out);
// n elements of type `acc`, rounded to `type`; `interleaved` bf16 was not restored.
using RoundRow = void(Dtype acc, const void* row, int64_t n, Dtype type, void* out, bool interleaved);
// Rows [begin, end).
using RowNormForward = void(const Forward&, int64_t begin, int64_t end);
// Piece row * stretches + s of long rows is stretch s of a row. Their moments; statistics of rows, stored if wanted;
// results.
struct StretchMoments {
  double center, rest, squares;  // of x - center: mean and squared deviations; RMSNorm: of x
};
struct RowStatistics {
  double mean, rstd;  // before rounding to the accumulator type
};
using RowNormForwardMoments = void(const Forward&, int64_t begin, int64_t end, StretchMoments* moments);
using RowNormForwardStatistics = void(const Forward&, int64_t begin, int64_t end, const StretchMoments* moments,
                                      RowStatistics* statistics);
using RowNormForwardStretches = void(const Forward&, int64_t begin, int64_t end, const RowStatistics* statistics);
using RowNormBackward = void(const Backward&, int64_t begin, int64_t end);
// Strips [begin, end): each row's part of its sums, at strip * rows + row, and the strip of dweight and dbias; then dx.
struct RowSums {
  double g, gx;
};
using RowNormBackwardSums = void(const BackwardByColumns&, int64_t begin, int64_t end, RowSums* sums);
using RowNormBackwardDx = void(const BackwardByColumns&, int64_t begin, int64_t end, const RowSums* sums);
using RowNormForwardStaged = void(const Forward&, const ForwardStages&, int64_t begin, int64_t end);
using RowNormBackwardOwn = void(const Backward&, const OwnParameters&, int64_t begin, int64_t end);
using RowNormBackwardStaged = void(const Backward&, const BackwardStages&, int64_t begin, int64_t end);

// ---- Pointwise chains ------------------------------------------------------------------------------------------------------

// A chain's operands, as in pointwise.h. Offsets from `base`, the address of y or dy, are dropout's positions.
struct ChainOperands {
  const Chain& chain;
  Dtype types[5];
  const char* base;
  bool wants[2];  // backward: da, db
  bool wide;      // computed in double
  bool streams;
};

// TensorIterator's two dimensions: strides in bytes, the inner one's first.
struct Region {
  char* const* data;
  const int64_t* inner;
  const int64_t* outer;
  int64_t inner_size, outer_size;
};
using PointwiseLoop = void(const ChainOperands&, const Region&);

// Backward for a row b; dy, a and da are contiguous. Adds db of rows [begin, end) and columns [left, right) to `sums`.
struct ChainColumns {
  const Chain& chain;
  const char* dy;
  const char* a;
  const char* b;
  char* da;
  int64_t cols;
  Dtype dy_type, a_type, b_type;
  bool wide;
  bool streams;
};
using PointwiseColumns = void(const ChainColumns&, int64_t begin, int64_t end, int64_t left, int64_t right, double* sums);

// Strides in elements.
struct Reduction {
  Map map;
  const char* in;
  Dtype type;
  int64_t reduced, inner;
  int64_t outer_stride, reduced_stride, inner_stride;
  bool wide;  // computed in double
};

// `inner` is 1: sums[i] is that of block begin + i.
using ReduceRows = void(const Reduction&, int64_t blocks, int64_t block, int64_t begin, int64_t end, double* sums);
// sums[i - left] is over reduced indices [begin, end) at outer index `outer` and inner indices [left, right), at most
// kMaxColumns.
using ReduceColumns = void(const Reduction&, int64_t outer, int64_t begin, int64_t end, int64_t left, int64_t right,
                           double* sums);
inline constexpr int64_t kMaxColumns = 512;
// sums[i] = the sum of rows[r * pitch + i] over `count` rows of floats or doubles, for n (at most kMaxColumns) columns.
using AddRows = void(Dtype type, const void* rows, int64_t count, int64_t pitch, int64_t n, double* sums);
// out[i] = sums[i] / divisor, rounded to the compute type, then to `type`.
using StoreSums = void(const double* sums, int64_t n, double divisor, Dtype type, void* out);

// ---- Softmax ---------------------------------------------------------------------------------------------------------------

struct Softmax {
  const char* x;
  const char* mask;
  char* y;  // contiguous
  RowLayout x_rows, mask_rows;
  int64_t cols, mask_stride;  // 0: a mask's column for all
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
  bool streams;
  bool leaves_out;  // dx is 0 where y is
};

using SoftmaxForwardRows = void(const Softmax&, int64_t begin, int64_t end);
using SoftmaxBackwardRows = void(const SoftmaxBackward&, int64_t begin, int64_t end);

// ---- Rotary embedding ------------------------------------------------------------------------------------------------------

// Strides of heads in elements; columns lie side by side.
struct HeadStrides {
  int64_t example, token, head;
  int64_t offset(int64_t of_example, int64_t of_token) const { return of_example * example + of_token * token; }
};

// Query or key.
struct RotaryHeads {
  const char* x;   // backward without a norm: null
  const char* dy;  // forward: null
  char* result;    // y or dx
  HeadStrides x_rows, dy_rows, result_rows;
  int64_t count;       // of heads; 0: there is none
  const void* weight;  // in the accumulator type, with the offset
  bool rounds_product, rounds_rotation;
};

struct Rotary {
  RotaryHeads of[2];
  const char *cos, *sin;     // contiguous rows of `half` elements
  int64_t table_example;     // stride of examples; 0: shared
  const int64_t* positions;  // contiguous; null: token numbers
  int64_t position_example;
  int64_t tokens, cols, half;
  double eps;
  bool has_norm, interleaved, rounds_normalized;
  Dtype type, table_type;
};

// Tokens [begin, end) of all examples. Backward adds both dweights to rows of `cols` doubles.
using RotaryForward = void(const Rotary&, int64_t begin, int64_t end);
using RotaryBackward = void(const Rotary&, int64_t begin, int64_t end, double* const (&dweights)[2]);

// ---- Quantisation ----------------------------------------------------------------------------------------------------------

struct Quantization {
  Dtype type;  // of the argument
  CodeType code;
  int64_t rows, cols, block;  // columns that share a scale; 0: all
  const float* given;         // null: each row or block has its own
  uint8_t* values;            // contiguous
  float* scales;              // block b of a row: at b * rows + row
};
// Rows [begin, end); v begins at row `first`.
using QuantizeRows = void(const Quantization&, const void* v, const RowLayout& layout, int64_t begin, int64_t end,
                          int64_t first);

// ---- One instruction set ---------------------------------------------------------------------------------------------------

// clang-format off
#define KF_CPU_KERNELS(X) \
  X(PrepareParameter, prepare) X(RowNormForward, forward) X(RowNormForwardMoments, forward_moments) \
  X(RowNormForwardStatistics, forward_statistics) X(RowNormForwardStretches, forward_stretches) \
  X(RowNormForwardStaged, forward_staged) X(PointwiseLoop, pointwise) X(PointwiseLoop, pointwise_bwd) \
  X(PointwiseColumns, pointwise_bwd_columns) X(ReduceRows, reduce_rows) X(ReduceColumns, reduce_columns) X(AddRows, add_rows) \
  X(StoreSums, store_sums) X(SoftmaxForwardRows, softmax) X(SoftmaxBackwardRows, softmax_bwd) X(RotaryForward, rotary) \
  X(RotaryBackward, rotary_bwd) X(QuantizeRows, quantize_rows)

// The gradients of row norms take a third of a build, so a library of their own may have them, for the first backward.
#define KF_CPU_GRADIENT_KERNELS(X) \
  X(RoundRow, round_row) X(RowNormBackward, backward) X(RowNormBackwardSums, backward_sums) X(RowNormBackwardDx, backward_dx) \
  X(RowNormBackwardOwn, backward_own) X(RowNormBackwardStaged, backward_staged)
// clang-format on

#define KF_POINTER(type, name) type* name;
struct Kernels {
  KF_CPU_KERNELS(KF_POINTER)
};
struct GradientKernels {
  KF_CPU_GRADIENT_KERNELS(KF_POINTER)
};
#undef KF_POINTER

#define KF_KERNEL(type, name) type name;
#define KF_ENTRY(type, name) name,

// Those for this machine's instruction set, within ATEN_CPU_CAPABILITY.
const Kernels& kernels();

// The first call may wait for Python, which opens that library, so no thread may wait for the caller. Raises if there is none.
const GradientKernels& gradient_kernels();

}  // namespace kf::cpu
