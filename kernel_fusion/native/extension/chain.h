// What a pointwise chain and a reduction compute, as operators and kernels of every device say it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "dropout.h"

namespace kf {

enum class Combine : int32_t { kFirst, kAdd, kMul, kGate };  // act(a), act(a + b), act(a * b), act(a) * b
inline constexpr std::string_view kCombineNames[] = {"first", "add", "mul", "gate"};

inline std::optional<Combine> combine_of(std::string_view name) {
  int32_t code = 0;
  for (const auto known : kCombineNames) {
    if (known == name) return static_cast<Combine>(code);
    ++code;
  }
  return std::nullopt;
}

struct Chain {
  Combine combine;
  int32_t activation;   // its position in KF_ACTIVATIONS
  double scale;         // that of dropout included
  Dropout dropout;
  const int64_t* seed;  // where the tensors are; null without dropout
  // A bit for each element of y, in the order in which it lies in memory: whether the slope of the activation is that at 1.
  // Forward writes them, backward (of kFirst) reads them in place of a; null: neither. Of the CUDA kernels alone.
  uint8_t* bits = nullptr;
};

enum class Map : int32_t { kSquare, kAbs, kNone };

}  // namespace kf
