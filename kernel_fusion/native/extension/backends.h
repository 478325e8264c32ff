// The devices, and which kernels of each family they have.
#pragma once

#include <c10/core/DispatchKeySet.h>

#include "pointwise.h"
#include "reduce.h"
#include "row_norm.h"
#include "softmax.h"

namespace kf {

// Without kernels a device stands for tracing: shapes and dtypes alone, and those of the norms only (operators/schemas.py has
// others).
struct Backend {
  c10::DispatchKey key;
  c10::DeviceType device;
  ForwardKernel* forward = nullptr;
  BackwardKernel* backward = nullptr;
  PointwiseKernel* pointwise = nullptr;
  PointwiseBwdKernel* pointwise_bwd = nullptr;
  PointwiseBwdColumnsKernel* pointwise_bwd_columns = nullptr;
  ReduceKernel* reduce = nullptr;
  SoftmaxKernel* softmax = nullptr;
  SoftmaxBwdKernel* softmax_bwd = nullptr;
};
inline constexpr Backend kCpu{c10::DispatchKey::CPU, c10::DeviceType::CPU, forward_cpu, backward_cpu, pointwise_cpu,
                              pointwise_bwd_cpu, pointwise_bwd_columns_cpu, reduce_cpu, softmax_cpu, softmax_bwd_cpu};
inline constexpr Backend kCuda{c10::DispatchKey::CUDA, c10::DeviceType::CUDA, forward_cuda, backward_cuda, pointwise_cuda,
                               pointwise_bwd_cuda, pointwise_bwd_columns_cuda, reduce_cuda, softmax_cuda, softmax_bwd_cuda};
inline constexpr Backend kMeta{c10::DispatchKey::Meta, c10::DeviceType::Meta};

}  // namespace kf
