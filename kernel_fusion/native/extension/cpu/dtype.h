// The element types of the CPU kernels.
#pragma once

namespace kf::cpu {

enum class Dtype : int { kHalf, kBFloat16, kFloat, kDouble };

}  // namespace kf::cpu
