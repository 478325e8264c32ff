// The devices: the kernels of each family, and when to call them without the dispatcher.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "pointwise.h"
#include "quantize.h"
#include "reduce.h"
#include "rotary.h"
#include "row_norm.h"
#include "softmax.h"

namespace kf {

// A device without kernels stands for tracing, of the norms only (operators/meta.py has the others).
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
  RotaryKernel* rotary = nullptr;
  RotaryBwdKernel* rotary_bwd = nullptr;
  QuantizeKernel* quantize = nullptr;
  QuantizedNormKernel* quantized_row_norm = nullptr;
  QuantizedGateKernel* quantized_gate = nullptr;
};
// The CPU's kernel; in a rehearsal CUDA's is looked for before.
template <auto cpu, auto cuda> struct Rehearsed;
template <class... Args, void (*cpu)(Args...), void (*cuda)(Args...)> struct Rehearsed<cpu, cuda> {
  static void run(Args... args) {
    if (rehearsing()) cuda(args...);
    cpu(args...);
  }
};
inline constexpr Backend kCpu{c10::DispatchKey::CPU,
                              c10::DeviceType::CPU,
                              Rehearsed<&forward_cpu, &forward_cuda>::run,
                              Rehearsed<&backward_cpu, &backward_cuda>::run,
                              Rehearsed<&pointwise_cpu, &pointwise_cuda>::run,
                              Rehearsed<&pointwise_bwd_cpu, &pointwise_bwd_cuda>::run,
                              Rehearsed<&pointwise_bwd_columns_cpu, &pointwise_bwd_columns_cuda>::run,
                              Rehearsed<&reduce_cpu, &reduce_cuda>::run,
                              Rehearsed<&softmax_cpu, &softmax_cuda>::run,
                              Rehearsed<&softmax_bwd_cpu, &softmax_bwd_cuda>::run,
                              Rehearsed<&rotary_cpu, &rotary_cuda>::run,
                              Rehearsed<&rotary_bwd_cpu, &rotary_bwd_cuda>::run,
                              Rehearsed<&quantize_cpu, &quantize_cuda>::run,
                              Rehearsed<&quantized_row_norm_cpu, &quantized_row_norm_cuda>::run,
                              Rehearsed<&quantized_gate_cpu, &quantized_gate_cuda>::run};
// clang-format off
inline constexpr Backend kCuda{c10::DispatchKey::CUDA, c10::DeviceType::CUDA, forward_cuda, backward_cuda, pointwise_cuda,
                               pointwise_bwd_cuda, pointwise_bwd_columns_cuda, reduce_cuda, softmax_cuda, softmax_bwd_cuda,
                               rotary_cuda, rotary_bwd_cuda, quantize_cuda, quantized_row_norm_cuda, quantized_gate_cuda};
inline constexpr Backend kMeta{c10::DispatchKey::Meta, c10::DeviceType::Meta};
// clang-format on

// The backend to call directly, if `keys` hold only a device, and autograd. Null if something else must see the operators: a
// mode, a subclass, a transform, functionalisation, tracing.
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

// The keys of a call with these tensors in a backward, which must cover all that it reads: the dispatcher handles tensors that
// differ from their memory, such as negated views.
inline constexpr auto keys_of = [](const auto&... tensors) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (local.included_ | ... | key_set_of(tensors)) - local.excluded_;
};

}  // namespace kf
