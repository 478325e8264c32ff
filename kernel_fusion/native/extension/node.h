// Tools for the autograd of the verbs. A verb's node says what it keeps and what its gradients are; node.cpp puts it into
// PyTorch's graph, and alone includes autograd's headers, which compile for seconds. Nodes are as PyTorch generates its own,
// and kernels skip the dispatcher if nothing else listens: torch::autograd::Function and the dispatcher cost small calls much
// time.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <string>

#include "backends.h"
#include "dispatch.h"

namespace kf {

using variable_list = std::vector<Tensor>;  // as in torch::autograd

// Whether the call is inside a torch.func transform, or has tangents: then the definition serves it.
inline bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
inline bool has_tangent(const OptionalTensor& t) { return t && has_tangent(*t); }
template <class... Tensors> bool needs_definition(const Tensors&... tensors) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         (has_tangent(tensors) || ...);
}

// Whether a result of these has a gradient.
inline bool has_gradient(const Tensor& t) { return t.defined() && t.requires_grad(); }
inline bool has_gradient(const OptionalTensor& t) { return t && has_gradient(*t); }
template <class... Tensors> bool compute_requires_grad(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (has_gradient(tensors) || ...);
}

inline OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// The gradients of `results` with respect to `inputs`, as differentiable functions of everything.
variable_list differentiate(const variable_list& results, const variable_list& inputs, const variable_list& cotangents);
inline variable_list differentiate(const Tensor& y, const variable_list& inputs, const Tensor& dy) {
  return differentiate(variable_list{y}, inputs, variable_list{dy});
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

class GraphNode;  // node.cpp

// A verb's node: constants, and gradients that are computed from saved tensors.
class SavingNode {
 public:
  virtual ~SavingNode() = default;
  virtual std::string name() const = 0;
  virtual std::string key() const = 0;  // key_of(everything else that `gradients` depends on)
  virtual variable_list gradients(variable_list&& grads) = 0;

 protected:
  Tensor saved(size_t place) const;  // undefined if absent
  bool wants(size_t input) const;    // whether somebody needs its gradient
  variable_list no_gradients() const;
  void be_history_of(const Tensor& stand_in) const;  // of the first result

 private:
  friend class GraphNode;
  GraphNode* graph_ = nullptr;
};

struct TensorRef {
  const Tensor* tensor;  // null if absent
  TensorRef(const Tensor& t) : tensor(t.defined() ? &t : nullptr) {}
  TensorRef(const OptionalTensor& t) : tensor(present(t) ? &*t : nullptr) {}
};
using TensorRefs = c10::ArrayRef<TensorRef>;

// Makes a node the history of `results`, which may be saved.
void set_history(std::unique_ptr<SavingNode> node, TensorRefs inputs, TensorRefs results, TensorRefs saved);

}  // namespace kf
