// The arguments of the pointwise kernels: written by the host, read by the device. Plain data, as in row_norm_args.h.
#pragma once

#include "shared/inline.h"
#include "shared/names.h"

namespace kf {

// A divisor, below 2^31, of numbers below 2^31: n / divisor = (n + the upper half of n * multiplier) >> shift.
// Granlund, Montgomery: Division by Invariant Integers using Multiplication, PLDI 1994.
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

// y = dropout(scale * f(a, b)), or the gradients of it. Element i of the iteration, innermost dimension first, stands at the
// sum of coordinate times stride in each operand, unless the kernel knows that the operand is linear: then at i.
struct PointwiseArgs {
  static constexpr int kDims = 16;
  void* data[kOperands];  // y or da; db, or the bits that forward writes; dy; a, or bits; b
  long long size;         // elements
  long long position;     // dropout's, of the element at offset 0
  const void* seed;
  double scale;
  unsigned dropout_last;              // elements whose random bits are at most this are dropped
  FastDivisor dim[kDims];             // sizes
  unsigned stride[kDims][kOperands];  // in elements
};

// The gradients where b is a row: dy, a (or bits) and da are contiguous, and each block row writes a partial row of db.
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
  unsigned dropout_last;  // elements whose random bits are at most this are dropped
};

}  // namespace kf
