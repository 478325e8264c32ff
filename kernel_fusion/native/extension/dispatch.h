// Calls and implements operators through stacks of boxed values, as Python does. Only dispatch.cpp includes the headers of the
// dispatcher and of its values. Those headers, and PyTorch's own templates for typed functions, take seconds to compile.
#pragma once

#include <array>
#include <initializer_list>
#include <tuple>
#include <utility>
#include <vector>

#include "operators.h"
#include "schemas.h"

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

// The operator of this full name, and kernel_fusion::`name``suffix`.
const c10::OperatorHandle& any_op(const char* full);
const c10::OperatorHandle& find_op(std::string_view name, std::string_view suffix = "");
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

// Calls an operator that has the arguments and results of this call.
template <class Call>
typename Call::Result call_boxed(const c10::OperatorHandle& op, const Call& call,
                                 std::optional<c10::DispatchKeySet> keys = std::nullopt) {
  return call.arguments([&](const auto&... args) {
    const NewStack stack(sizeof...(args));
    (push(*stack, args), ...);
    invoke(op, keys, *stack);
    return Results<typename Call::Result>::taken_from(*stack);
  });
}

// The operator of a call, and its definition, which is an operator too.
template <class Call> const c10::OperatorHandle& operator_of() {
  static const auto& op = find_op(Call::kName);
  return op;
}
template <class Call> typename Call::Result reference(const Call& call) {
  static const auto& op = find_op(Call::kName, "_reference");
  return call_boxed(op, call);
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

// Makes a call of boxed arguments, and calls body(site, call), where `site` is a backend or dispatch keys.
template <auto body> struct Boxed;
template <class Where, class Result, class Call, Result (*body)(Where, const Call&)> struct Boxed<body> {
  static void kernel(const Site& site, Stack& stack) {
    using Arguments = decltype(std::declval<const Call&>().arguments(types_of));
    const Result result = run(site, stack, Arguments{});
    drop(stack, Arguments::kCount);
    Results<Result>::push_to(stack, result);
  }

 private:
  static constexpr auto types_of = [](const auto&... args) { return Types<std::decay_t<decltype(args)>...>{}; };
  template <class... Args> static Result run(const Site& site, Stack& stack, Types<Args...>) {
    size_t place = sizeof...(Args) + 1;
    const std::tuple<Held<Args>...> held{take<Held<Args>>(stack, --place)...};
    return std::apply([&](const auto&... args) { return body(site, Call{args...}); }, held);
  }
};

// A global of this type implements an operator when the library is opened.
struct Implements {
  Implements(const char* op, std::initializer_list<const Backend*> backends, Kernel* kernel);
  Implements(const char* op, std::initializer_list<c10::DispatchKey> keys, Kernel* kernel);
};

// The autograd keys by name, because Python's stubs occupy the alias `Autograd` (operators/stubs.py).
#define KF_AUTOGRAD_KEYS {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutogradMeta}

}  // namespace kf
