// The pointwise kernels' arguments.
#pragma once

#include "shared/inline.h"
#include "shared/names.h"

namespace kf {

// n / divisor = (n + the upper half of n * multiplier) >> shift, for n < 2^31. Granlund, Montgomery: Division by
// Invariant Integers using Multiplication, PLDI 1994.
struct FastDivisor {
  unsigned divisor, multiplier, shift;
};

KF_INLINE FastDivisor fast_divisor(unsigned divisor) {
  unsigned shift = 0;
  while ((1ull << shift) < divisor) ++shift;
  return {divisor, static_cast<unsigned>((((1ull << shift) - divisor) << 32) / divisor + 1), shift};
}

KF_INLINE unsigned divide(unsigned n, const FastDivisor& by) {
  return (static_cast<unsigned>(static_cast<unsigned long long>(n) * by.multiplier >> 32) + n) >> by.shift;
}

// y = dropout(scale * f(a, b)), or its gradients. Strides are in elements, innermost first.
struct PointwiseArgs {
  static constexpr int kDims = 16;
  void* data[kOperands];  // y or da; db or written bits; dy; a or bits; b
  long long size;
  long long position;  // of offset 0, for dropout
  const void* seed;
  double scale;
  unsigned dropout_last;   // the last random bits that drop
  FastDivisor dim[kDims];  // sizes
  unsigned stride[kDims][kOperands];
};

// With a row b: dy, a (or bits) and da are contiguous; a block row writes a partial row of db.
struct PointwiseColumnsArgs {
  const void* dy;
  const void* a;
  const void* b;
  void* da;
  void* partials;
  long long rows, cols;
  long long pitch;  // of partial rows
  const void* seed;
  double scale;
  unsigned dropout_last;
};

}  // namespace kf
