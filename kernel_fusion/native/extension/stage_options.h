// The stages around a norm, which core/spec.py lists: what is no tensor, without a library.
// Written by `python -m kernel_fusion.backends.cuda.headers`.
#pragma once

// clang-format off
#include <array>

#include "stages.h"

namespace kf {

// Options that are no tensors; at the default if a stage, or the tensor that it belongs to, is absent.
struct StageOptions {
  int32_t pre_activation = 0;
  int32_t activation = 0;
  Dropout dropout;
  Rounding rounding{};
  int32_t gate_activation = 0;
  bool gate_first = false;
  bool grouped = false;

  bool operator==(const StageOptions&) const = default;
};

// Something for each tensor of the input's shape.
template <class T> struct StageRows {
  std::array<T, 1> rows{};
  const T& gate() const { return rows[0]; }
};

}  // namespace kf
