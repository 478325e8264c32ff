// Arguments of row norms and codes.
#pragma once

namespace kf {

// In elements, row r starts at
// (r / (middle * inner)) * stride[0] + (r / inner % middle) * stride[1] + (r % inner) * stride[2].
struct RowLayout {
  long long middle;
  long long inner;
  long long stride[3];
};

// Sample s of group g, first + blockIdx.y, is row s * step + g * inner; parameters begin at g * pitch.
struct RowGroups {
  long long first;
  long long step;
  long long inner;
  long long weight_pitch;
  long long bias_pitch;
  long long gate_pitch;
};

// Contiguous codes of rows; their scales, that of block b of row r at b * rows + r, or the one that is given.
struct CodeArgs {
  void* codes;
  float* scales;
  long long rows;
};

// The norm of extension/row_norm.h. Null: absent. The second group is for stages. A row's gate takes the residual's
// place: h = x * act(gate), not stored, or y times act(gate). A first pass (kernels/pieces.cuh) writes its sums to y, and a
// second one reads those of all pieces at h.
struct RowNormFwdArgs {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  void* mean;
  void* rstd;
  long long rows;
  RowLayout x_rows;
  double eps;
  double weight_offset;

  const void* residual;
  void* h;  // contiguous
  const void* seed;
  RowLayout residual_rows;
  unsigned dropout_last;  // the last random bits that drop
  double dropout_scale;
  RowGroups groups;  // samples
  const void* gate;  // of the residual
  CodeArgs codes;
};

// dx and dresidual, and a block's or cluster's partial rows. A first pass writes its sums to dx, and a second one reads those
// of all pieces at dweight_partials.
struct RowNormBwdArgs {
  const void* dy;
  const void* x;  // with a residual: h
  const void* mean;
  const void* rstd;
  const void* weight;
  void* dx;
  void* dweight_partials;
  void* dbias_partials;
  long long rows;
  long long partial_pitch;
  RowLayout x_rows;
  RowLayout dy_rows;
  double weight_offset;

  const void* bias;
  const void* dh;     // h's gradient, contiguous
  const void* pre_x;  // a row's gate, or x
  void* dresidual;    // or the gate's gradient
  const void* seed;
  RowLayout pre_x_rows;
  unsigned dropout_last;
  double dropout_scale;
  RowGroups groups;
  const void* gate;  // of the residual
  void* dgate_partials;
};

// out[c] = sum of partials[p * pitch + c] over p; `cols` if the kernel knows no number.
struct SumPartialsArgs {
  const void* partials[2];
  void* out[2];
  long long num_partials;
  long long pitch;
  long long cols;
};

// Codes of v = activation(x) * other, or of x; v too, unless null.
struct QuantizeArgs {
  const void* x;
  const void* other;
  void* v;  // contiguous
  long long rows;
  RowLayout x_rows;
  RowLayout other_rows;
  CodeArgs codes;
};

}  // namespace kf
