// Tools for the autograd of the verbs. Nodes are written as PyTorch generates its own, and kernels skip the dispatcher if
// nothing else listens: torch::autograd::Function and the dispatcher cost small calls much of their time.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <string>

#include "backends.h"
#include "dispatch.h"

namespace kf {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Whether the call is inside a torch.func transform, or has tangents: then the definition serves it.
template <class... Tensors> bool needs_definition(const Tensors&... tensors) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         (torch::autograd::isFwGradDefined(tensors) || ...);
}

inline OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// The gradients of y with respect to `inputs`, as differentiable functions of everything.
inline variable_list differentiate(const Tensor& y, const variable_list& inputs, const Tensor& dy) {
  return torch::autograd::grad({y}, inputs, {dy}, /*retain_graph=*/true, /*create_graph=*/true);
}

// PyTorch 2.13 counts a node's references in the node, 2.11 in a shared_ptr.
template <class T, class... Args> auto new_node(const Args&... args) {
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<Node>>)
    return std::shared_ptr<T>(new T(args...), [](T* node) { deleteNode(node); });  // without recursion in a deep graph
  else return c10::make_intrusive<T>(args...);
}

// A node's constants as bytes: nodes of one key run the same code.
template <class... T> std::string key_of(const T&... values) {
  std::string key;
  const auto add = [&](const auto& value) {
    if constexpr (requires { value.data(); })
      key.append(reinterpret_cast<const char*>(value.data()), value.size() * sizeof *value.data()).push_back(';');
    else key.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  (add(values), ...);
  return key;
}

// A node that saves variables: it locks and releases them, and shows them to compiled autograd.
struct SavingNode : Node {
  struct Saved {
    SavedVariable* variable;
    bool is_output = false;  // a result of this node
  };
  using SavedList = c10::SmallVector<Saved, 8>;
  using Node::Node;

  virtual SavedList saved() = 0;
  virtual std::string key() const = 0;  // key_of(everything else that `gradients` depends on)
  virtual variable_list gradients(variable_list&& grads) = 0;

  void release_variables() final;
  variable_list apply(variable_list&& grads) final;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const final;
  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) final;
};

}  // namespace kf
