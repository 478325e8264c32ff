// Activations have names in the operators and codes, their positions in KF_ACTIVATIONS, in the kernels.
#pragma once

#include <cstdint>
#include <string_view>

#include "shared/activations.h"

namespace kf {

#define KF_NAME(name) #name,
inline constexpr std::string_view kActivationNames[] = {KF_ACTIVATIONS(KF_NAME)};
#undef KF_NAME

// -1 where there is no such activation.
inline int32_t activation_code(std::string_view name) {
  int32_t code = 0;
  for (const auto known : kActivationNames) {
    if (known == name) return code;
    ++code;
  }
  return -1;
}

inline bool has_two_slopes(std::string_view name) {
#define KF_TWO_SLOPES(name) act::kTwoSlopes<act::name>,
  constexpr bool known[] = {KF_ACTIVATIONS(KF_TWO_SLOPES)};
#undef KF_TWO_SLOPES
  const int32_t code = activation_code(name);
  return code >= 0 && known[code];
}

}  // namespace kf
