// The row-norm operators below autograd: checks, allocation, shapes for tracing, registration.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_ops.h>
#include <c10/core/SymIntArrayRef.h>

#include "row_norm.h"

namespace kf {

namespace {

// Weight, bias and the residual's gate have the normalised dimensions, and those of groups.
template <class Call> c10::SymIntArrayRef parameter_shape(const Call& c) {
  const OptionalTensor& parameter = of_groups(c);
  return present(parameter) ? parameter->sym_sizes() : c.input.sym_sizes().slice(c.input.dim() - c.num_dims);
}

// Whether that shape broadcasts to the input's, in groups that kernels know.
template <class Call> bool has_groups(const Call& c) {
  if (!c.grouped) return true;
  const auto shape = parameter_shape(c), sizes = c.input.sym_sizes();
  const auto normalised = static_cast<size_t>(c.num_dims);
  if (shape.size() < normalised || shape.size() > sizes.size()) return false;
  const auto own = shape.size() - normalised, missing = sizes.size() - shape.size();
  for (size_t d = 0; d < shape.size(); ++d)
    if (!alike(shape[d], sizes[missing + d]) && (d >= own || !one(shape[d]))) return false;
  return find_groups<c10::SymInt>(sizes, shape, c.num_dims).has_value();
}

// How many sums of rows there are, with the number of columns.
template <class Call> c10::SymInt num_sums(const Call& c) {
  c10::SymInt rows = 1;
  for (const auto& size : c.input.sym_sizes().slice(0, c.input.dim() - c.num_dims)) rows = rows * size;
  return rows * (c.rms ? 1 : 2) + 1;
}

// Compares integers if there are no symbols, which is faster.
bool same(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  const auto x = c10::asIntArrayRefSlowOpt(a), y = c10::asIntArrayRefSlowOpt(b);
  return x && y ? *x == *y : std::equal(a.begin(), a.end(), b.begin(), b.end(), alike);
}

// Whether `t`, if present, has this shape and goes with the input.
bool fits(const OptionalTensor& t, const Tensor& input, c10::SymIntArrayRef shape) {
  if (!present(t)) return true;
  return t->device() == input.device() && t->layout() == at::kStrided && mixes(input.scalar_type(), t->scalar_type()) &&
         same(t->sym_sizes(), shape);
}

// Whether the device has kernels for the passes, and the sums are those that the second one needs.
template <class Call> bool has_passes(const Call& c) {
  if (c.passes == Passes::kBoth) return !present(c.sums);
  if (c.input.is_cpu() && !rehearsing()) return false;
  if (c.passes == Passes::kFirst) return !present(c.sums);
  if (!present(c.sums)) return false;
  const Tensor& sums = *c.sums;
  return sums.scalar_type() == at::kDouble && sums.dim() == 1 && sums.is_contiguous() && sums.device() == c.input.device() &&
         alike(sums.sym_size(0), num_sums(c));
}

}  // namespace

double resolve_eps(const Tensor& input, std::optional<double> eps) {
  if (eps) return *eps;
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
}

GroupRows::GroupRows(const OptionalTensor& t, int64_t num_dims, bool grouped) {
  if (!present(t)) return;
  if (!grouped) {
    tensor = t->contiguous();
    alignment = alignment_of(tensor.const_data_ptr());
    return;
  }
  Rows rows(*t, num_dims);
  if (rows.strided) rows = Rows(rows.tensor.contiguous(), num_dims);
  tensor = rows.tensor;
  pitch = rows.layout.stride[2];
  alignment = rows.alignment;
}

bool accepts(const ForwardCall& c) {
  const Tensor& input = c.input;
  return supported(input.scalar_type()) && input.layout() == at::kStrided && c.num_dims >= 1 && c.num_dims <= input.dim() &&
         has_passes(c) && (!input.is_cuda() || cuda_enabled(input.device().index())) && has_groups(c) &&
         fits(c.weight, input, parameter_shape(c)) && fits(c.bias, input, parameter_shape(c)) &&
         fits(c.residual_gate(), input, parameter_shape(c)) && (c.weight_offset == 0.0 || present(c.weight)) &&
         (!c.out_dtype || mixes(input.scalar_type(), *c.out_dtype)) && fits(c.other(), input, input.sym_sizes()) &&
         (!c.dropout || is_seed(c.seed(), input)) && go_together(c, c, present(c.residual));
}

void define(Tensor& t, const Tensor& input, OptionalDtype dtype) {
  if (!t.defined()) t = allocate({0}, input.options().dtype(dtype.value_or(acc_dtype(input))));
}

namespace {

// The device is known, so the dispatcher need not look for it.
Tensor empty(const Backend& backend, c10::SymIntArrayRef shape, const Tensor& like, at::ScalarType dtype) {
  return at::_ops::empty_memory_format::redispatch(c10::DispatchKeySet(backend.key), shape, dtype, at::kStrided, like.device(),
                                                   /*pin_memory=*/false, at::MemoryFormat::Contiguous);
}

// (mean, rstd) of each row, or (rstd) for RMSNorm.
Tensor empty_stats(const Backend& backend, const ForwardCall& c) {
  c10::SmallVector<c10::SymInt, 6> shape{c10::SymInt(c.rms ? 1 : 2)};
  shape.append(c.input.sym_sizes().begin(), c.input.sym_sizes().end() - c.num_dims);
  return empty(backend, shape, c.input, acc_dtype(c.input));
}

// The sums that a first pass leaves; without elements, which no kernel reads, they are zeros.
template <class Call> Tensor empty_sums(const Backend& backend, const Call& c) {
  const c10::SymInt shape[]{num_sums(c)};
  Tensor sums = empty(backend, shape, c.input, at::kDouble);
  if (backend.has_kernels && !c.input.numel()) sums.zero_();
  return sums;
}

std::array<OptionalDtype, 5> gradient_dtypes(const BackwardCall& c) {
  const auto other = dtype_of(c.row()).value_or(c.input.scalar_type());
  return {c.x_dtype, dtype_of(c.weight), c.bias_dtype, other, dtype_of(c.residual_gate())};
}

// Whether its forward would be accepted, and all arguments go with it.
bool consistent(const BackwardCall& c) {
  const Tensor& input = c.input;
  const auto type = input.scalar_type(), dy_type = c.dy.scalar_type();
  const auto shape = input.sym_sizes();
  const bool needs_x = c.has_residual && (c.pre_activation != 0 || present(c.residual_gate())),
             has_x = present(c.x) || !needs_x;
  const OptionalTensor& residual = c.has_residual ? input : kAbsent;
  return accepts({c, c, input, c.weight, c.bias, 0.0, dy_type, residual, c.sums}) && same(c.dy.sym_sizes(), shape) &&
         c.dy.device() == input.device() && c.stats.device() == input.device() && c.stats.scalar_type() == acc_dtype(input) &&
         c.stats.dim() == 1 + input.dim() - c.num_dims && c.stats.sym_size(0) == (c.rms ? 1 : 2) &&
         same(c.stats.sym_sizes().slice(1), shape.slice(0, input.dim() - c.num_dims)) &&
         (!c.bias_dtype || mixes(type, *c.bias_dtype)) && has_x && fits(c.x, input, shape) && fits(c.dh, input, shape) &&
         (c.has_residual ? mixes(type, c.x_dtype) : c.x_dtype == type) && (!present(c.x) || c.x->scalar_type() == c.x_dtype) &&
         (!present(c.dh) || (c.has_residual && c.dh->scalar_type() == type));
}

}  // namespace

// The dispatcher considers all tensors of a call, also unused ones.
static void check_device(const Backend& backend, const Tensor& input) {
  TORCH_CHECK(input.device().type() == backend.device,
              "kernel_fusion: expected all tensors to be on the same device, but found ", input.device(), " and ",
              c10::DeviceTypeName(backend.device, /*lower_case=*/true));
}

// Whether y has the input's memory format: as in PyTorch, only for RMSNorm. (LayerNorm gives a contiguous result.)
static bool keeps_format(const ForwardCall& call) {
  return call.rms && call.passes == Passes::kBoth && !call.has_stages() && call.input.dim() > 3 &&
         call.input.suggest_memory_format() != at::MemoryFormat::Contiguous;
}

ForwardResult forward(const Backend& backend, const ForwardCall& call) {
  check_device(backend, call.input);
  const auto shape = call.input.sym_sizes();
  const bool first = call.passes == Passes::kFirst;
  Tensor y = first ? empty_sums(backend, call) : empty(backend, shape, call.input, call.y_dtype()), stats, h;
  if (call.wants_stats && !first) stats = empty_stats(backend, call);
  if (present(call.residual)) h = empty(backend, shape, call.input, call.residual->scalar_type());
  if (backend.has_kernels && call.input.numel()) {
    constexpr Kernels forward_kernels{forward_cpu, forward_cuda};
    call.tensors(check_all_memory);
    if (call.passes == Passes::kBoth) forward_kernels(backend, call, y, stats, h);
    else forward_cuda(call, y, stats, h);
  }
  // Rows of channels-last tensors are copied, and the result is copied back; other results are contiguous, as PyTorch's are.
  if (keeps_format(call)) y = y.contiguous(call.input.suggest_memory_format());
  return {std::move(y), std::move(stats), std::move(h)};
}

RowNormGradients backward(const Backend& backend, const BackwardCall& call) {
  check_device(backend, call.input);
  TORCH_CHECK(consistent(call), "kernel_fusion::row_norm_bwd: arguments that its kernels do not take");
  const auto shape = call.input.sym_sizes(), of_parameters = parameter_shape(call);
  const std::array shapes{shape, of_parameters, of_parameters, shape, of_parameters};
  const auto dtypes = gradient_dtypes(call);
  RowNormGradients to;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    if (!call.wants[i]) continue;
    TORCH_CHECK(dtypes[i] && (i != 3 || call.has_other()),
                "kernel_fusion::row_norm_bwd: a gradient was asked for a parameter that is not there");
    *to.all()[i] = empty(backend, shapes[i], call.input, *dtypes[i]);
  }
  if (call.passes == Passes::kFirst) to.dx = empty_sums(backend, call);
  if (backend.has_kernels && call.input.numel()) {
    constexpr Kernels backward_kernels{backward_cpu, backward_cuda};
    call.tensors(check_all_memory);
    if (call.passes == Passes::kBoth) backward_kernels(backend, call, to);
    else backward_cuda(call, to);
  } else if (backend.has_kernels) {  // no rows: the sums over them are zero
    for (Tensor* sum : {&to.dweight, &to.dbias, &to.dgate})
      if (sum->defined()) sum->zero_();
  }
  return to;
}

namespace {

template <class Call> typename Call::Result inference(const Backend& backend, const Call& given) {
  const ForwardCall call = norm_of(given);
  if (!accepts(call)) {
    auto [y, h] = reference(call);
    return verb_result<typename Call::Result>(std::move(y), std::move(h), call.input);
  }
  auto [y, stats, h] = forward(backend, call);
  return verb_result<typename Call::Result>(std::move(y), std::move(h), call.input);
}

ForwardResult row_norm_fwd(const Backend& backend, const RowNormFwdCall& given) {
  ForwardCall call = norm_of(given);
  TORCH_CHECK(accepts(call),
              "kernel_fusion::row_norm_fwd: arguments that its kernels do not take; call kernel_fusion.layer_norm instead");
  call.wants_stats = true;
  auto result = forward(backend, call);
  define(std::get<2>(result), call.input, call.input.scalar_type());
  return result;
}

BackwardCall::Result row_norm_bwd(const Backend& backend, const RowNormBwdCall& given) {
  const BackwardCall call = norm_of(given);
  auto [dx, dweight, dbias, dresidual, dgate] = backward(backend, call);
  const std::array results{&dx, &dweight, &dbias, &dresidual, &dgate};
  const auto dtypes = gradient_dtypes(call);
  for (size_t i = 0; i < dtypes.size(); ++i) define(*results[i], call.input, dtypes[i]);
  return {std::move(dx), std::move(dweight), std::move(dbias), std::move(dresidual), std::move(dgate)};
}

const Implements row_norm_kernels[] = {
    {"layer_norm", {&kCpu, &kCuda, &kMeta}, Boxed<inference<LayerNormCall>>::kernel},
    {"rms_norm", {&kCpu, &kCuda, &kMeta}, Boxed<inference<RmsNormCall>>::kernel},
    {"staged_row_norm", {&kCpu, &kCuda, &kMeta}, Boxed<inference<StagedRowNormCall>>::kernel},
    {"row_norm_fwd", {&kCpu, &kCuda, &kMeta}, Boxed<row_norm_fwd>::kernel},
    {"row_norm_bwd", {&kCpu, &kCuda, &kMeta}, Boxed<row_norm_bwd>::kernel},
};

}  // namespace

}  // namespace kf
