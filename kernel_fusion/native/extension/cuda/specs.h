// Specs, accesses and launches: core/spec.py, core/other_specs.py, backends/cuda/source.py define them.
// Written by `python -m kernel_fusion.backends.cuda.headers`.
#pragma once

#include "shared/names.h"

namespace kf {

struct Codes {
  CodeType code = CodeType::kAbsent;
  Scales scales = Scales::kGiven;
  int keeps = 0;
};

struct RowNormSpec {
  static constexpr int kKernel = 0;
  int pre_activation = 0, activation = 0, dropout = 0;
  Rounding rounding = Rounding::kOnce;
  Dtype gate = Dtype::kAbsent;
  int gate_activation = 0, gate_first = 0, grouped = 0;
  Dtype residual_gate = Dtype::kAbsent;
  Direction direction;
  int rms, cols;
  Dtype x, y, weight = Dtype::kAbsent, bias = Dtype::kAbsent;
  int offset = 0, grads[3] = {1, 1, 1};
  Dtype residual = Dtype::kAbsent;
  int dh = 0, dresidual = 0, dgate = 0, one_row = 0;
  Codes codes = {};
  Passes passes = Passes::kBoth;
};

struct Access {
  int x = 16, y = 16, weight = 16, dx = 16, strided_x = 0, strided_y = 0, residual = 16, pre_x = 16, strided_residual = 0,
      strided_pre_x = 0;
};

struct SumPartialsSpec {
  static constexpr int kKernel = 1;
  int cols;
  Dtype acc, first, second;
};

struct PointwiseSpec {
  static constexpr int kKernel = 2;
  Combine combine;
  int activation, dropout;
  Dtype a, b, y = Dtype::kAbsent, dy = Dtype::kAbsent, da = Dtype::kAbsent, db = Dtype::kAbsent;
  int bits = 0;
};

struct Operand {
  Mode mode = Mode::kLinear;
  int align = 16;
};

struct PointwiseAccess {
  int dims = 1, vec = 4;
  Operand operands[5] = {};
  int lanes = 0, aligned_positions = 1, divisor = 0, repeats = 0;
};

struct ReduceSpec {
  static constexpr int kKernel = 3;
  Map map;
  Dtype input, out, acc;
};

struct ReduceAccess {
  int vec = 0, lanes = 0, threads = 0, capacity = 0, contiguous = 1, chunked = 0, nested = 0, align = 16, align_out = 16;
};

struct SoftmaxSpec {
  static constexpr int kKernel = 4;
  Dtype x, mask = Dtype::kAbsent;
  int causal = 0, scaled = 0, log = 0;
};

struct RowAccess {
  int align = 16, strided = 0;
};

struct SoftmaxAccess {
  int vec, capacity;
  RowAccess x = {}, other = {};
  int mask_repeats = 0;
};

struct SoftmaxBwdSpec {
  static constexpr int kKernel = 5;
  Dtype dy, y, dx;
  int leaves_out = 0, log = 0;
};

struct RotarySpec {
  static constexpr int kKernel = 6;
  Dtype x = Dtype::kFloat, angles = Dtype::kFloat;
  int cols = 0, half = 0, interleaved = 0, rounds = 0, backward = 0, norm = 0;
  Dtype query_weight = Dtype::kAbsent, key_weight = Dtype::kAbsent;
  int offset = 0, sums = 0;
};

struct RotaryAccess {
  int vec = 1, threads = 32, positions = 0, align = 16, align_out = 16, align_angles = 16, align_weights = 16;
};

struct QuantizeSpec {
  static constexpr int kKernel = 7;
  int cols;
  Dtype x, other = Dtype::kAbsent;
  int activation = 0;
  Codes codes = {};
};

struct QuantizeAccess {
  RowAccess x = {}, other = {};
};

struct GroupNormSpec {
  static constexpr int kKernel = 8;
  GroupStep step;
  Dtype x, y = Dtype::kAbsent, weight = Dtype::kAbsent, bias = Dtype::kAbsent, add = Dtype::kAbsent, scale = Dtype::kAbsent,
      shift = Dtype::kAbsent;
  int activation = 0, channels_last = 0, sums_x = 0;
};

struct GroupNormAccess {
  int vec = 1, lanes = 32, threads = 256, align = 16, align_out = 16;
};

struct TokenLogprobSpec {
  static constexpr int kKernel = 9;
  Dtype x;
  int backward = 0, masked = 0, scaled = 0, capped = 0, weighted = 0;
  Extra extra = Extra::kNone;
  int predicts = 0;
};

struct ReduceRule {
  int chunk_bytes = 65536, column_threads = 256, column_blocks = 4, rows_per_thread = 8, lanes = 16, lanes_of_chunks = 8,
      few_rows = 16, few_threads = 64, all_threads = 512, filled[2] = {5, 9}, all_bytes = 8;
};

struct GroupNormRule {
  int row = 32768, piece = 8192, pieces = 32, tile = 16384, tiles = 1024, threads = 256, row_threads = 512, per_thread = 16;
};

struct Launch {
  int threads = 32, per_block = 1, least_per_block = 0, cluster = 1, shared_bytes = 0, persistent = 0, splits = 0, min_blocks =
      1, dependent = 0;
};

inline constexpr int kKeyFields = 39;
inline constexpr int kVectorBytes = 16;
inline constexpr int kPartialCols = 32;

}  // namespace kf
