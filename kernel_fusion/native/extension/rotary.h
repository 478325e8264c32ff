// The rotary embedding of query and key, which may be normalised by an RMSNorm per head before. Shapes are those of
// core/rotary.py.
#pragma once

#include "dispatch.h"

namespace kf {

using RotaryCall = QkNormRopeCall;
using RotaryBwdCall = QkNormRopeBwdCall;  // dy of query and key; query and key themselves if there is a norm
using RotaryResult = RotaryCall::Result;
using RotaryGradients = RotaryBwdCall::Result;

// x, or a copy whose columns lie side by side.
inline Tensor with_dense_columns(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

// The kernels fill results that were allocated before. An undefined result is not wanted.
void rotary_cpu(const RotaryCall& call, Tensor& query, Tensor& key);
void rotary_cuda(const RotaryCall& call, Tensor& query, Tensor& key);
void rotary_bwd_cpu(const RotaryBwdCall& call, RotaryGradients& gradients);
void rotary_bwd_cuda(const RotaryBwdCall& call, RotaryGradients& gradients);

// With a norm, the CUDA kernels hold whole heads in registers, so heads are at most this long.
inline constexpr int64_t kLongestHead = 512;

}  // namespace kf
