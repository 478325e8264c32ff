// Operators and PyTorch's dispatcher: calling one, and implementing one.
#pragma once

#include <torch/library.h>

#include "operators.h"

namespace kf {

// A function `make` makes a call, one object, from an operator's arguments, whose list and types are nowhere else.
// The operator `name`, which returns `Result` and takes the arguments of `make`.
template <class Result, class Call, class... Args> auto find_op(const char* name, Call (*)(Args...)) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Args...)>();
}

// Calls it with the arguments that make this call.
template <class Op, class Call> auto call_operator(const Op& op, const Call& call) {
  return with_arguments(call, [&](const auto&... args) { return op.call(args...); });
}

// The implementation of an operator: body(make(its arguments)); at autograd with the dispatcher's keys before.
template <auto make, auto body> struct Implementation;
template <class Call, class... Args, Call (*make)(Args...), auto body> struct Implementation<make, body> {
  static auto run(Args... args) { return body(make(args...)); }
  static auto autograd(c10::DispatchKeySet keys, Args... args) { return body(keys, make(args...)); }
};

}  // namespace kf
