// The row-norm operators below autograd: checks, allocation, shapes for tracing, registration.
#include <ATen/ops/empty.h>
#include <c10/core/SymIntArrayRef.h>
#include <torch/library.h>

#include "activation_codes.h"
#include "backends.h"

namespace kf {

namespace {

// fp64 goes with fp64, the three others with each other.
bool mixes(at::ScalarType a, at::ScalarType b) { return supported(b) && (a == at::kDouble) == (b == at::kDouble); }

c10::SymIntArrayRef normalized_shape(const Tensor& input, int64_t num_dims) {
  return input.sym_sizes().slice(input.dim() - num_dims);
}

c10::SymIntArrayRef leading_shape(const Tensor& input, int64_t num_dims) {
  return input.sym_sizes().slice(0, input.dim() - num_dims);
}

// As integers where there are no symbols, which is several times faster.
bool same(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  const auto x = c10::asIntArrayRefSlowOpt(a), y = c10::asIntArrayRefSlowOpt(b);
  return x && y ? *x == *y : a == b;
}

// Whether `t`, if there is one, has this shape and goes with the input.
bool fits(const OptionalTensor& t, const Tensor& input, c10::SymIntArrayRef shape) {
  if (!present(t)) return true;
  return t->device() == input.device() && t->layout() == at::kStrided && mixes(input.scalar_type(), t->scalar_type()) &&
         same(t->sym_sizes(), shape);
}

}  // namespace

double resolve_eps(const Tensor& input, std::optional<double> eps) {
  if (eps) return *eps;
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
}

bool accepts(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
             double weight_offset, const OptionalDtype& out_dtype) {
  return supported(input.scalar_type()) && input.layout() == at::kStrided && num_dims >= 1 && num_dims <= input.dim() &&
         (!input.is_cuda() || cuda_enabled(input.device().index())) && fits(weight, input, normalized_shape(input, num_dims)) &&
         fits(bias, input, normalized_shape(input, num_dims)) && (weight_offset == 0.0 || present(weight)) &&
         (!out_dtype || mixes(input.scalar_type(), *out_dtype));
}

Tensor reference(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                 double eps, double weight_offset, const OptionalDtype& out_dtype, bool rms) {
  static const auto op =
      find_op<Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, double, double, OptionalDtype, bool)>(
          "kernel_fusion::row_norm_reference");
  return op.call(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms);
}

Stages make_stages(const OptionalTensor& residual, std::string_view pre_activation, std::string_view activation,
                   double dropout_p, const OptionalTensor& seed) {
  const int32_t pre = activation_code(pre_activation), post = activation_code(activation);
  TORCH_CHECK_VALUE(pre >= 0 && post >= 0, "kernel_fusion: no activation is called '", pre < 0 ? pre_activation : activation, "'");
  const Dropout dropout = dropout_of(dropout_p, seed);
  return {residual, pre, post, dropout, dropout ? seed : std::nullopt};
}

bool accepts(const Tensor& input, const Stages& stages) {
  return fits(stages.residual, input, input.sym_sizes()) && (!stages.dropout || is_seed(stages.seed, input));
}

StagedResult staged_reference(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                              double eps, double weight_offset, const OptionalDtype& out_dtype, bool rms, const Stages& stages) {
  static const auto op = find_op<StagedVerb>("kernel_fusion::staged_row_norm_reference");
  return op.call(input, stages.residual, num_dims, weight, bias, eps, weight_offset, out_dtype, rms,
                 kActivationNames[stages.pre_activation], kActivationNames[stages.activation], stages.dropout.p(),
                 stages.seed);
}

namespace {

// The device is known, so the dispatcher is spared from looking for it.
Tensor empty(const Backend& backend, c10::SymIntArrayRef shape, const Tensor& like, at::ScalarType dtype) {
  return at::_ops::empty_memory_format::redispatch(c10::DispatchKeySet(backend.key), shape, dtype, at::kStrided, like.device(),
                                                   /*pin_memory=*/false, at::MemoryFormat::Contiguous);
}

// (mean, rstd) of each row, or (rstd) for RMSNorm.
Tensor empty_stats(const Backend& backend, const Tensor& input, int64_t num_dims, bool rms) {
  c10::SmallVector<c10::SymInt, 6> shape{c10::SymInt(rms ? 1 : 2)};
  shape.append(input.sym_sizes().begin(), input.sym_sizes().end() - num_dims);
  return empty(backend, shape, input, acc_dtype(input));
}

bool consistent(const BackwardCall& call, const BackwardStages& stages) {
  const Tensor& input = call.input;
  const auto shape = input.sym_sizes();
  const bool x_fits = !present(stages.x) || stages.x->scalar_type() == call.x_dtype;
  const bool dh_fits = !present(stages.dh) || (stages.has_residual && stages.dh->scalar_type() == input.scalar_type());
  const bool has_x = present(stages.x) || !stages.has_residual || stages.pre_activation == 0;
  const bool dx_fits = stages.has_residual ? mixes(input.scalar_type(), call.x_dtype) : call.x_dtype == input.scalar_type();
  return has_x && dx_fits && x_fits && dh_fits && fits(stages.x, input, shape) && fits(stages.dh, input, shape) &&
         fits(stages.bias, input, normalized_shape(input, call.num_dims)) &&
         (!stages.dropout || is_seed(stages.seed, input));
}

bool consistent(const BackwardCall& call) {
  const Tensor &dy = call.dy, &input = call.input, &stats = call.stats;
  return accepts(input, call.num_dims, call.weight, std::nullopt, call.weight_offset, dy.scalar_type()) &&
         same(dy.sym_sizes(), input.sym_sizes()) && dy.device() == input.device() && stats.device() == input.device() &&
         stats.scalar_type() == acc_dtype(input) && stats.dim() == 1 + input.dim() - call.num_dims &&
         stats.sym_size(0) == (call.rms ? 1 : 2) && same(stats.sym_sizes().slice(1), leading_shape(input, call.num_dims)) &&
         (!call.bias_dtype || mixes(input.scalar_type(), *call.bias_dtype)) &&
         (call.stages ? consistent(call, *call.stages) : call.x_dtype == input.scalar_type());
}

}  // namespace

// The dispatcher goes by all tensors of a call, also those that it does not use.
static void check_device(const Backend& backend, const Tensor& input) {
  TORCH_CHECK(input.device().type() == backend.device, "kernel_fusion: expected all tensors to be on the same device, but found ",
              input.device(), " and ", c10::DeviceTypeName(backend.device, /*lower_case=*/true));
}

// Whether y has the memory format of the input: as in PyTorch, of RMSNorm alone. (LayerNorm gives a contiguous result.)
static bool keeps_format(const ForwardCall& call) {
  return call.rms && !call.stages && call.input.dim() > 3 && call.input.suggest_memory_format() != at::MemoryFormat::Contiguous;
}

ForwardResult forward(const Backend& backend, const ForwardCall& call) {
  check_device(backend, call.input);
  const auto shape = call.input.sym_sizes();
  Tensor y = empty(backend, shape, call.input, call.out_dtype), stats, h;
  if (call.wants_stats) stats = empty_stats(backend, call.input, call.num_dims, call.rms);
  if (call.stages && present(call.stages->residual)) h = empty(backend, shape, call.input, call.stages->residual->scalar_type());
  if (backend.forward && y.numel()) {
    with_tensors(call, check_all_memory);
    backend.forward(call, y, stats, h);
  }
  // Rows of channels-last tensors are copied, and the result is copied back; other results are contiguous, as PyTorch's are.
  if (keeps_format(call)) y = y.contiguous(call.input.suggest_memory_format());
  return {std::move(y), std::move(stats), std::move(h)};
}

BackwardResult backward(const Backend& backend, const BackwardCall& call) {
  const auto [wants_dx, wants_dweight, wants_dbias, wants_dresidual] = call.wants;
  const bool has_residual = call.stages && call.stages->has_residual;
  check_device(backend, call.input);
  TORCH_CHECK(consistent(call), "kernel_fusion::row_norm_bwd: arguments that its kernels do not take");
  TORCH_CHECK((present(call.weight) || !wants_dweight) && (call.bias_dtype || !wants_dbias) && (has_residual || !wants_dresidual),
              "kernel_fusion::row_norm_bwd: a gradient was asked for a parameter that is not there");
  const auto shape = call.input.sym_sizes(), parameter_shape = normalized_shape(call.input, call.num_dims);
  Tensor dx, dweight, dbias, dresidual;
  if (wants_dx) dx = empty(backend, shape, call.input, call.x_dtype);
  if (wants_dweight) dweight = empty(backend, parameter_shape, call.input, call.weight->scalar_type());
  if (wants_dbias) dbias = empty(backend, parameter_shape, call.input, *call.bias_dtype);
  if (wants_dresidual) dresidual = empty(backend, shape, call.input, call.input.scalar_type());
  if (backend.backward && call.input.numel()) {
    with_tensors(call, check_all_memory);
    backend.backward(call, dx, dweight, dbias, dresidual);
  } else if (backend.backward) {  // no rows: the sums over them are zero
    if (wants_dweight) dweight.zero_();
    if (wants_dbias) dbias.zero_();
  }
  return {std::move(dx), std::move(dweight), std::move(dbias), std::move(dresidual)};
}

namespace {

template <const Backend& backend, bool rms>
Tensor inference(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                 Eps<rms> optional_eps, double weight_offset, OptionalDtype out_dtype) {
  const double eps = resolve_eps(input, optional_eps);
  if (!accepts(input, num_dims, weight, bias, weight_offset, out_dtype))
    return reference(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms);
  const auto dtype = out_dtype.value_or(input.scalar_type());
  return std::get<0>(forward(backend, {input, num_dims, weight, bias, eps, weight_offset, dtype, rms, false}));
}

// An operator returns defined tensors: without elements where there is no result.
void define(Tensor& t, const Tensor& input, OptionalDtype dtype) {
  if (!t.defined()) t = at::empty({0}, input.options().dtype(dtype.value_or(acc_dtype(input))));
}

template <const Backend& backend>
StagedResult staged_inference(const Tensor& input, const OptionalTensor& residual, int64_t num_dims,
                              const OptionalTensor& weight, const OptionalTensor& bias, double eps, double weight_offset,
                              OptionalDtype out_dtype, bool rms, std::string_view pre_activation, std::string_view activation,
                              double dropout_p, const OptionalTensor& seed) {
  const Stages stages = make_stages(residual, pre_activation, activation, dropout_p, seed);
  if (!accepts(input, num_dims, weight, bias, weight_offset, out_dtype) || !accepts(input, stages))
    return staged_reference(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms, stages);
  const auto dtype = out_dtype.value_or(input.scalar_type());
  auto [y, stats, h] = forward(backend, {input, num_dims, weight, bias, eps, weight_offset, dtype, rms, false, &stages});
  define(h, input, input.scalar_type());
  return {std::move(y), std::move(h)};
}

template <const Backend& backend>
ForwardResult row_norm_fwd(const Tensor& input, int64_t num_dims, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps, double weight_offset, OptionalDtype out_dtype, bool rms, const OptionalTensor& residual,
                           std::string_view pre_activation, std::string_view activation, double dropout_p,
                           const OptionalTensor& seed) {
  const Stages stages = make_stages(residual, pre_activation, activation, dropout_p, seed);
  TORCH_CHECK(accepts(input, num_dims, weight, bias, weight_offset, out_dtype) && accepts(input, stages),
              "kernel_fusion::row_norm_fwd: arguments that its kernels do not take; call kernel_fusion.layer_norm instead");
  const auto dtype = out_dtype.value_or(input.scalar_type());
  const bool bare = !present(residual) && !stages.pre_activation && !stages.activation && !stages.dropout;
  auto result =
      forward(backend, {input, num_dims, weight, bias, eps, weight_offset, dtype, rms, true, bare ? nullptr : &stages});
  define(std::get<2>(result), input, input.scalar_type());
  return result;
}

template <const Backend& backend>
BackwardResult row_norm_bwd(const Tensor& dy, const Tensor& input, const Tensor& stats, int64_t num_dims,
                            const OptionalTensor& weight, OptionalDtype bias_dtype, double weight_offset, bool rms,
                            Wanted wants, OptionalDtype x_dtype, const OptionalTensor& dh, const OptionalTensor& x,
                            const OptionalTensor& bias, bool has_residual, std::string_view pre_activation,
                            std::string_view activation, double dropout_p, const OptionalTensor& seed) {
  const Stages s = make_stages(std::nullopt, pre_activation, activation, dropout_p, seed);
  const BackwardStages stages{dh, x, bias, has_residual, s.pre_activation, s.activation, s.dropout, s.seed};
  // A tensor of a stage that is not there is checked with the others.
  const bool bare = !has_residual && !s.pre_activation && !s.activation && !s.dropout && !present(dh) && !present(x) &&
                    !present(bias);
  const auto dx_dtype = x_dtype.value_or(input.scalar_type());
  auto result = backward(backend, {dy, input, stats, num_dims, weight, bias_dtype, weight_offset, rms, wants, dx_dtype,
                                   bare ? nullptr : &stages});
  define(std::get<0>(result), input, dx_dtype);
  define(std::get<1>(result), input, dtype_of(weight));
  define(std::get<2>(result), input, bias_dtype);
  define(std::get<3>(result), input, input.scalar_type());
  return result;
}

template <const Backend& backend> void implement(torch::Library& m) {
  m.impl("layer_norm", inference<backend, false>);
  m.impl("rms_norm", inference<backend, true>);
  m.impl("staged_row_norm", staged_inference<backend>);
  m.impl("row_norm_fwd", row_norm_fwd<backend>);
  m.impl("row_norm_bwd", row_norm_bwd<backend>);
}

}  // namespace

TORCH_LIBRARY_IMPL(kernel_fusion, CPU, m) { implement<kCpu>(m); }
TORCH_LIBRARY_IMPL(kernel_fusion, CUDA, m) { implement<kCuda>(m); }
TORCH_LIBRARY_IMPL(kernel_fusion, Meta, m) { implement<kMeta>(m); }

}  // namespace kf
