// The way of every operator from PyTorch's dispatcher to the kernels. An operator is a call, a struct of schemas.h, and
// functions of the call, which its own file defines in namespace kf:
//
//     Result compute(const Backend&, const Call&)                by the kernels of a device
//
// and for a verb, an operator that public functions call:
//
//     bool accepts(const Call&)                                  whether the kernels take it; else the definition serves it, or
//                                                                says what is wrong (backends/eager)
//     Result record(c10::DispatchKeySet, const Call&)            the same as `below_autograd`, with a node in the graph
//
// A global `Verb<Call>` or `Part<Call>` then registers the operator for all dispatch keys.
#pragma once

#include "node.h"

namespace kf {

// Serves a call that the kernels do not take.
template <class Call> typename Call::Result without_kernels(const Call& call) { return reference(call); }

// Computes at once or, if something else must see the operator, through the dispatcher.
template <class Call> typename Call::Result compute_by(c10::DispatchKeySet keys, const Call& call) {
  const auto* backend = direct(keys);
  return backend ? compute(*backend, call) : call_boxed(operator_of<Call>(), call);
}
template <class Call> typename Call::Result below_autograd(c10::DispatchKeySet keys, const Call& call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return compute_by(keys, call);
}

// The operator is not differentiated: kernels of its own serve backward passes.
template <class Call> struct Part {
  static typename Call::Result at_device(const Backend& backend, const Call& call) { return compute(backend, call); }
  const Implements at_devices{Call::kName, {&kCpu, &kCuda}, Boxed<at_device>::kernel};
};

template <class Call> struct Verb {
  static typename Call::Result at_device(const Backend& backend, const Call& call) {
    return accepts(call) ? compute(backend, call) : without_kernels(call);
  }
  static typename Call::Result above_devices(c10::DispatchKeySet keys, const Call& call) {
    if (call.tensors(needs_definition) || !accepts(call)) return without_kernels(call);
    return call.tensors(compute_requires_grad) ? record(keys, call) : below_autograd(keys, call);
  }
  const Implements at_devices{Call::kName, {&kCpu, &kCuda}, Boxed<at_device>::kernel};
  const Implements at_autograd{Call::kName, KF_AUTOGRAD_KEYS, Boxed<above_devices>::kernel};
};

}  // namespace kf
