// Boxed values, and the operators and their kernels in PyTorch's dispatcher. Only this file includes its long headers.
#include "dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <map>
#include <sstream>
#include <string>

#include "backends.h"

namespace kf {

template <class T> T take(Stack& stack, size_t place) { return std::move(torch::jit::peek(stack, 0, place)).template to<T>(); }
template <class T> void push(Stack& stack, const T& value) { stack.emplace_back(value); }
void drop(Stack& stack, size_t count) { torch::jit::drop(stack, count); }

#define KF_VALUE(...)                                    \
  template __VA_ARGS__ take(Stack& stack, size_t place); \
  template void push(Stack& stack, const __VA_ARGS__& value);
KF_VALUE(Tensor)
KF_VALUE(OptionalTensor)
KF_VALUE(bool)
KF_VALUE(int64_t)
KF_VALUE(double)
KF_VALUE(std::optional<double>)
KF_VALUE(std::string_view)
KF_VALUE(at::ScalarType)
KF_VALUE(OptionalDtype)
KF_VALUE(std::array<bool, 2>)
KF_VALUE(std::array<bool, 4>)
KF_VALUE(std::array<bool, 5>)
KF_VALUE(std::array<bool, 6>)
#undef KF_VALUE
template std::vector<int64_t> take(Stack& stack, size_t place);
template void push(Stack& stack, const at::IntArrayRef& value);

const c10::OperatorHandle& any_op(const char* full) {
  return *new c10::OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow(full, ""));  // kept for ever
}
const c10::OperatorHandle& find_op(std::string_view name, std::string_view suffix) {
  return any_op(("kernel_fusion::" + std::string(name) + std::string(suffix)).c_str());
}
bool has_kernel(const char* name, c10::DispatchKey key) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").hasKernelForDispatchKey(key);
}

NewStack::NewStack(size_t capacity) : stack_(new Stack) { stack_->reserve(capacity); }
NewStack::~NewStack() { delete stack_; }

void invoke(const c10::OperatorHandle& op, std::optional<c10::DispatchKeySet> keys, Stack& stack) {
  if (keys) op.redispatchBoxed(*keys, &stack);
  else op.callBoxed(stack);
}

namespace {

struct Functor : c10::OperatorKernel {
  Kernel* const kernel;
  const Backend* const backend;

  Functor(Kernel* kernel, const Backend* backend) : kernel(kernel), backend(backend) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) { kernel({backend, keys}, *stack); }
};

std::map<c10::DispatchKey, torch::Library>& libraries() {
  static std::map<c10::DispatchKey, torch::Library> by_key;
  return by_key;
}

void implement(const char* op, c10::DispatchKey key, Kernel* kernel, const Backend* backend) {
  auto& library = libraries().try_emplace(key, torch::Library::IMPL, "kernel_fusion", key, __FILE__, __LINE__).first->second;
  library.impl(op, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Functor>(kernel, backend)));
}

// Defines the operators in C++ programs that open this library to run an AOTInductor package. `import kernel_fusion` defines
// them first, because an operator cannot be defined twice.
torch::Library* defined() {
  if (c10::Dispatcher::singleton().findSchema({"kernel_fusion::layer_norm", ""})) return nullptr;
  static torch::Library library(torch::Library::FRAGMENT, "kernel_fusion", std::nullopt, __FILE__, __LINE__);
  std::istringstream schemas(kSchemas);
  for (std::string schema; std::getline(schemas, schema);) {
    if (!schema.empty()) library.def(torch::schema(schema.c_str()), {at::Tag::pt2_compliant_tag});
  }
  return &library;
}

const auto* const library = defined();

}  // namespace

Implements::Implements(const char* op, std::initializer_list<const Backend*> backends, Kernel* kernel) {
  for (const auto* backend : backends) implement(op, backend->key, kernel, backend);
}

Implements::Implements(const char* op, std::initializer_list<c10::DispatchKey> keys, Kernel* kernel) {
  for (const auto key : keys) implement(op, key, kernel, nullptr);
}

}  // namespace kf

// Takes this library's kernels out of the dispatcher, so that another one can put its own there.
extern "C" __attribute__((visibility("default"))) void kf_withdraw() { kf::libraries().clear(); }
