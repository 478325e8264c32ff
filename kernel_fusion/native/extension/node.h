// Tools for the autograd of the verbs. A verb's node says what it keeps and how its gradients are computed. node.cpp puts the
// node into PyTorch's graph; only that file includes autograd's headers, which take seconds to compile. Nodes are made as
// PyTorch's generated code makes its own, and kernels are called without the dispatcher if nothing else needs to see the call,
// because torch::autograd::Function and the dispatcher take a large part of the time of a small call.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <string>

#include "backends.h"
#include "dispatch.h"

namespace kf {

using variable_list = std::vector<Tensor>;  // as in torch::autograd

// Whether a call needs the definition, because it is inside a torch.func transform or a tensor has a tangent.
inline bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
inline bool has_tangent(const OptionalTensor& t) { return t && has_tangent(*t); }
inline constexpr auto needs_definition = [](const auto&... tensors) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         (has_tangent(tensors) || ...);
};

// Whether a result that is computed from these tensors has a gradient.
inline bool has_gradient(const Tensor& t) { return t.defined() && t.requires_grad(); }
inline bool has_gradient(const OptionalTensor& t) { return t && has_gradient(*t); }
inline constexpr auto compute_requires_grad = [](const auto&... tensors) {
  return at::GradMode::is_enabled() && (has_gradient(tensors) || ...);
};

inline OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// Makes the derivatives of these gradients an error, which says that there is no `what`.
void refuse_derivatives(const variable_list& gradients, const std::string& what);

// The gradients of `results` with respect to `inputs`, as differentiable functions of everything.
variable_list differentiate(const variable_list& results, const variable_list& inputs, const variable_list& cotangents);
inline variable_list differentiate(const Tensor& y, const variable_list& inputs, const Tensor& dy) {
  return differentiate(variable_list{y}, inputs, variable_list{dy});
}

// The constants of a node as bytes. Compiled autograd takes nodes with equal keys for the same code.
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

class GraphNode;  // node.cpp

// The node of a verb: its constants, and its gradients as functions of saved tensors.
class SavingNode {
 public:
  virtual ~SavingNode() = default;
  virtual std::string name() const = 0;
  virtual std::string key() const = 0;  // key_of(everything except tensors that `gradients` depends on)
  virtual variable_list gradients(variable_list&& grads) = 0;
  // After set_history_of_norm: the gradients of h, weight and bias that come through y, those that are wanted.
  virtual variable_list through_y(const Tensor& dy, bool of_h, bool of_weight, bool of_bias);

 protected:
  Tensor saved(size_t place) const;  // a saved tensor, undefined if it was absent
  bool wants(size_t input) const;    // whether anybody needs the gradient of this input
  variable_list no_gradients() const;
  void be_history_of(const Tensor& stand_in) const;  // gives it the history of the node's first result

 private:
  friend class GraphNode;
  GraphNode* graph_ = nullptr;
};

struct TensorRef {
  const Tensor* tensor;  // null if the tensor is undefined
  TensorRef(const Tensor& t) : tensor(t.defined() ? &t : nullptr) {}
  TensorRef(const OptionalTensor& t) : tensor(present(t) ? &*t : nullptr) {}
};
using TensorRefs = c10::ArrayRef<TensorRef>;

// What a node saves of a tensor whose shape and dtype backward needs, but not its values: it may be written to meanwhile.
inline OptionalTensor unread(const OptionalTensor& t) {
  return present(t) ? OptionalTensor(t->variable_data().set_requires_grad(t->requires_grad())) : std::nullopt;
}

// Makes a node the history of `results`, and saves the tensors `saved`, which may include results.
void set_history(std::unique_ptr<SavingNode> node, TensorRefs inputs, TensorRefs results, TensorRefs saved);

// The same for results y and h, where y is computed from h, weight and bias, which are inputs 1 and 2: to users they come out
// of two nodes, so that the gradient of h includes what comes through y. The node itself gets that of y first, then that of h.
void set_history_of_norm(std::unique_ptr<SavingNode> node, TensorRefs inputs, const Tensor& y, const Tensor& h,
                         TensorRefs saved);

}  // namespace kf
