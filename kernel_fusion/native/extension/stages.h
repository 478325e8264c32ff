// Stages by the names that operators and kernels share: activations, dropout, chains of operands, maps. It needs no library,
// because the CPU kernels include it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>

#include "shared/activations.h"
#include "shared/inline.h"
#include "shared/names.h"

namespace kf {

// ---- Activations have names in the operators and codes, their positions in KF_ACTIVATIONS, in the kernels -------------------

#define KF_NAME(name) #name,
inline constexpr std::string_view kActivationNames[] = {KF_ACTIVATIONS(KF_NAME)};
inline constexpr std::string_view kCombineNames[] = {KF_COMBINES(KF_NAME)};
#undef KF_NAME

// The code of a name, its position in a list; -1: unknown.
template <size_t n> int32_t code_in(const std::string_view (&names)[n], std::string_view name) {
  const auto* const found = std::find(names, names + n, name);
  return found == names + n ? -1 : static_cast<int32_t>(found - names);
}
inline int32_t activation_code(std::string_view name) { return code_in(kActivationNames, name); }
inline std::optional<Combine> combine_of(std::string_view name) {
  const int32_t code = code_in(kCombineNames, name);
  return code < 0 ? std::nullopt : std::optional(static_cast<Combine>(code));
}

inline bool has_two_slopes(std::string_view name) {
#define KF_TWO_SLOPES(name) act::kTwoSlopes<act::name>,
  constexpr bool known[] = {KF_ACTIVATIONS(KF_TWO_SLOPES)};
#undef KF_TWO_SLOPES
  const int32_t code = activation_code(name);
  return code >= 0 && known[code];
}

// ---- Dropout: the numbers of core/dropout.py -------------------------------------------------------------------------------

struct Dropout {
  static constexpr uint64_t kAll = uint64_t{1} << 32;

  uint64_t threshold = 0;  // how many of kAll values of an element's bits (shared/philox.h) drop it; 0: no dropout

  // To the nearest, ties to even, as Python rounds.
  static KF_INLINE Dropout of(double p) { return {static_cast<uint64_t>(std::nearbyint(p * kAll))}; }

  bool operator==(const Dropout&) const = default;
  KF_INLINE explicit operator bool() const { return threshold != 0; }
  KF_INLINE bool drops_all() const { return threshold == kAll; }
  KF_INLINE uint32_t last() const { return static_cast<uint32_t>(threshold - 1); }  // bits up to this drop an element
  KF_INLINE double p() const { return static_cast<double>(threshold) / kAll; }
  KF_INLINE double scale() const { return drops_all() ? 0.0 : 1 / (1 - p()); }  // of kept elements
};

// ---- Chains and reductions -------------------------------------------------------------------------------------------------

struct Chain {
  Combine combine;
  int32_t activation;  // its position in KF_ACTIVATIONS
  double scale;        // including dropout's
  Dropout dropout;
  const int64_t* seed;  // in the tensors' memory; null without dropout
  // A bit per element of y, in memory order: whether the activation has the slope of 1. Forward writes them; backward (of
  // kFirst) reads them instead of a; null: neither. CUDA kernels only.
  uint8_t* bits = nullptr;
};

}  // namespace kf
