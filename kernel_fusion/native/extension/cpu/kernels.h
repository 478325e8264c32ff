// The CPU kernels as the operators call them: the structs of their arguments, and a table of functions that is compiled
// once per instruction set. A null pointer means that a tensor is absent or a result is not wanted. `streams` asks for
// stores that bypass the caches, for results too large to stay there.
#pragma once

#include <cstdint>

#include "cuda/specs.h"
#include "stage_options.h"
#include "shared/reduce_args.h"
#include "shared/row_norm_args.h"

namespace kf {

// The offset of a row from the first one, in elements; kernels/rows.cuh computes the same on a GPU.
inline int64_t row_offset(const RowLayout& l, int64_t row) {
  if (row < l.inner) return row * l.stride[2];  // contiguous tensors need no divisions
  const int64_t outer = row / l.inner;
  return outer / l.middle * l.stride[0] + outer % l.middle * l.stride[1] + row % l.inner * l.stride[2];
}

}  // namespace kf

namespace kf::cpu {

// ---- Rows ------------------------------------------------------------------------------------------------------------------

// Rows of `cols` columns are cut into pieces of `width`. A row keeps `room` bytes from one step to the next.
struct RowShape {
  int64_t cols, width, room = 0;
  int64_t pieces() const { return (cols + width - 1) / width; }
};

// What the executor of rows (cpu/rows.h) shall do: all of rows [begin, end); or one of three steps, if threads share the pieces
// of rows. Piece row * pieces + p is piece p of a row. Reducing a piece leaves a carry, finishing a row a total, with which its
// pieces are written. Args has the types of both, the shape() of the rows, and kWrites: whether there are results per column.
enum class RowStep { kRows, kReduce, kFinish, kWrite };
template <class Args> struct RowTask {
  RowStep step;
  int64_t begin, end;  // rows, or pieces
  typename Args::Carry* carries = nullptr;
  typename Args::Total* totals = nullptr;
  char* room = nullptr;
};
template <class Args> using RowKernel = void(const Args&, const RowTask<Args>&);

// ---- Row norms -------------------------------------------------------------------------------------------------------------

// Norms without stages, whose tensors have one type, have kernels of their own. Those kernels read bf16 rows, and every
// vector of one element per column, in the order of `Interleaved` (cpu/simd.h). The `staged` kernels compute all others.

// A contiguous weight or bias, the offset to add to it, and whether its columns must be put into `Interleaved`'s order.
struct Parameter {
  const void* data;
  double offset;
  Dtype type;
  bool interleaved;

  // Whether kernels with this accumulator type can read the vector where it lies.
  bool as_is(Dtype acc) const { return type == acc && offset == 0 && !interleaved; }
};

// A stretch: the number of columns that a kernel takes at a time, so that their data stay in the L1 cache.
inline constexpr int64_t kStretch = 2048;
inline int64_t stretches_of(int64_t cols) { return (cols + kStretch - 1) / kStretch; }

// Whether a row is long enough for several threads to share its columns, and how many such rows forward takes together.
inline bool are_long(int64_t cols) { return cols >= 8 * kStretch; }
inline constexpr int64_t kLongRowsTogether = 8;

// If a call has at most this many short rows, the kernel itself prepares weight and bias, once per row.
inline constexpr int64_t kShortRowsUnprepared = 4;

struct StretchMoments {
  double center, rest, squares;  // rest is the mean of x - center; squares are its squared deviations, for RMSNorm those of x
};
struct RowStatistics {
  double mean, rstd;  // before rounding to the accumulator type
};

// The arguments of a forward row norm. Weight and bias may be unprepared; the kernel then prepares them stretch by stretch,
// or reads them as they are.
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
  int64_t groups = 1;  // row r uses weight and bias from element r % groups * cols on; staged kernels only

  using Carry = StretchMoments;
  using Total = RowStatistics;
  static constexpr bool kWrites = true;
  RowShape shape() const { return {cols, kStretch}; }
};

// Backward adds the terms of this many rows of dweight and dbias in the accumulator type, and those sums in double, if it
// has `totals`. It is a multiple of the number of rows that kernels take together.
inline constexpr int64_t kRowsSummed = 32;

struct Backward {
  const void* dy;
  const void* x;
  const void* mean;
  const void* rstd;
  const void* weight;
  void* dx;
  void* dweight;  // in the accumulator type, one row per block of rows
  void* dbias;
  int64_t cols;
  const void* dh;  // the gradient that reaches h directly, in x's type; it is added to dx
  RowLayout x_rows, dy_rows, dh_rows;
  bool rms;
  Dtype x_type, dy_type;
  bool streams;
  bool is_far;               // the rows come from memory, or nearly fill a cache
  double* totals = nullptr;  // room for the column sums in double, or null
  int64_t groups = 1;        // as in `Forward`; a block then consists of samples, each with `groups` rows
  bool restores = true;      // undo `Interleaved`'s order in dweight and dbias of unstaged bf16 rows
  void* dgate = nullptr;     // only the staged kernels compute it
};

// If a call has at most this many rows, its threads share the columns instead of the rows. `parameter` is the weight as the
// caller gave it, and dweight and dbias are final results instead of partial sums.
inline constexpr int64_t kFewRows = 64;
struct BackwardByColumns : Backward {
  int64_t rows;
  Parameter parameter;
  Dtype dweight_type, dbias_type;
};

// Backward sums by strips of columns and blocks of rows, so that dx of a row depends on no other row. A strip is a stretch,
// or half a stretch if threads share rows that are too short to give work to 16 of them.
inline int64_t strip_width(int64_t cols) { return are_long(cols) && cols < 16 * kStretch ? kStretch / 2 : kStretch; }
inline int64_t strips_of(int64_t cols) { return (cols + strip_width(cols) - 1) / strip_width(cols); }

// A tensor of the input's shape that a stage reads, such as a gate.
struct StageRow {
  const void* data;
  RowLayout rows;
  Dtype type;
};

// The stages around the norm, as in extension/row_norm.h. Codes are positions in KF_ACTIVATIONS.
struct Stages : StageOptions, StageRows<StageRow> {
  uint64_t seed;
  Dtype normalized, argument;  // the types to which norm(h) and the activation's argument are rounded

  // Whether the normalised value is rounded before it meets the weight, as `rounding="hf"` asks.
  bool rounds() const { return normalized == Dtype::kHalf || normalized == Dtype::kBFloat16; }
};

// The further arguments of a staged forward norm. If there is a residual, h is contiguous and has the residual's dtype.
struct ForwardStages : Stages {
  const void* residual;
  void* h;
  RowLayout residual_rows;
  Dtype residual_type;
  Parameter residual_gate{};  // as the caller gave it, or prepared
};

// The further arguments of a staged backward norm. With a residual, x of `Backward` is h, and dh and dresidual have h's type.
struct BackwardStages : Stages {
  bool has_residual;
  const void* x;     // the input, if a pre-activation or the gradient of the residual's gate needs it
  const void* bias;  // prepared
  void* dresidual;   // the gradient of the residual, or of a stage's row
  RowLayout x_rows;
  Dtype dx_type;                        // the type of this x and of dx
  const void* residual_gate = nullptr;  // prepared
};

// Parameters of which every row has its own, such as a scale per token, and their gradients. All have x's type.
struct OwnParameters {
  const void *weight, *gate;                  // those of row 0, as the caller gave them, or null
  int64_t weight_pitch, gate_pitch;           // the distances to the next row's, in bytes
  double offset;                              // is added to the weight
  void *dweight, *dbias, *dgate, *dresidual;  // contiguous, or null if not wanted
  const void* u;                              // the factor of the gate in h = residual + gate * u, if dgate is wanted
  RowLayout u_rows;
};

using PrepareParameter = void(const Parameter&, int64_t n, void* out);
// Rounds n elements of type `acc` to `type`. `interleaved` says that they are still in the order of `Interleaved`.
using RoundRow = void(Dtype acc, const void* row, int64_t n, Dtype type, void* out, bool interleaved);
// The kernels take rows [begin, end).
using RowNormBackward = void(const Backward&, int64_t begin, int64_t end);
// Two kernels compute few rows by strips [begin, end). The first writes each row's part of its two sums to
// sums[strip * rows + row], and the strip's dweight and dbias; the second writes dx.
struct RowSums {
  double g, gx;
};
using RowNormBackwardSums = void(const BackwardByColumns&, int64_t begin, int64_t end, RowSums* sums);
using RowNormBackwardDx = void(const BackwardByColumns&, int64_t begin, int64_t end, const RowSums* sums);
using RowNormForwardStaged = void(const Forward&, const ForwardStages&, int64_t begin, int64_t end);
using RowNormBackwardOwn = void(const Backward&, const OwnParameters&, int64_t begin, int64_t end);
using RowNormBackwardStaged = void(const Backward&, const BackwardStages&, int64_t begin, int64_t end);

// ---- Pointwise chains ------------------------------------------------------------------------------------------------------

// The operands of a chain, as in pointwise.h. Dropout numbers an element by its offset from `base`, the address of y or dy.
struct ChainOperands {
  const Chain& chain;
  Dtype types[5];
  const char* base;
  bool wants[2];  // backward: whether da and db are wanted
  bool wide;      // compute in double
  bool streams;
};

// The two dimensions that TensorIterator gives to a loop, with strides in bytes.
struct Region {
  char* const* data;
  const int64_t* inner;
  const int64_t* outer;
  int64_t inner_size, outer_size;
};
using PointwiseLoop = void(const ChainOperands&, const Region&);

// Backward of a chain whose b is one row, such as a bias. dy, a and da are contiguous. The kernel writes da, and adds db of
// rows [begin, end) and columns [left, right) to `sums`.
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

// A reduction over the middle one of three dimensions, with strides in elements.
struct Reduction {
  Map map;
  const char* in;
  Dtype type;
  int64_t reduced, inner;
  int64_t outer_stride, reduced_stride, inner_stride;
  bool wide;  // compute in double
  double divisor;
  Dtype out_type;
  char* out;

  using Carry = double;
  struct Total {};
  static constexpr bool kWrites = false;
  RowShape shape() const { return {reduced, 32768}; }
};

// sums[i - left] is the sum over reduced indices [begin, end) at outer index `outer` and inner index i, for i in
// [left, right), which are at most kMaxColumns.
using ReduceColumns = void(const Reduction&, int64_t outer, int64_t begin, int64_t end, int64_t left, int64_t right,
                           double* sums);
inline constexpr int64_t kMaxColumns = 512;
// sums[i] = the sum over r of rows[r * pitch + i], for `count` rows of floats or doubles and at most kMaxColumns columns.
using AddRows = void(Dtype type, const void* rows, int64_t count, int64_t pitch, int64_t n, double* sums);
// out[i] = sums[i] / divisor, rounded to the compute type, then to `type`.
using StoreSums = void(const double* sums, int64_t n, double divisor, Dtype type, void* out);

// ---- Softmax ---------------------------------------------------------------------------------------------------------------

struct Softmax {
  SoftmaxSpec spec;
  const char* x;
  const char* mask;
  char* y;  // contiguous
  RowLayout x_rows, mask_rows;
  int64_t cols, mask_stride;  // a mask stride of 0 uses one column of the mask for all columns
  int64_t causal_rows;        // rows per matrix, of which row i keeps columns 0 ... i; 0: not causal
  double scale;

  struct Carry {
    double largest, sum;  // the largest logit, and the sum of exp(logit - largest)
  };
  using Total = Carry;
  static constexpr bool kWrites = true;
  bool in_place = false;  // the exponentials lie in y
  RowShape shape() const {
    constexpr int64_t kWhole = 64;  // no vectors are longer
    return {cols, 8192, in_place ? 0 : (cols + kWhole) * (spec.x == Dtype::kDouble ? 8 : 4)};
  }
};

// All rows are contiguous.
struct SoftmaxBackward {
  SoftmaxBwdSpec spec;  // y and dx have one type
  const char* dy;
  const char* y;
  char* dx;
  int64_t cols;
  double scale;
  bool streams;

  using Carry = double;
  using Total = double;
  static constexpr bool kWrites = true;
  RowShape shape() const { return {cols, 32768}; }
};

// ---- Log-probabilities ------------------------------------------------------------------------------------------------------

struct TokenLogprob : TokenLogprobArgs {
  Extra extra;

  struct Carry {
    // The largest logit, NaN if one is; sums of what is relative to it; the sum of the weights, or the number of columns that
    // a mask keeps.
    double largest, sum, extra, weights;
    int64_t best;  // the first column of the largest logit
  };
  struct Total {};
  static constexpr bool kWrites = false;
  RowShape shape() const { return {cols, 8192}; }
};

struct TokenLogprobBackward : TokenLogprobBwdArgs {
  bool streams;

  struct Carry {};
  struct Total {};
  static constexpr bool kWrites = true;
  RowShape shape() const { return {cols, 8192}; }
};

// ---- Rotary embedding ------------------------------------------------------------------------------------------------------

// The strides of a tensor of heads, in elements. The columns of a head lie side by side.
struct HeadStrides {
  int64_t example, token, head;
  int64_t offset(int64_t of_example, int64_t of_token) const { return of_example * example + of_token * token; }
};

// The heads of the query or of the key.
struct RotaryHeads {
  const char* x;   // null in backward without a norm
  const char* dy;  // null in forward
  char* result;    // y or dx
  HeadStrides x_rows, dy_rows, result_rows;
  int64_t count;       // the number of heads, 0 if there is no such tensor
  const void* weight;  // in the accumulator type, the offset added
  bool rounds_product, rounds_rotation;
};

struct Rotary {
  RotaryHeads of[2];
  const char *cos, *sin;     // contiguous rows of `half` elements
  int64_t table_example;     // the stride of examples in the tables, 0 if all share one table
  const int64_t* positions;  // contiguous; if null, a token's position is its number
  int64_t position_example;
  int64_t tokens, cols, half;
  double eps;
  bool has_norm, interleaved, rounds_normalized;
  Dtype type, table_type;
};

// The kernels take tokens [begin, end) of all examples. Backward adds both dweights to rows of `cols` doubles.
using RotaryForward = void(const Rotary&, int64_t begin, int64_t end);
using RotaryBackward = void(const Rotary&, int64_t begin, int64_t end, double* const (&dweights)[2]);

// ---- Quantisation ----------------------------------------------------------------------------------------------------------

struct Quantization {
  Dtype type;  // the type of the values to quantise
  CodeType code;
  int64_t rows, cols, block;  // `block` columns share a scale; 0: all columns of a row
  const float* given;         // the caller's scale; if null, the kernel computes one per row or block
  uint8_t* values;            // contiguous
  float* scales;              // the scale of block b of a row is at b * rows + row
};
// Quantises rows [begin, end) of v, whose memory begins at row `first`.
using QuantizeRows = void(const Quantization&, const void* v, const RowLayout& layout, int64_t begin, int64_t end,
                          int64_t first);

// ---- One instruction set ---------------------------------------------------------------------------------------------------

// clang-format off
#define KF_CPU_KERNELS(X) \
  X(PrepareParameter, prepare) X(RowKernel<Forward>, forward) \
  X(RowNormForwardStaged, forward_staged) X(PointwiseLoop, pointwise) X(PointwiseLoop, pointwise_bwd) \
  X(PointwiseColumns, pointwise_bwd_columns) X(RowKernel<Reduction>, reduce_rows) X(ReduceColumns, reduce_columns) X(AddRows, add_rows) \
  X(StoreSums, store_sums) X(RowKernel<Softmax>, softmax) X(RowKernel<SoftmaxBackward>, softmax_bwd) X(RotaryForward, rotary) \
  X(RowKernel<TokenLogprob>, token_logprob) X(RowKernel<TokenLogprobBackward>, token_logprob_bwd) \
  X(RotaryBackward, rotary_bwd) X(QuantizeRows, quantize_rows) X(RoundRow, round_row) X(RowNormBackward, backward) \
  X(RowNormBackwardSums, backward_sums) X(RowNormBackwardDx, backward_dx) X(RowNormBackwardOwn, backward_own) \
  X(RowNormBackwardStaged, backward_staged)
// clang-format on

#define KF_POINTER(type, name) type* name;
struct Kernels {
  KF_CPU_KERNELS(KF_POINTER)
};
#undef KF_POINTER

#define KF_KERNEL(type, name) type name;
#define KF_ENTRY(type, name) name,

// The kernels for this machine's instruction set, within ATEN_CPU_CAPABILITY.
const Kernels& kernels();

}  // namespace kf::cpu
