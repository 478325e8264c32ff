// What the autograd of the verbs is written with. Nodes are written as PyTorch generates its own, and kernels are called
// without the dispatcher where nothing else listens: with torch::autograd::Function and the dispatcher a training forward of
// 1x64 took 10.0 µs instead of 7.1 (layer_norm, AMD EPYC).
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <mutex>

#include "backends.h"

namespace kf {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Whether the call is inside a transform of torch.func, or has tangents: then the definition serves it, through which they see.
template <class... Tensors> bool needs_definition(const Tensors&... tensors) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         (torch::autograd::isFwGradDefined(tensors) || ...);
}

inline OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// The gradients of y with respect to `inputs` as differentiable functions of everything.
inline variable_list differentiate(const Tensor& y, const variable_list& inputs, const Tensor& dy) {
  return torch::autograd::grad({y}, inputs, {dy}, /*retain_graph=*/true, /*create_graph=*/true);
}

// PyTorch 2.13 counts a node's references in the node, 2.11 in a shared_ptr.
template <class T, class... Args> auto new_node(const Args&... args) {
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<Node>>)
    return std::shared_ptr<T>(new T(args...), [](T* node) { deleteNode(node); });  // without recursion in a deep graph
  else return c10::make_intrusive<T>(args...);
}

// A node whose saved variables Derived::each_saved(f) hands to f, and whose backward is Derived::gradients(grads).
template <class Derived> struct SavingNode : Node {
  using Node::Node;

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    self().each_saved([](SavedVariable& saved) { saved.reset_data(); });
  }

  variable_list apply(variable_list&& grads) override {
    if (at::GradMode::is_enabled())  // the definition's operations look at no memory
      for (const Tensor& grad : grads)
        if (direct(keys_of(grad))) check_memory(grad);
    const std::lock_guard<std::mutex> lock(mutex_);  // another thread may release the variables
    return self().gradients(std::move(grads));
  }

  // Compiled autograd traces `apply` with stand-ins for the saved tensors; compiled_args identifies the graph.
  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    self().each_saved([&](SavedVariable& saved) { swap.before(saved); });
    auto result = apply(variable_list(grads));
    self().each_saved([&](SavedVariable& saved) { swap.after(saved); });
    return result;
  }

 private:
  Derived& self() { return static_cast<Derived&>(*this); }
};

}  // namespace kf
