// Calls and implements operators.
#pragma once

#include <torch/library.h>

#include "operators.h"

namespace kf {

inline c10::OperatorHandle find_op(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

// Through a stack, because Python mostly serves such calls; a typed handle compiles for half a second.
template <class Result, class... Args> Result call_boxed(const c10::OperatorHandle& op, const Args&... args) {
  torch::jit::Stack stack;
  stack.reserve(sizeof...(args));
  (stack.emplace_back(args), ...);
  op.callBoxed(stack);
  return c10::impl::PopResult<Result>::call(stack);
}

// Calls it with the arguments that make this call.
template <class Result, class Call> Result call_operator(const c10::OperatorHandle& op, const Call& call) {
  return with_arguments(call, [&](const auto&... args) { return call_boxed<Result>(op, args...); });
}

// The implementation of an operator: body(make(its arguments)); at autograd with the dispatcher's keys before. `make` makes
// a call, one object, from the arguments.
template <auto make, auto body> struct Implementation;
template <class Call, class... Args, Call (*make)(Args...), auto body> struct Implementation<make, body> {
  static auto run(Args... args) { return body(make(args...)); }
  static auto autograd(c10::DispatchKeySet keys, Args... args) { return body(keys, make(args...)); }
};

}  // namespace kf
