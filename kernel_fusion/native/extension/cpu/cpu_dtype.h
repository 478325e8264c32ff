// The host's way from PyTorch's element types to those of the kernels: the one place that refuses all others.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "cpu/dtype.h"

namespace kf {

inline cpu::Dtype cpu_dtype(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return cpu::Dtype::kHalf;
    case at::kBFloat16: return cpu::Dtype::kBFloat16;
    case at::kFloat: return cpu::Dtype::kFloat;
    case at::kDouble: return cpu::Dtype::kDouble;
    default: TORCH_CHECK_TYPE(false, "kernel_fusion: kernels know float16, bfloat16, float32 and float64, not ", type);
  }
}

}  // namespace kf
