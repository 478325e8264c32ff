// The devices: the kernels of each family on each of them, and when to call those kernels without the dispatcher.
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

// clang-format off
#define KF_KERNELS(X) \
  X(forward) X(backward) X(pointwise) X(pointwise_bwd) X(pointwise_bwd_columns) X(reduce) X(softmax) X(softmax_bwd) \
  X(rotary) X(rotary_bwd) X(quantize) X(quantized_row_norm) X(quantized_gate)
// clang-format on

// The kernels of a device. A backend without kernels serves tracing of the norms (operators/meta.py traces the others).
struct Backend {
  c10::DispatchKey key;
  c10::DeviceType device;
#define KF_FIELD(name) decltype(&name##_cpu) name = nullptr;
  KF_KERNELS(KF_FIELD)
#undef KF_FIELD
};

// The CPU's kernel. In a rehearsal it first asks the planner for CUDA's kernel, which is not launched.
template <auto cpu, auto cuda> struct Rehearsed;
template <class... Args, void (*cpu)(Args...), void (*cuda)(Args...)> struct Rehearsed<cpu, cuda> {
  static void run(Args... args) {
    if (rehearsing()) cuda(args...);
    cpu(args...);
  }
};
#define KF_ON_CPU(name) Rehearsed<&name##_cpu, &name##_cuda>::run,
#define KF_ON_CUDA(name) name##_cuda,
inline constexpr Backend kCpu{c10::DispatchKey::CPU, c10::DeviceType::CPU, KF_KERNELS(KF_ON_CPU)};
inline constexpr Backend kCuda{c10::DispatchKey::CUDA, c10::DeviceType::CUDA, KF_KERNELS(KF_ON_CUDA)};
#undef KF_ON_CPU
#undef KF_ON_CUDA
inline constexpr Backend kMeta{c10::DispatchKey::Meta, c10::DeviceType::Meta};

// The backend to call directly, if `keys` hold nothing except a device and autograd. It is null if something else must see the
// operators: a mode, a subclass, a transform, functionalisation or tracing.
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

// The dispatcher's keys for a backward call with these tensors. They must be all tensors that the call reads, because the
// dispatcher handles tensors whose values differ from their memory, such as negated views.
inline constexpr auto keys_of = [](const auto&... tensors) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (local.included_ | ... | key_set_of(tensors)) - local.excluded_;
};

}  // namespace kf
