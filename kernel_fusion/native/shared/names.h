// The names that fields of specs have, and lists of names in the order of their codes.
// Written by `python -m kernel_fusion.native.headers`.
#pragma once

#define KF_ACTIVATIONS(X) \
  X(identity) X(sign) X(from_tanh) X(from_sigmoid) X(relu) X(relu_squared) X(leaky_relu) X(gelu) X(gelu_tanh) \
  X(quick_gelu) X(silu) X(tanh) X(sigmoid) X(mish) X(softplus) X(hardswish) X(elu) X(squareplus) X(selu)

#define KF_COMBINES(X) \
  X(first) X(add) X(mul) X(gate)

namespace kf {

enum class Counter : int { kCpuForward = 0, kCpuBackward = 1, kCudaLaunch = 2 };
enum class CodeType : int { kAbsent = -1, kInt8 = 0, kFloat8E4m3fn = 1, kFloat8E5m2 = 2 };
enum class Scales : int { kGiven = 0, kRow = 1, kBlock = 2 };
enum class Rounding : int { kOnce = 0, kHf = 1 };
enum class Dtype : int { kAbsent = -1, kHalf = 0, kBFloat16 = 1, kFloat = 2, kDouble = 3, kBool = 4, kBit = 5 };
enum class Direction : int { kInference = 0, kForward = 1, kBackward = 2, kBackwardWeight = 3 };
enum class Passes : int { kBoth = 0, kFirst = 1, kSecond = 2 };
enum class Combine : int { kFirst = 0, kAdd = 1, kMul = 2, kGate = 3 };
enum class Mode : int { kLinear = 0, kVector = 1, kBroadcast = 2, kStrided = 3, kGather = 4 };
enum class Map : int { kSquare = 0, kAbs = 1, kNone = 2 };
enum class GroupStep : int { kRow = 0, kMoments = 1, kFinish = 2, kApply = 3, kRowBwd = 4, kSums = 5, kFinishBwd = 6, kDx = 7 };
enum class Extra : int { kNone = 0, kSum = 1, kEntropy = 2 };
enum class KeptParameters : int { kNothing = 0, kWeight = 1, kBoth = 2, kShared = 3 };
enum class KeptSums : int { kNone = 0, kRegisters = 1, kShared = 2, kApart = 3, kStored = 4 };
enum class Reading : int { kResident = 0, kStreamed = 1, kTwice = 2, kOnce = 3 };

inline constexpr int kOperands = 5;

}  // namespace kf
