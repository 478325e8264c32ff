// Row addressing: the one place that turns a row number into an offset, in 64 bits.
#pragma once

#include "shared/row_norm_args.h"
#include "types.cuh"

namespace kf {

template <bool kStrided> __device__ i64 row_offset(const RowLayout& layout, i64 row) {
  if constexpr (!kStrided) return row * layout.stride[2];
  const i64 outer = row / layout.inner;
  return outer / layout.middle * layout.stride[0] + outer % layout.middle * layout.stride[1] +
         row % layout.inner * layout.stride[2];
}

}  // namespace kf
