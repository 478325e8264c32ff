// The verbs' nodes in PyTorch's graph. Only this file includes the long headers of autograd and of compiled autograd.
#include "node.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <mutex>

namespace kf {

// PyTorch's side of a verb's node. It locks and releases the saved variables, and shows them to compiled autograd.
class GraphNode : public torch::autograd::Node {
  struct Saved {
    torch::autograd::SavedVariable variable;
    bool is_result = false;  // the variable is a result of this node
  };
  const std::unique_ptr<SavingNode> node_;
  c10::SmallVector<Saved, 8> saved_;

 public:
  GraphNode(torch::autograd::edge_list&& edges, std::unique_ptr<SavingNode> node)
      : Node(std::move(edges)), node_(std::move(node)) {
    node_->graph_ = this;
  }

  // Saves variables. It is called after the results have their history, because results may be saved too.
  void save(TensorRefs tensors, TensorRefs results) {
    for (const auto& each : tensors) {
      if (!each.tensor) {
        saved_.emplace_back();
        continue;
      }
      bool is_result = false;
      for (const auto& result : results) is_result |= each.tensor->is_same(*result.tensor);
      saved_.push_back({torch::autograd::SavedVariable(*each.tensor, is_result), is_result});
    }
  }

  Tensor unpack(size_t place) {
    auto& [variable, is_result] = saved_[place];
    return is_result ? variable.unpack(getptr()) : variable.unpack();
  }

  std::string name() const override { return node_->name(); }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : saved_) each.variable.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    if (at::GradMode::is_enabled())  // the definition's operations check no memory
      for (const Tensor& grad : grads)
        if (direct(keys_of(grad))) check_memory(grad);
    const std::lock_guard<std::mutex> lock(mutex_);  // another thread may release the variables meanwhile
    return node_->gradients(std::move(grads));
  }

  // Compiled autograd traces `apply` with stand-ins for saved tensors; compiled_args identifies the graph.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (auto& each : const_cast<GraphNode*>(this)->saved_) args.collect(each.variable, each.is_result);
    args.collect(node_->key());
  }

  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    for (auto& each : saved_) swap.before(each.variable);
    auto result = apply(variable_list(grads));
    for (auto& each : saved_) swap.after(each.variable);
    return result;
  }
};

namespace {

// PyTorch 2.13 counts a node's references in the node, 2.11 in a shared_ptr.
template <class T, class... Args> auto new_node(Args&&... args) {
  using torch::autograd::Node;
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<Node>>)
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...),
                              [](T* node) { deleteNode(node); });  // frees a deep graph without recursion
  else return c10::make_intrusive<T>(std::forward<Args>(args)...);
}

}  // namespace

Tensor SavingNode::saved(size_t place) const { return graph_->unpack(place); }
bool SavingNode::wants(size_t input) const { return graph_->task_should_compute_output(input); }
variable_list SavingNode::no_gradients() const { return variable_list(graph_->num_outputs()); }
void SavingNode::be_history_of(const Tensor& stand_in) const {
  torch::autograd::impl::set_gradient_edge(stand_in, {graph_->getptr(), 0});
}

void set_history(std::unique_ptr<SavingNode> node, TensorRefs inputs, TensorRefs results, TensorRefs saved) {
  torch::autograd::edge_list edges;
  edges.reserve(inputs.size());
  for (const auto& each : inputs)
    edges.push_back(each.tensor ? torch::autograd::impl::gradient_edge(*each.tensor) : torch::autograd::Edge());
  const auto graph = new_node<GraphNode>(std::move(edges), std::move(node));
  for (const auto& each : results) torch::autograd::set_history(*each.tensor, graph);
  graph->save(saved, results);
}

variable_list differentiate(const variable_list& results, const variable_list& inputs, const variable_list& cotangents) {
  return torch::autograd::grad(results, inputs, cotangents, /*retain_graph=*/true, /*create_graph=*/true);
}

}  // namespace kf
