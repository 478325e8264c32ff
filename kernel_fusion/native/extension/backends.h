// The devices, the kernels of an operation on each of them, and when to call those without the dispatcher.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "operators.h"

namespace kf {

struct Backend {
  c10::DispatchKey key;
  c10::DeviceType device;
  bool has_kernels = true;  // the one without serves tracing of the norms (operators/meta.py traces the others)
};
inline constexpr Backend kCpu{c10::DispatchKey::CPU, c10::DeviceType::CPU};
inline constexpr Backend kCuda{c10::DispatchKey::CUDA, c10::DeviceType::CUDA};
inline constexpr Backend kMeta{c10::DispatchKey::Meta, c10::DeviceType::Meta, false};

// The functions that launch one kind of kernel. In a rehearsal the CPU's call first asks the planner for the kernel that CUDA
// would launch, which is not launched.
template <class... Args> struct Kernels {
  void (*const cpu)(Args...);
  void (*const cuda)(Args...);

  constexpr Kernels(void (*cpu)(Args...), void (*cuda)(Args...)) : cpu(cpu), cuda(cuda) {}
  void operator()(const Backend& backend, Args... args) const {
    const bool on_cpu = backend.device == c10::DeviceType::CPU;
    if (!on_cpu || rehearsing()) cuda(args...);
    if (on_cpu) cpu(args...);
  }
};

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
