// How kernels meet memory: vectors, what they are aligned to, tiles of columns.
#pragma once

#include <algorithm>
#include <bit>

#include "operators.h"

namespace kf {

inline constexpr int64_t kVectorBytes = 16;

inline int64_t size_of(at::ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); }

// The largest power of two that divides n and is at most `most`, itself one.
inline int64_t dividing_power(int64_t n, int64_t most) {
  while (n % most != 0) most /= 2;
  return most;
}

// The alignment of everything at p plus multiples of `steps` bytes, as far as vectors of so many bytes care.
inline int32_t alignment_within(const void* p, int64_t steps, int64_t vector_bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(steps);
  return std::min<int32_t>(alignment_of(reinterpret_cast<const void*>(bits)),
                           static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(vector_bytes))));
}

// Threads along the columns of a block of `threads` (kernels/column_sums.cuh): a warp, or fewer where the columns are few or
// most of the last tile would lie outside.
inline int32_t tile_lanes(int64_t vectors) {
  if (vectors < 32) return static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(vectors)));
  const auto covered = [&](int64_t lanes) { return ceil_div(vectors, lanes) * lanes; };
  if (covered(32) * 4 <= vectors * 5) return 32;
  return covered(16) * 4 <= vectors * 5 ? 16 : 8;
}

}  // namespace kf
