// The arguments of kernels that write codes.
#pragma once

#include "shared/row_norm_args.h"

namespace kf {

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
