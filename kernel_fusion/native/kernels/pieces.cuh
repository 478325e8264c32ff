// Rows that lie in pieces, of which the caller adds up the sums between two passes (Passes).
//
// Sums are float64. So S = sum of n mean and Q = sum of (M2 + n mean^2) over the pieces give the variance Q / N - (S / N)^2,
// which is Chan's formula for merging (count, mean, M2), without the loss of digits that it would have in float32; and sums of
// a few float32 numbers are as a rule exact, in whatever order they are added.
#pragma once

#include "shared/names.h"
#include "tree.cuh"

namespace kf {

// Kernels that make both passes have no such constant.
template <class S> __device__ constexpr Passes passes_of() {
  if constexpr (requires { S::kPasses; }) return S::kPasses;
  else return Passes::kBoth;
}
template <class S> __device__ constexpr bool is_first_pass() { return passes_of<S>() == Passes::kFirst; }
template <class S> __device__ constexpr bool is_second_pass() { return passes_of<S>() == Passes::kSecond; }

// The numbers in memory: how many columns there are, then for each row the sum of squares, or in backward that of g * (x -
// mean); and for LayerNorm the sum of values, or that of g.
template <class S> __device__ constexpr int sums_of_row() { return S::kRms ? 1 : 2; }

// Stores the sums of a row's piece. One thread of the row calls this.
template <class S> __device__ void store_sums(void* to, i64 row, double values, double squares) {
  auto* const sums = static_cast<double*>(to) + 1 + row * sums_of_row<S>();
  sums[0] = squares;
  if constexpr (!S::kRms) sums[1] = values;
  if (row == 0) *static_cast<double*>(to) = S::kCols;
}

// The means over all columns of a row, from the sums of all pieces: of values (RMSNorm: 0), and of squares.
struct MeansOfRows {
  const double* all;
  double per_col;

  __device__ explicit MeansOfRows(const void* sums) : all(static_cast<const double*>(sums)), per_col(1.0 / *all) {}
  template <class S> __device__ Pair<double> of(i64 row) const {
    const double* const sums = all + 1 + row * sums_of_row<S>();
    return {S::kRms ? 0.0 : sums[S::kRms ? 0 : 1] * per_col, sums[0] * per_col};
  }
};

}  // namespace kf
