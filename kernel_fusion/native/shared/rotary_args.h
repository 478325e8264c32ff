// As in row_norm_args.h.
#pragma once

namespace kf {

// Strides, in elements, are those of examples, tokens and heads.
struct RotaryHeads {
  const void* x;
  void* y;
  long long x_stride[3];
  long long y_stride[3];
};

// Query and key. cos and sin lie alike: examples, then tokens or positions.
struct RotaryArgs {
  RotaryHeads of[2];
  unsigned heads[2];
  unsigned tokens;
  const void* cos;
  const void* sin;
  const void* positions;
  long long table_rows;
  long long table_stride[2];
  long long position_stride[2];
};

// With a norm. Backward turns dy, to dx or null, and reads x. Query's blocks come first.
struct RotaryNormArgs {
  RotaryArgs rotary;
  const void* weight[2];
  double eps;
  double weight_offset;

  const void* x[2];
  long long x_stride[2][3];
  long long rows[2];  // heads of all tokens, 0 if nobody wants gradients
  unsigned query_blocks;
  void* partials[2];
  long long partial_pitch;
};

}  // namespace kf
