// The devices: which kernels of each family they have, and when these are called without the dispatcher.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "pointwise.h"
#include "reduce.h"
#include "row_norm.h"
#include "softmax.h"

namespace kf {

// Without kernels a device stands for tracing: shapes and dtypes alone, and those of the norms only (operators/meta.py has
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
// clang-format off
inline constexpr Backend kCpu{c10::DispatchKey::CPU, c10::DeviceType::CPU, forward_cpu, backward_cpu, pointwise_cpu,
                              pointwise_bwd_cpu, pointwise_bwd_columns_cpu, reduce_cpu, softmax_cpu, softmax_bwd_cpu};
inline constexpr Backend kCuda{c10::DispatchKey::CUDA, c10::DeviceType::CUDA, forward_cuda, backward_cuda, pointwise_cuda,
                               pointwise_bwd_cuda, pointwise_bwd_columns_cuda, reduce_cuda, softmax_cuda, softmax_bwd_cuda};
inline constexpr Backend kMeta{c10::DispatchKey::Meta, c10::DeviceType::Meta};
// clang-format on

// The backend to call directly, where `keys` hold nothing but a device that the dispatcher would stop at, autograd aside. Null
// where something else must see the operators: a mode, a subclass, a transform, functionalisation, tracing.
inline const Backend* direct(c10::DispatchKeySet keys) {
  constexpr auto passed = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
                          c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  switch ((keys - passed).highestPriorityTypeId()) {
    case c10::DispatchKey::CPU: return &kCpu;
    case c10::DispatchKey::CUDA: return &kCuda;
    default: return nullptr;
  }
}

inline c10::DispatchKeySet key_set_of(const Tensor& t) { return t.defined() ? t.key_set() : c10::DispatchKeySet(); }
inline c10::DispatchKeySet key_set_of(const OptionalTensor& t) { return t ? key_set_of(*t) : c10::DispatchKeySet(); }

// The keys that a call with these tensors would have, in a backward: of all that it reads, since the dispatcher knows what to
// do with those whose memory is not what they stand for, such as views that negate.
inline constexpr auto keys_of = [](const auto&... tensors) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (local.included_ | ... | key_set_of(tensors)) - local.excluded_;
};

}  // namespace kf
