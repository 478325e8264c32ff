// Nodes that save variables. Only this file includes compiled autograd's long headers.
#include "node.h"

#include <torch/csrc/dynamo/compiled_autograd.h>

namespace kf {

void SavingNode::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Saved& each : saved()) each.variable->reset_data();
}

variable_list SavingNode::apply(variable_list&& grads) {
  if (at::GradMode::is_enabled())  // the definition's operations check no memory
    for (const Tensor& grad : grads)
      if (direct(keys_of(grad))) check_memory(grad);
  const std::lock_guard<std::mutex> lock(mutex_);  // another thread may release the variables
  return gradients(std::move(grads));
}

// Compiled autograd traces `apply` with stand-ins for saved tensors; compiled_args identifies the graph.
void SavingNode::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  for (const Saved& each : const_cast<SavingNode*>(this)->saved()) args.collect(*each.variable, each.is_output);
  args.collect(key());
}

variable_list SavingNode::apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) {
  for (const Saved& each : saved()) swap.before(*each.variable);
  auto result = apply(variable_list(grads));
  for (const Saved& each : saved()) swap.after(*each.variable);
  return result;
}

}  // namespace kf
