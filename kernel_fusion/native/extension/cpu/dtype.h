// The element types of the CPU kernels, and the host's way to them: the one place that refuses all others.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

namespace kf {

namespace cpu {
enum class Dtype : int { kHalf, kBFloat16, kFloat, kDouble };
}

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
