// The verbs' nodes in PyTorch's graph. Only this file includes the long headers of autograd and of compiled autograd.
#include "node.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
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
    check(grads);
    const std::lock_guard<std::mutex> lock(mutex_);  // another thread may release the variables meanwhile
    return node_->gradients(std::move(grads));
  }

  variable_list through_y(const variable_list& grads, bool of_h, bool of_weight, bool of_bias) {
    check(grads);
    const std::lock_guard<std::mutex> lock(mutex_);
    return node_->through_y(grads[0], of_h, of_weight, of_bias);
  }

  // Whether anybody but this node gets to see the gradients that arrive here: hooks, `retain_grad`, `autograd.grad`. While
  // torch.compile traces, each node has hooks of its own, which watch nothing.
  bool is_watched(const Tensor& grad) {
    if (!tensor_pre_hooks().empty() || !retains_grad_hooks().empty()) return true;
    if ((!pre_hooks().empty() || !post_hooks().empty()) && direct(keys_of(grad))) return true;
    const auto& tasks = *torch::autograd::get_current_graph_task_exec_info();  // empty if all of the graph runs
    const auto found = tasks.find(this);
    return found != tasks.end() && found->second.captures_;
  }

  // Compiled autograd traces `apply` with stand-ins for saved tensors; compiled_args identifies the graph.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (auto& each : const_cast<GraphNode*>(this)->saved_) args.collect(each.variable, each.is_result);
    args.collect(node_->key());
  }

  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    return with_saved(swap, [&] { return apply(variable_list(grads)); });
  }

  template <class Run> variable_list with_saved(torch::dynamo::autograd::SwapSavedVariables& swap, Run&& run) {
    for (auto& each : saved_) swap.before(each.variable);
    auto result = run();
    for (auto& each : saved_) swap.after(each.variable);
    return result;
  }

 private:
  static void check(const variable_list& grads) {
    if (!at::GradMode::is_enabled()) return;  // only the definition's operations check no memory
    for (const Tensor& grad : grads)
      if (direct(keys_of(grad))) check_memory(grad);
  }
};

namespace {

// The history of a y that a node has computed from its other result, h. It passes dy on to that node, which computes both
// gradients in one launch. Only where somebody watches the gradient of h, this one computes its part of it beforehand.
class ThroughNode : public torch::autograd::Node {
  enum { kH, kY, kWeight, kBias };  // edges; the first two lead to that node
  GraphNode& owner() const { return static_cast<GraphNode&>(*next_edge(kH).function); }

 public:
  using Node::Node;

  std::string name() const override { return "NormBackward"; }

  variable_list apply(variable_list&& grads) override {
    variable_list result(num_outputs());
    if (!grads[0].defined()) return result;
    if (!owner().is_watched(grads[0])) {
      result[kY] = std::move(grads[0]);
      return result;
    }
    auto found = owner().through_y(grads, task_should_compute_output(kH), task_should_compute_output(kWeight),
                                   task_should_compute_output(kBias));
    return {std::move(found[0]), Tensor(), std::move(found[1]), std::move(found[2])};
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const bool watched = owner().is_watched(Tensor());
    args.collect(watched);
    if (watched) owner().compiled_args(args);
  }

  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    const auto run = [&] { return apply(variable_list(grads)); };
    return owner().is_watched(Tensor()) ? owner().with_saved(swap, run) : run();
  }
};

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
variable_list SavingNode::through_y(const Tensor&, bool, bool, bool) { TORCH_INTERNAL_ASSERT(false, name()); }
void SavingNode::be_history_of(const Tensor& stand_in) const {
  torch::autograd::impl::set_gradient_edge(stand_in, {graph_->getptr(), 0});
}

namespace {

torch::autograd::edge_list edges_to(TensorRefs inputs) {
  torch::autograd::edge_list edges;
  edges.reserve(inputs.size());
  for (const auto& each : inputs)
    edges.push_back(each.tensor ? torch::autograd::impl::gradient_edge(*each.tensor) : torch::autograd::Edge());
  return edges;
}

}  // namespace

void set_history(std::unique_ptr<SavingNode> node, TensorRefs inputs, TensorRefs results, TensorRefs saved) {
  const auto graph = new_node<GraphNode>(edges_to(inputs), std::move(node));
  for (const auto& each : results) torch::autograd::set_history(*each.tensor, graph);
  graph->save(saved, results);
}

void set_history_of_norm(std::unique_ptr<SavingNode> node, TensorRefs inputs, const Tensor& y, const Tensor& h,
                         TensorRefs saved) {
  const auto graph = new_node<GraphNode>(edges_to(inputs), std::move(node));
  graph->add_input_metadata(y);
  torch::autograd::set_history(h, graph);
  graph->save(saved, {TensorRef(h)});
  auto edges = edges_to({TensorRef(h), TensorRef(h), inputs[1], inputs[2]});
  edges[1].input_nr = 0;
  torch::autograd::set_history(y, new_node<ThroughNode>(std::move(edges)));
}

void refuse_derivatives(const variable_list& gradients, const std::string& what) {
  for (const Tensor& each : gradients)
    if (each.defined())
      torch::autograd::set_history(
          each, new_node<torch::autograd::Error>("kernel_fusion: there are no " + what, torch::autograd::edge_list()));
}

variable_list differentiate(const variable_list& results, const variable_list& inputs, const variable_list& cotangents) {
  return torch::autograd::grad(results, inputs, cotangents, /*retain_graph=*/true, /*create_graph=*/true);
}

}  // namespace kf
