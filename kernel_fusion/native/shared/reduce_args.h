// The arguments of reductions, and of functions that need a sum over each row.
#pragma once

#include "shared/names.h"
#include "shared/row_norm_args.h"

namespace kf {

// out[o][c][i] = (sum over r in chunk c of map(in[o][r][i])) / divisor; strides in elements, out contiguous.
struct ReduceArgs {
  const void* in;
  void* out;
  long long outer, reduced, inner;
  long long outer_stride, reduced_stride, inner_stride;
  long long chunks;  // rows': `chunk` elements; columns': blocks in turn
  long long chunk;
  double divisor;
};

// y, contiguous, of the logits scale * x + mask. If causal, row r of each `causal_rows` keeps columns 0 ... r.
struct SoftmaxArgs {
  const void* x;
  const void* mask;
  void* y;
  long long rows, cols;
  long long causal_rows;
  RowLayout x_rows;
  RowLayout mask_rows;
  double scale;
};

// How logits come from rows of x, on CPUs, too: z = cap(scale * x) / temperature. What is absent is null. Numbers of rows lie
// one after the other in the accumulator type; a row has num_ids ids of 64 bits.
struct LogitRows {
  Dtype type;
  const char *x, *ids, *mask, *temperature, *weight;
  RowLayout x_rows, mask_rows;
  long long rows, cols, num_ids, mask_stride;
  double scale, softcap;  // a softcap of 0 caps nothing
  long long ignore_index;
};

// Log-probabilities of the ids, and numbers of the rows. `found` is the extra.
struct TokenLogprobArgs : LogitRows {
  char *logprob, *largest, *log_sum, *found, *predicted;
};

// dx, contiguous.
struct TokenLogprobBwdArgs : LogitRows {
  const char *largest, *log_sum, *dlogprob, *da, *db, *dc;
  char* dx;
};

// dx = scale * (dy - sum(dy * y)) * y, contiguous.
struct SoftmaxBwdArgs {
  const void* dy;
  const void* y;
  void* dx;
  long long rows, cols;
  RowLayout dy_rows;
  RowLayout y_rows;
  double scale;
};

}  // namespace kf
