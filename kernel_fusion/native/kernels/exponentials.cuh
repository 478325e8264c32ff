// Exponentials of distances to the largest number of a row.
#pragma once

#include "math.cuh"

namespace kf {

__device__ inline float negative_infinity(float) { return __int_as_float(0xff800000); }
__device__ inline double negative_infinity(double) { return __longlong_as_double(0xfff0000000000000ll); }

inline constexpr float kLog2E = 1.44269504f;
// e^(v - max). A product with log2(e) could overflow for a mask of the lowest finite number.
__device__ inline float exp_below(float v, float max) { return Hardware::exp2((v - max) * kLog2E); }
__device__ inline double exp_below(double v, double max) { return exp(v - max); }

}  // namespace kf
