// The host's way from PyTorch's element types to those of the CPU kernels.
#pragma once

#include <c10/core/ScalarType.h>

#include "cpu/dtype.h"

namespace kf {

inline cpu::Dtype cpu_dtype(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return cpu::Dtype::kHalf;
    case at::kBFloat16: return cpu::Dtype::kBFloat16;
    case at::kFloat: return cpu::Dtype::kFloat;
    default: return cpu::Dtype::kDouble;
  }
}

}  // namespace kf
