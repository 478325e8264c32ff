// The arguments of the reductions: written by the host, read by the device. Plain data, as in row_norm_args.h.
#pragma once

namespace kf {

// out[o][c][i] = (sum over r in chunk c of map(in[o][r][i])) / divisor; strides in elements, out contiguous.
struct ReduceArgs {
  const void* in;
  void* out;
  long long outer, reduced, inner;
  long long outer_stride, reduced_stride, inner_stride;
  long long chunks;  // along r: of `chunk` each when rows are summed, blocks that take turns when columns are
  long long chunk;
  double divisor;
};

}  // namespace kf
