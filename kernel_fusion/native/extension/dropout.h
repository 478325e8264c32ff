// The numbers of dropout, as in core/dropout.py. Without a library: the CPU kernels include this.
#pragma once

#include <cmath>
#include <cstdint>

#include "shared/inline.h"

namespace kf {

struct Dropout {
  static constexpr uint64_t kAll = uint64_t{1} << 32;

  uint64_t threshold = 0;  // of kAll values of an element's bits (shared/philox.h) so many drop it; 0: there is no dropout

  // To the nearest, halves to the even one, as Python rounds.
  static KF_INLINE Dropout of(double p) { return {static_cast<uint64_t>(std::nearbyint(p * kAll))}; }

  KF_INLINE explicit operator bool() const { return threshold != 0; }
  KF_INLINE bool drops_all() const { return threshold == kAll; }
  KF_INLINE uint32_t last() const { return static_cast<uint32_t>(threshold - 1); }  // bits up to this drop an element
  KF_INLINE double p() const { return static_cast<double>(threshold) / kAll; }
  KF_INLINE double scale() const { return drops_all() ? 0.0 : 1 / (1 - p()); }  // of what is kept
};

}  // namespace kf
