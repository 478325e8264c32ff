// The autograd of pointwise chains: which calls the kernels take, and the backward node.
//
// As for the row norms (row_norm_autograd.cpp), the definition serves calls inside torch.func, with forward-mode tangents, and
// in differentiated backward passes.
#include <ATen/core/Tensor.h>
#include <ATen/ops/alias_ops.h>
#include <ATen/ops/arange_ops.h>
#include <c10/util/strides.h>

#include "pointwise.h"
#include "verb.h"

namespace kf {

PointwiseGradients pointwise_bwd(const PointwiseBwdCall& c) {
  const auto* backend = direct(c.tensors(keys_of));
  return backend ? pointwise_bwd(*backend, c) : call_boxed(operator_of<PointwiseBwdCall>(), c);
}

namespace {

// dy with y's strides. They were saved unless y was contiguous.
Tensor laid_out(const Tensor& dy, const std::vector<int64_t>& strides) {
  if (strides.empty()) return dy.contiguous();
  if (dy.strides().equals(strides)) return dy;
  return dy.new_empty_strided(dy.sizes(), strides).copy_(dy);
}

// dy with its dimensions in y's memory order, which at::empty_like(dy) shows; dy may be a part of a tensor, or expanded. It
// must not be called during tracing, where strides are symbols.
Tensor in_order(const Tensor& dy, const std::vector<int64_t>& strides) {
  if (dy.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || (strides.empty() && dy.is_contiguous()))
    return laid_out(dy, strides);
  const auto contiguous = c10::contiguous_strides(dy.sizes());
  const at::IntArrayRef of_y = strides.empty() ? at::IntArrayRef(contiguous) : strides;
  return of_y.equals(dense_strides(dy)) ? dy : laid_out(dy, strides);
}

// Whether both terms of a sum have the same gradient, in shape and dtype too.
bool shares_gradient(const PointwiseCall& c) {
  return c.combine == "add" && c.a.scalar_type() == c.b->scalar_type() && c.a.sym_sizes() == c.b->sym_sizes();
}

// The name of a function whose slope at y is the slope of `activation` where its value is y, or an empty name if y does not
// determine the slope. Only activations whose result PyTorch keeps too have one, because users change other results in place.
// A result that was rounded to fp16 or bf16 determines the slope inexactly. PyTorch accepts that, and so do we on the CPU,
// where computing the activation again takes several times as long as reading its result.
std::string_view of_result(std::string_view activation, const Tensor& operand) {
  if (activation == "relu") return activation;
  const auto type = operand.scalar_type();
  if (type != at::kFloat && type != at::kDouble && as_on_cuda(operand)) return {};
  return activation == "tanh" ? "from_tanh" : activation == "sigmoid" ? "from_sigmoid" : "";
}

// Whether b is a row that is broadcast to all rows of a.
bool adds_row(const PointwiseCall& c) {
  return c.combine == "add" && c.a.scalar_type() == c.b->scalar_type() && c.b->dim() == 1 && c.a.dim() > 1 &&
         c.b->sym_size(0) == c.a.sym_size(-1);
}

// Whether a call can write bits. They have one order, so all operands must have it, and the call must not be cut into parts
// (pointwise.h).
bool in_one_order(const PointwiseCall& c) {
  if (adds_row(c))
    return c.a.is_contiguous() && c.b->is_contiguous() &&
           TORCH_GUARD_OR_FALSE((c.a.sym_numel() * c.a.element_size()).sym_lt(int64_t{1} << 31));
  return c.a.is_non_overlapping_and_dense() && (c.combine == "first" || c.a.sym_strides() == c.b->sym_strides());
}

// What backward reads beside dy: the operands, or y, or one bit per element. With y or bits, b can only be a row whose gradient
// is a sum over rows.
enum class Kept : int64_t { kOperands, kResult, kBits };

Kept kept_of(const PointwiseCall& c) {
  if (present(c.seed) || c.scale != 1.0 || !(c.combine == "first" || shares_gradient(c) || adds_row(c))) return Kept::kOperands;
  if (has_bits(c) && in_one_order(c)) return Kept::kBits;
  return of_result(c.activation, c.a).empty() ? Kept::kOperands : Kept::kResult;
}

// The bits as numbers 1 and 0 with dy's layout. Their values determine the slopes as those of y would.
Tensor unpacked(const Tensor& bits, const Tensor& dy) {
  const Tensor places = at::_ops::arange::call(8, bits.scalar_type(), bits.layout(), bits.device(), /*pin_memory=*/false);
  const Tensor each = bits.unsqueeze(1).bitwise_right_shift(places).bitwise_and(1);
  return each.flatten().as_strided_symint(dy.sym_sizes(), dy.sym_strides()).to(dy.scalar_type());
}

struct PointwiseBackward : SavingNode {
  enum { kA, kB, kSeed };  // the place of a holds y or bits, if backward reads those
  const Kept kept;
  const bool shared, binary;
  const std::string_view combine, activation;  // views of the lists of names, because the call's own strings end with it
  const double scale, dropout_p;
  std::vector<int64_t> strides;  // y's strides if dropout or bits need them; empty if y was contiguous

  PointwiseBackward(const PointwiseCall& c, Kept kept, const Tensor& y)
      : kept(kept), shared(shares_gradient(c)), binary(present(c.b)),
        combine(kept == Kept::kOperands ? kCombineNames[static_cast<int32_t>(*combine_of(c.combine))] : "first"),
        activation(kActivationNames[activation_code(kept == Kept::kResult ? of_result(c.activation, c.a) : c.activation)]),
        scale(c.scale), dropout_p(c.dropout_p) {
    if ((present(c.seed) || kept == Kept::kBits) && !y.is_contiguous()) strides = y.strides().vec();
  }

  std::string name() const override { return "PointwiseBackward"; }

  std::string key() const override { return key_of(kept, shared, binary, combine, activation, scale, dropout_p, strides); }

  variable_list gradients(variable_list&& grads) override {
    variable_list result = no_gradients();
    if (!grads[0].defined()) return result;
    const Tensor first = saved(kA);
    const OptionalTensor second = optional(saved(kB)), dropout_seed = optional(saved(kSeed));
    const PointwiseCall call{first, second, combine, activation, scale, dropout_p, dropout_seed};
    const std::array<bool, 2> needs{wants(0), binary && wants(1)};
    auto [da, db] = at::GradMode::is_enabled() ? differentiable(call, grads[0], needs) : by_kernels(call, grads[0], needs);
    if (needs[0]) result[0] = da;
    if (needs[1]) result[1] = shared ? da : db;
    return result;
  }

  PointwiseGradients by_kernels(const PointwiseCall& c, const Tensor& dy, std::array<bool, 2> needs) const {
    const std::array asked{needs[0] || shared, needs[1] && !shared};
    return pointwise_bwd({prepared(dy, c), c.a, c.b, c.combine, c.activation, c.scale, c.dropout_p, c.seed, asked});
  }

  // dy as the kernels need it. Dropout and bits number its elements by their layout, and sums over rows need it contiguous.
  Tensor prepared(const Tensor& dy, const PointwiseCall& call) const {
    if (kept == Kept::kBits && !present(call.b)) return in_order(dy, strides);
    return kept == Kept::kBits || present(call.seed) ? laid_out(dy, strides) : dy;
  }

  // A stand-in for y, with y's history and with values that have the slopes that the bits say.
  Tensor in_place_of_y(const Tensor& bits, const Tensor& dy) {
    Tensor y = unpacked(bits, laid_out(dy.detach(), strides));
    be_history_of(y);
    return y;
  }

  // The gradients as differentiable functions of everything. The operands are replaced by aliases: one operand may depend on
  // the other or be the same tensor, and its gradient must not include the other's.
  PointwiseGradients differentiable(const PointwiseCall& call, const Tensor& dy, std::array<bool, 2> needs) {
    const Tensor first = at::_ops::alias::call(kept == Kept::kBits ? in_place_of_y(call.a, dy) : call.a);
    const Tensor second = present(call.b) ? at::_ops::alias::call(*call.b) : Tensor();
    const bool by_row = call.combine == "first";  // then a second operand only says to what shape to sum
    const OptionalTensor operand = by_row ? std::nullopt : optional(second);
    const PointwiseCall again{first, operand, call.combine, call.activation, call.scale, call.dropout_p, call.seed};
    variable_list inputs;
    if (needs[0] || shared || by_row) inputs.push_back(first);
    if (needs[1] && !shared && !by_row) inputs.push_back(second);
    auto gradients = differentiate(reference(again), inputs, dy);
    if (by_row && second.defined()) gradients.push_back(gradients[0].sum_to_size_symint(second.sym_sizes()));
    const bool has_first = needs[0] || shared || by_row;
    return {has_first ? gradients[0] : Tensor(), gradients.size() > has_first ? gradients[has_first] : Tensor()};
  }
};

}  // namespace

Tensor record(c10::DispatchKeySet keys, const PointwiseCall& call) {
  const auto& [a, b, combine, activation, scale, dropout_p, seed] = call;
  const Kept kept = kept_of(call);
  Tensor bits, y;
  if (kept == Kept::kBits)
    std::tie(y, bits) = below_autograd(keys, PointwiseFwdCall{a, b, combine, activation, scale, dropout_p, seed});
  else y = below_autograd(keys, call);
  auto node = std::make_unique<PointwiseBackward>(call, kept, y);
  const Tensor& first = kept == Kept::kResult ? y : kept == Kept::kBits ? bits : a;
  const bool reads_b = combine != "gate" || has_gradient(a);  // the value's gradient does not depend on the value
  const OptionalTensor second = kept != Kept::kOperands && node->shared ? std::nullopt : reads_b ? b : unread(b);
  set_history(std::move(node), {a, b}, {y}, {first, second, seed});
  return y;
}

static const Verb<PointwiseCall> pointwise_verb;

}  // namespace kf
