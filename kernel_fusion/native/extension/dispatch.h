// Calls and implements operators through stacks of boxed values, as Python does. Only dispatch.cpp includes the headers of the
// dispatcher and of its values. Those headers, and PyTorch's own templates for typed functions, take seconds to compile.
#pragma once

#include <array>
#include <initializer_list>
#include <tuple>
#include <utility>
#include <vector>

#include "operators.h"

namespace c10 {
struct IValue;
class OperatorHandle;
}  // namespace c10

namespace kf {

using Stack = std::vector<c10::IValue>;

// ---- Values: those of types that dispatch.cpp lists -----------------------------------------------------------------------

// Moves out the value that lies `place` places from the stack's end.
template <class T> T take(Stack& stack, size_t place);
template <class T> void push(Stack& stack, const T& value);
void drop(Stack& stack, size_t count);

// The type that holds an argument of type T during a call.
template <class T> struct HeldAs {
  using type = std::decay_t<T>;
};
template <> struct HeldAs<at::IntArrayRef> {
  using type = std::vector<int64_t>;
};
template <class T> using Held = typename HeldAs<T>::type;

template <class Result> struct Results {
  static constexpr size_t kCount = 1;
  static void push_to(Stack& stack, const Result& result) { push(stack, result); }
  static Result taken_from(Stack& stack) { return take<Result>(stack, 1); }
};
template <class... Each> struct Results<std::tuple<Each...>> {
  static constexpr size_t kCount = sizeof...(Each);
  static void push_to(Stack& stack, const std::tuple<Each...>& result) {
    std::apply([&](const auto&... each) { (push(stack, each), ...); }, result);
  }
  static std::tuple<Each...> taken_from(Stack& stack) {
    size_t place = kCount + 1;
    return {take<Each>(stack, --place)...};
  }
};

// ---- Calls ----------------------------------------------------------------------------------------------------------------

const c10::OperatorHandle& find_op(const char* name);
bool has_kernel(const char* name, c10::DispatchKey key);

class NewStack {
  Stack* const stack_;

 public:
  explicit NewStack(size_t capacity);
  ~NewStack();
  NewStack(const NewStack&) = delete;
  Stack& operator*() const { return *stack_; }
};

// Calls the kernel for these dispatch keys or, without keys, the kernel for the arguments.
void invoke(const c10::OperatorHandle& op, std::optional<c10::DispatchKeySet> keys, Stack& stack);

template <class Result, class... Args>
Result redispatch_boxed(const c10::OperatorHandle& op, std::optional<c10::DispatchKeySet> keys, const Args&... args) {
  const NewStack stack(sizeof...(args));
  (push(*stack, args), ...);
  invoke(op, keys, *stack);
  return Results<Result>::taken_from(*stack);
}
template <class Result, class... Args> Result call_boxed(const c10::OperatorHandle& op, const Args&... args) {
  return redispatch_boxed<Result>(op, std::nullopt, args...);
}

// Calls an operator with the arguments that make this call.
template <class Result, class Call> Result call_operator(const c10::OperatorHandle& op, const Call& call) {
  return with_arguments(call, [&](const auto&... args) { return call_boxed<Result>(op, args...); });
}

// ---- Implementations ------------------------------------------------------------------------------------------------------

// Where the dispatcher calls an implementation: for one backend, or above all backends, where it passes its keys.
struct Site {
  const Backend* backend;
  c10::DispatchKeySet keys;
  operator const Backend&() const { return *backend; }
  operator c10::DispatchKeySet() const { return keys; }
};
using Kernel = void(const Site& site, Stack& stack);

// Unboxes the arguments of `function`, and calls function(site, arguments...), where `site` is a backend or dispatch keys.
template <auto function> struct Boxed;
template <class Where, class Result, class... Args, Result (*function)(Where, Args...)> struct Boxed<function> {
  static void kernel(const Site& site, Stack& stack) {
    constexpr size_t kCount = sizeof...(Args);
    const Result result = [&] {
      size_t place = kCount + 1;
      std::tuple<Held<Args>...> held{take<Held<Args>>(stack, --place)...};
      return std::apply([&](const auto&... args) { return function(site, args...); }, held);
    }();
    drop(stack, kCount);
    Results<Result>::push_to(stack, result);
  }
};

// The same for body(site, call). `make` makes `call`, one object, from the arguments.
template <auto make, auto body> struct Implementation;
template <class Call, class... Args, Call (*make)(Args...), class Where, class Result, Result (*body)(Where, const Call&)>
struct Implementation<make, body> {
  static Result run(Where where, Args... args) { return body(where, make(args...)); }
  static constexpr Kernel* kernel = &Boxed<&run>::kernel;
};

// A global of this type implements an operator when the library is opened.
struct Implements {
  Implements(const char* op, std::initializer_list<const Backend*> backends, Kernel* kernel);
  Implements(const char* op, std::initializer_list<c10::DispatchKey> keys, Kernel* kernel);
};

// The autograd keys by name, because Python's stubs occupy the alias `Autograd` (operators/stubs.py).
#define KF_AUTOGRAD_KEYS {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutogradMeta}

}  // namespace kf
