// Softmax over the last dimension: y = softmax(scale * input + mask) or, with `log`, its logarithm; contiguous. `mask` is
// boolean or floating point. Causal keeps column j of row i, in the last two dimensions, if j <= i. With a mask or causal, a
// row of -inf gives zeros. Elements left out by a boolean mask or causal are 0, even in a row with NaN.
//
// Backward: dx = scale * (dy - sum(dy * y)) * y, contiguous. With `leaves_out`, dx = 0 where y = 0, which marks left out
// elements, even in a row with NaN. With `log`, dx = scale * (dy - sum(dy) * exp(y)); what is left out is marked by y = -inf,
// and its dy counts for nothing.
#include <algorithm>
#include <bit>

#include "cpu/kernels.h"
#include "cpu/tasks.h"
#include "cuda/launcher.h"
#include "shared/reduce_args.h"
#include "verb.h"

namespace kf {
namespace {

// A mask's dtype: absent, kBool for a mask that keeps, else that of an additive one.
Dtype mask_dtype(const OptionalTensor& mask) {
  return dtype_of(mask) == at::kBool ? Dtype::kBool : dtype_or_absent(dtype_of(mask));
}

// The rows of a mask, whose columns lie side by side, or of a column that repeats.
bool repeats_column(const Tensor& mask) { return mask.stride(-1) == 0; }
Rows rows_of_mask(const Tensor& mask) { return Rows(repeats_column(mask) ? mask.narrow(-1, 0, 1) : mask, 1); }

SoftmaxSpec spec_of(const SoftmaxCall& c) {
  return {cpu_dtype(c.input.scalar_type()), mask_dtype(c.mask), c.causal, c.scale != 1, c.log};
}
SoftmaxBwdSpec spec_of(const SoftmaxBwdCall& c, const Tensor& dy) {
  return {cpu_dtype(dy.scalar_type()), cpu_dtype(c.y.scalar_type()), cpu_dtype(c.y.scalar_type()), c.leaves_out, c.log};
}

// ---- On the CPU threads share the rows; on CUDA: arguments -> key -> launch. A mask has the shape of the input.
// --------------

void softmax_cpu(const SoftmaxCall& call, Tensor& y) {
  const Rows x(call.input, 1);
  const bool masked = present(call.mask);
  const Rows mask = masked ? rows_of_mask(*call.mask) : x;
  constexpr int64_t kVector = 64;  // no vector has more elements
  const SoftmaxSpec spec = spec_of(call);
  const bool in_place = spec.x == cpu_dtype(acc_dtype(call.input)) && x.cols % kVector == 0;
  const cpu::Softmax args{
      spec,        bytes(x.tensor), masked ? bytes(mask.tensor) : nullptr, static_cast<char*>(y.data_ptr()),      x.layout,
      mask.layout, x.cols,          masked && !repeats_column(*call.mask), call.causal ? call.input.size(-2) : 0, call.scale,
      in_place};
  count(Counter::kCpuForward);
  prefer_huge_pages(y);
  run_rows(cpu::kernels().softmax, args, x.rows);
}

void softmax_bwd_cpu(const SoftmaxBwdCall& call, Tensor& dx) {
  const Tensor& y = call.y;
  const Tensor dy = mixes(y.scalar_type(), call.dy.scalar_type()) ? call.dy : call.dy.to(y.scalar_type());
  const int64_t cols = y.size(-1), rows = y.numel() / cols;
  const bool streams = past_caches(dy.nbytes() + y.nbytes() + dx.nbytes(), free_threads());
  const cpu::SoftmaxBackward args{spec_of(call, dy), bytes(dy), bytes(y), static_cast<char*>(dx.data_ptr()), cols,
                                  call.scale,        streams};
  count(Counter::kCpuBackward);
  prefer_huge_pages(dx);
  run_rows(cpu::kernels().softmax_bwd, args, rows);
}

void softmax_cuda(const SoftmaxCall& call, Tensor& y) {
  const Rows x(call.input, 1);
  const bool masked = present(call.mask);
  const Rows mask = masked ? rows_of_mask(*call.mask) : x;
  const auto access = softmax_access(x, masked ? &mask : nullptr, masked && repeats_column(*call.mask));
  const SoftmaxArgs args{x.data(),  masked ? mask.data() : nullptr,        y.data_ptr(), x.rows,
                         x.cols,    call.causal ? call.input.size(-2) : 1, x.layout,     mask.layout,
                         call.scale};
  launch_over(x.rows, call.input.device(), spec_of(call), access, &args);
}

void softmax_bwd_cuda(const SoftmaxBwdCall& call, Tensor& dx) {
  const Tensor &dy = call.dy, &y = call.y;
  const Rows dy_rows(dy, 1), y_rows(y, 1);
  const SoftmaxBwdArgs args{dy_rows.data(), y_rows.data(),  dx.data_ptr(), y_rows.rows,
                            y_rows.cols,    dy_rows.layout, y_rows.layout, call.scale};
  launch_over(y_rows.rows, y.device(), spec_of(call, dy), softmax_access(y_rows, &dy_rows), &args);
}

constexpr Kernels softmax_kernels{softmax_cpu, softmax_cuda};
constexpr Kernels softmax_bwd_kernels{softmax_bwd_cpu, softmax_bwd_cuda};

// The mask in the shape of the input. If its columns lie apart it is copied, before it is broadcast.
OptionalTensor expanded_mask(const SoftmaxCall& c) {
  if (!present(c.mask)) return std::nullopt;
  const Tensor& mask = *c.mask;
  if (mask.dim() == 0 || mask.size(-1) == 1 || mask.stride(-1) <= 1) return mask.expand(c.input.sizes());
  check_memory(mask);
  return mask.contiguous().expand(c.input.sizes());
}

}  // namespace

SoftmaxAccess softmax_access(const Rows& x, const Rows* other, bool mask_repeats) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (x.cols > kMost)
    driver::fail("softmax kernels take rows of at most 2^30 elements, got " + std::to_string(x.cols) +
                 "; the backend 'eager' computes longer ones");
  const int64_t vec = dividing_power(x.cols, kVectorBytes / size_of(x.tensor.scalar_type())), vectors = x.cols / vec;
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(vectors)));
  const int64_t capacity = power >= 4 && vectors <= power / 4 * 3 ? power / 4 * 3 : power;
  SoftmaxAccess access{static_cast<int>(vec), static_cast<int>(capacity), row_access(x, vec)};
  if (other) access.other = mask_repeats ? RowAccess{.strided = other->strided} : row_access(*other, vec);
  access.mask_repeats = mask_repeats;
  return access;
}

bool accepts(const SoftmaxCall& c) {
  if (!readable(c.input) || c.input.dim() < (c.causal ? 2 : 1)) return false;
  if (!present(c.mask)) return true;
  if (c.mask->device() != c.input.device() || c.mask->layout() != at::kStrided) return false;
  return c.mask->scalar_type() == at::kBool || (readable(*c.mask) && mixes(c.input.scalar_type(), c.mask->scalar_type()));
}

Tensor compute(const Backend& backend, const SoftmaxCall& call) {
  const OptionalTensor mask = expanded_mask(call);
  Tensor y = allocate_like(call.input, at::MemoryFormat::Contiguous);
  if (y.numel()) {
    call.tensors(check_all_memory);
    softmax_kernels(backend, {call.input, mask, call.scale, call.causal, call.log}, y);
  }
  return y;
}

Tensor compute(const Backend& backend, const SoftmaxBwdCall& c) {
  const Tensor &dy = c.dy, &y = c.y;
  TORCH_CHECK(readable(dy) && readable(y) && y.dim() >= 1 && dy.sizes().equals(y.sizes()) && dy.device() == y.device(),
              "kernel_fusion::softmax_bwd: arguments that its kernels do not take");
  Tensor dx = allocate_like(y, at::MemoryFormat::Contiguous);
  if (y.numel()) {
    c.tensors(check_all_memory);
    softmax_bwd_kernels(backend, {dy.contiguous(), y.contiguous(), c.scale, c.leaves_out, c.log}, dx);
  }
  return dx;
}

// ---- Autograd. y determines the gradient, so x need not be kept.
// -------------------------------------------------------------

namespace {

// The same with ATen, which is differentiable.
Tensor softmax_backward(const SoftmaxBwdCall& c) {
  const Tensor &dy = c.dy, &y = c.y;
  if (!at::GradMode::is_enabled()) return compute_by(c.tensors(keys_of), c);
  if (direct(c.tensors(keys_of))) c.tensors(check_all_memory);  // ATen's operations check none
  const Tensor wide_dy = dy.to(acc_dtype(y)), wide_y = y.to(acc_dtype(y));
  if (c.log) {
    const Tensor kept = c.leaves_out ? wide_dy.masked_fill(y.isneginf(), 0) : wide_dy;
    const Tensor dx = kept.sub(wide_y.exp().mul(kept.sum(-1, /*keepdim=*/true))).mul(c.scale).to(y.scalar_type());
    return c.leaves_out ? dx.masked_fill(y.isneginf(), 0) : dx;
  }
  const Tensor dot = wide_dy.mul(wide_y).sum(-1, /*keepdim=*/true);
  const Tensor dx = wide_dy.sub(dot).mul(wide_y).mul(c.scale).to(y.scalar_type());
  return c.leaves_out ? dx.masked_fill(y.eq(0), 0) : dx;
}

struct SoftmaxBackward : SavingNode {
  enum { kY, kMask };  // the mask, if it has a gradient, for its shape and dtype
  const double scale;
  const bool leaves_out, log;

  // An added mask leaves out what its -inf meets. Only the logarithm must be told, since 0 is its own gradient.
  explicit SoftmaxBackward(const SoftmaxCall& c)
      : scale(c.scale), leaves_out(c.causal || (c.log ? present(c.mask) : dtype_of(c.mask) == at::kBool)), log(c.log) {}

  std::string name() const override { return "SoftmaxBackward"; }
  std::string key() const override { return key_of(scale, leaves_out, log); }

  variable_list gradients(variable_list&& grads) override {
    variable_list list = no_gradients();
    if (!grads[0].defined()) return list;
    const Tensor& dy = grads[0];
    const Tensor result = saved(kY), additive = saved(kMask);
    if (!additive.defined() || !wants(1)) {
      list[0] = softmax_backward({dy, result, scale, leaves_out, log});
      return list;
    }
    // Unrounded before the sum over the mask's broadcast dimensions, and never in a dtype other than the mask's.
    const Tensor dlogits = softmax_backward({dy, result.to(acc_dtype(result)), 1.0, leaves_out, log});
    if (wants(0)) list[0] = dlogits.mul(scale).to(result.scalar_type());
    list[1] = dlogits.sum_to_size_symint(additive.sym_sizes()).to(additive.scalar_type());
    return list;
  }
};

}  // namespace

Tensor record(c10::DispatchKeySet keys, const SoftmaxCall& call) {
  const auto& [input, mask, scale, causal, log] = call;
  // Backward reads y, which needs as many digits as a mask that is wider than the input.
  const auto dtype = present(mask) && mask->requires_grad() ? c10::promoteTypes(input.scalar_type(), mask->scalar_type())
                                                            : input.scalar_type();
  const Tensor wide = input.to(dtype);
  const SoftmaxCall of_wide{wide, mask, scale, causal, log};
  Tensor y = below_autograd(keys, of_wide);
  const OptionalTensor& kept = present(mask) && mask->requires_grad() ? mask : kAbsent;
  set_history(std::make_unique<SoftmaxBackward>(of_wide), {wide, mask}, {y}, {y, kept});
  return y.to(input.scalar_type());
}

static const Verb<SoftmaxCall> softmax_verb;
static const Part<SoftmaxBwdCall> softmax_part;

}  // namespace kf
