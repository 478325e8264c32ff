// Pointwise chains below autograd: checks, promotion, broadcasting, allocation and registration. Python computes the shapes for
// tracing (operators/meta.py).
#include <ATen/core/Tensor.h>
#include <ATen/ops/result_type_ops.h>
#include <ATen/ops/zeros_like_ops.h>

#include <limits>

#include "pointwise.h"
#include "reduce.h"
#include "verb.h"

namespace kf {

namespace {

// Whether the kernels know the names, dtypes and devices of a call. The number of operands is not looked at.
bool known(const PointwiseCall& c) {
  if (!combine_of(c.combine) || activation_code(c.activation) < 0 || !readable(c.a)) return false;
  if (present(c.b) && !(readable(*c.b) && c.b->device() == c.a.device())) return false;
  return !present(c.seed) || is_seed(c.seed, c.a);
}

Dropout dropout_of(const PointwiseCall& c) { return kf::dropout_of(c.dropout_p, c.seed); }

Chain chain_of(const PointwiseCall& c) {
  const Dropout dropout = dropout_of(c);
  return {*combine_of(c.combine), activation_code(c.activation), c.scale * dropout.scale(), dropout,
          dropout ? c.seed->const_data_ptr<int64_t>() : nullptr};
}

at::ScalarType result_type(const PointwiseCall& c) {
  return present(c.b) ? at::_ops::result_type_Tensor::call(c.a, *c.b) : c.a.scalar_type();
}

}  // namespace

bool accepts(const PointwiseCall& c) { return known(c) && present(c.b) == (c.combine != "first"); }

bool has_bits(const PointwiseCall& c) {
  return as_on_cuda(c.a) && !present(c.seed) && (c.combine == "first" || c.combine == "add") && has_two_slopes(c.activation);
}

namespace {

constexpr Kernels pointwise_kernels{pointwise_cpu, pointwise_cuda};
constexpr Kernels pointwise_bwd_kernels{pointwise_bwd_cpu, pointwise_bwd_cuda};
constexpr Kernels pointwise_bwd_columns_kernels{pointwise_bwd_columns_cpu, pointwise_bwd_columns_cuda};

// The chain; `bits` is filled if it is given.
Tensor compute_chain(const Backend& backend, const PointwiseCall& call, Tensor* bits = nullptr) {
  call.tensors(check_all_memory);
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).declare_static_dtype_and_device(result_type(call), call.a.device());
  config.add_owned_output(Tensor()).add_const_input(call.a);
  if (present(call.b)) config.add_const_input(*call.b);
  auto iter = config.build();
  Tensor y = iter.output();
  Chain chain = chain_of(call);
  if (bits) {
    *bits = allocate({ceil_div(y.numel(), 8)}, y.options().dtype(at::kByte));
    chain.bits = bits->mutable_data_ptr<uint8_t>();
  }
  if (chain.dropout.drops_all()) {
    y.zero_();
  } else if (y.numel()) {
    pointwise_kernels(backend, chain, iter);
  }
  return y;
}

// The gradient of one operand. The kernel writes `full`, which has y's shape. It is the gradient itself, or is then summed over
// the dimensions in which the operand was broadcast.
struct Gradient {
  const Tensor& operand;
  Tensor result, full;

  Gradient(const Tensor& operand, const Tensor& dy, bool wanted) : operand(operand) {
    if (!wanted) return;
    if (operand.numel() == dy.numel()) {
      result = allocate_like(operand);
      full = result.expand(dy.sizes());
    } else {
      full = allocate(dy.sizes(), dy.options().dtype(acc_dtype(dy)));
    }
  }

  Tensor finished(const Backend& backend) {
    if (!full.defined() || result.defined()) return result;
    Tensor sum = sum_to(backend, full, operand.sizes(), operand.scalar_type());
    return operand.is_contiguous() ? sum : allocate_like(operand).copy_(sum);
  }
};

Tensor zeros_like(const Tensor& t) { return at::_ops::zeros_like::call(t, {}, {}, {}, {}, {}); }

// Whether t is one contiguous row of the last dimensions of `shape`, broadcast over all other dimensions, which have more than
// one element together.
bool is_row(const Tensor& t, at::IntArrayRef shape) {
  if (!t.is_contiguous() || t.dim() > static_cast<int64_t>(shape.size()) || t.numel() == c10::multiply_integers(shape))
    return false;
  bool leading = true;  // all dimensions so far have size 1
  for (int64_t d = 0; d < t.dim(); ++d) {
    leading = leading && t.size(d) == 1;
    if (!leading && t.size(d) != shape[shape.size() - t.dim() + d]) return false;
  }
  return t.numel() > 1;
}

struct BackwardOperands {
  const Tensor &dy, &a, &b;  // b may be undefined
  std::array<bool, 2> wants;
};

// Serves chains in which one operand is a broadcast row, such as a bias: one pass also computes its sum over rows. Returns
// whether the call was such a chain.
bool columns(const Backend& backend, const Chain& chain, const BackwardOperands& t, Tensor& da, Tensor& db) {
  const bool symmetric = chain.combine == Combine::kAdd || chain.combine == Combine::kMul;
  const auto serve = [&](const Tensor& matrix, const Tensor& row, bool wants_matrix, Tensor& dmatrix, Tensor& drow) {
    if (!is_row(row, t.dy.sizes()) || !matrix.sizes().equals(t.dy.sizes())) return false;
    // Dropout and bits number elements by their offsets in dy, so a copy of dy would give others.
    if ((chain.dropout || chain.bits) && !t.dy.is_contiguous()) return false;
    Tensor gradient = allocate_like(wants_matrix ? matrix : row);
    if (!gradient.is_contiguous()) return false;
    if (wants_matrix) dmatrix = std::move(gradient);
    drow = allocate_like(row);
    const Tensor dy = t.dy.contiguous(), x = matrix.contiguous();
    const ColumnCall call{chain, dy, x, row, dy.numel() / row.numel(), row.numel()};
    pointwise_bwd_columns_kernels(backend, call, dmatrix, drow);
    return true;
  };
  if (t.wants[1] && serve(t.a, t.b, t.wants[0], da, db)) return true;
  return t.wants[0] && symmetric && serve(t.b, t.a, t.wants[1], db, da);
}

std::tuple<Tensor, Tensor> gradients(const Backend& backend, const Chain& chain, const BackwardOperands& t) {
  Tensor row_da, row_db;
  if (columns(backend, chain, t, row_da, row_db)) return {std::move(row_da), std::move(row_db)};
  if (chain.combine == Combine::kFirst && t.wants[1]) {
    Tensor da = std::get<0>(gradients(backend, chain, {t.dy, t.a, Tensor(), {true, false}}));
    Tensor db = sum_to(backend, da, t.b.sizes(), t.b.scalar_type());
    return {t.wants[0] ? std::move(da) : Tensor(), std::move(db)};
  }
  Gradient da(t.a, t.dy, t.wants[0]), db(t.b, t.dy, t.wants[1]);
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).resize_outputs(false);
  for (const auto* gradient : {&da, &db})
    if (gradient->full.defined()) config.add_output(gradient->full);
  config.add_const_input(t.dy).add_const_input(t.a);
  if (t.b.defined()) config.add_const_input(t.b);
  auto iter = config.build();
  pointwise_bwd_kernels(backend, chain, iter, t.wants);
  return {da.finished(backend), db.finished(backend)};
}

}  // namespace

Tensor compute(const Backend& backend, const PointwiseCall& call) { return compute_chain(backend, call); }

std::tuple<Tensor, Tensor> compute(const Backend& backend, const PointwiseFwdCall& c) {
  const PointwiseCall call{c.a, c.b, c.combine, c.activation, c.scale, c.dropout_p, c.seed};
  TORCH_CHECK(accepts(call) && has_bits(call), "kernel_fusion::pointwise_fwd: arguments that its kernels do not take");
  Tensor bits, y = compute_chain(backend, call, &bits);
  return {std::move(y), std::move(bits)};
}

PointwiseGradients pointwise_bwd(const Backend& backend, const PointwiseBwdCall& call) {
  const auto& [dy, x, b, combine, activation, scale, dropout_p, seed, wants] = call;
  const Tensor second = present(b) ? *b : Tensor();
  const bool by_bits = x.scalar_type() == at::kByte;
  const Tensor& a = by_bits ? dy : x;  // da gets the layout of this tensor
  const PointwiseCall c{a, b, combine, activation, scale, dropout_p, seed};
  TORCH_CHECK(known(c) && (second.defined() || c.combine == "first") && readable(dy) && dy.device() == x.device() &&
                  (second.defined() || !wants[1]) &&
                  dy.sizes().equals(second.defined() ? broadcast_shape(a.sizes(), second.sizes()) : a.sizes().vec()) &&
                  (c.combine != "first" || dy.sizes().equals(a.sizes())),
              "kernel_fusion::pointwise_bwd: arguments that its kernels do not take");
  TORCH_CHECK(!by_bits || (has_bits(c) && c.combine == "first" && x.is_contiguous() && x.numel() == ceil_div(dy.numel(), 8)),
              "kernel_fusion::pointwise_bwd: bits that its kernels do not take");
  TORCH_CHECK(!dropout_of(c) || dy.is_non_overlapping_and_dense(),
              "kernel_fusion::pointwise_bwd: with dropout, dy must lie in memory as y did");
  if (dropout_of(c).drops_all() || dy.numel() == 0)
    return {wants[0] ? zeros_like(a) : Tensor(), wants[1] ? zeros_like(second) : Tensor()};
  if (!wants[0] && !wants[1]) return {};
  call.tensors(check_all_memory);
  Chain chain = chain_of(c);
  if (!by_bits) return gradients(backend, chain, {dy, a, second, wants});
  chain.bits = const_cast<uint8_t*>(x.const_data_ptr<uint8_t>());  // backward only reads them
  // dy is read where it lies, unless its storage or da is so long that the call would be cut into parts.
  const size_t longest = std::max(dy.storage().nbytes(), dy.nbytes());
  const bool in_parts = !dy.is_non_overlapping_and_dense() && longest > std::numeric_limits<int32_t>::max();
  const Tensor whole = in_parts ? allocate_like(dy).copy_(dy) : dy;
  return gradients(backend, chain, {whole, whole, second, wants});
}

// As an operator. It returns an empty tensor for an unwanted gradient, because operators return defined tensors.
PointwiseGradients compute(const Backend& backend, const PointwiseBwdCall& call) {
  auto [da, db] = pointwise_bwd(backend, call);
  for (auto* gradient : {&da, &db})
    if (!gradient->defined()) *gradient = allocate({0}, call.dy.options());
  return {std::move(da), std::move(db)};
}

static const Part<PointwiseFwdCall> pointwise_fwd_part;
static const Part<PointwiseBwdCall> pointwise_bwd_part;

}  // namespace kf
