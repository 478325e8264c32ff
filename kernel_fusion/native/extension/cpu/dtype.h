// The element types of the CPU kernels, and the host's way to them: the one place that refuses all others.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <optional>

#include "shared/names.h"

namespace kf {

inline Dtype cpu_dtype(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return Dtype::kHalf;
    case at::kBFloat16: return Dtype::kBFloat16;
    case at::kFloat: return Dtype::kFloat;
    case at::kDouble: return Dtype::kDouble;
    default: TORCH_CHECK_TYPE(false, "kernel_fusion: kernels know float16, bfloat16, float32 and float64, not ", type);
  }
}

inline Dtype dtype_or_absent(const std::optional<at::ScalarType>& type) { return type ? cpu_dtype(*type) : Dtype::kAbsent; }

}  // namespace kf
