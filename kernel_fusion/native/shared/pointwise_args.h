// The arguments of the pointwise kernels. Plain data, as in row_norm_args.h.
#pragma once

#include "shared/inline.h"
#include "shared/names.h"

namespace kf {

// A divisor of numbers, all below 2^31: n / divisor = (n + the upper half of n * multiplier) >> shift. Granlund, Montgomery:
// Division by Invariant Integers using Multiplication, PLDI 1994.
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

// y = dropout(scale * f(a, b)), or its gradients. Element i of the iteration, innermost dimension first, is at the sum of
// coordinate times stride; of a linear operand at i.
struct PointwiseArgs {
  static constexpr int kDims = 16;
  void* data[kOperands];  // y or da; db, or the bits that forward writes; dy; a, or bits; b
  long long size;         // elements
  long long position;     // of the element at offset 0, for dropout
  const void* seed;
  double scale;
  unsigned dropout_last;              // drops elements with random bits up to this
  FastDivisor dim[kDims];             // sizes
  unsigned stride[kDims][kOperands];  // in elements
};

// The gradients for a row b: dy, a (or bits) and da are contiguous; each block row writes a partial row of db.
struct PointwiseColumnsArgs {
  const void* dy;
  const void* a;
  const void* b;
  void* da;
  void* partials;
  long long rows, cols;
  long long pitch;  // of the partial rows, in elements
  const void* seed;
  double scale;
  unsigned dropout_last;  // drops elements with random bits up to this
};

}  // namespace kf
