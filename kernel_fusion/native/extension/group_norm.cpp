// Group norms: y = act(norm(input + add) * weight', + bias') (kernels/group_norm.cuh). `add`, `scale` and `shift` are (N, C).
// The kernels read contiguous tensors and channels last; others are copied. The result lies as core/group_norm.py says. CPU
// tensors, and add, scale and shift of the input's shape, take the definition.
#include <ATen/core/Tensor.h>
#include <ATen/ops/alias_ops.h>

#include <algorithm>
#include <bit>

#include "cuda/launcher.h"
#include "cuda/sum_partials.h"
#include "shared/group_norm_args.h"
#include "verb.h"

namespace kf {
namespace {

using GroupNormForward = std::tuple<Tensor, Tensor>;
using GroupNormGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Whether a position's channels lie together, and positions and samples in order, without gaps.
bool has_channels_last(const Tensor& t) {
  if (t.dim() < 3 || t.stride(1) != 1 || t.size(1) == 1) return false;
  int64_t expected = t.size(1), positions = 1;
  for (int64_t i = t.dim() - 1; i >= 1; --i) {
    const int64_t d = i == 1 ? 0 : i;
    if (d > 0) positions *= t.size(d);
    if (t.size(d) == 1) continue;
    if (t.stride(d) != expected) return false;
    expected *= t.size(d);
  }
  return positions > 1;
}

Tensor lying_like(const Tensor& t, bool channels_last, at::ScalarType dtype) {
  if (!channels_last) return allocate(t.sizes(), t.options().dtype(dtype));
  const Tensor moved = t.movedim(1, -1);
  return allocate(moved.sizes(), t.options().dtype(dtype)).movedim(-1, 1);
}

// The tensor itself if it lies so, else a copy.
Tensor laid_out(const Tensor& t, bool channels_last) {
  if (!channels_last) return t.contiguous();
  return has_channels_last(t) ? t : t.movedim(1, -1).contiguous().movedim(-1, 1);
}

// ---- CUDA: the sizes of a sample -> steps -> keys -> launches

constexpr GroupNormRule kGroupRule;

int64_t power_from(int64_t n) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(n, 1)))); }

// Threads for a line of this many vectors: about four vectors each, but neighbours read together.
int64_t line_of(int64_t vectors, int64_t threads) {
  return std::min(threads, std::max(std::min<int64_t>(32, power_from(vectors)), power_from(ceil_div(vectors, 4))));
}

// The tensors that a norm reads beside x, as kernels need them.
struct Around {
  Tensor weight, bias, add, scale, shift;
  template <class Call> explicit Around(const Call& c) {
    const auto dense = [](const OptionalTensor& t) { return present(t) ? t->contiguous() : Tensor(); };
    weight = dense(c.weight), bias = dense(c.bias), add = dense(c.add), scale = dense(c.scale), shift = dense(c.shift);
  }
};

// One norm: how it is divided, and the launches of its steps.
struct GroupNormRun {
  const Tensor& x;
  const Around& around;
  GroupNormArgs args{};
  GroupNormSpec spec{};
  GroupNormAccess access;
  int64_t groups, blocks;  // of pieces
  bool is_row;

  // `y` is dy in backward, and the other result or gradient lies like x.
  GroupNormRun(const Tensor& x, const Tensor& y, const Around& around, int64_t groups, std::string_view activation, bool last)
      : x(x), around(around), groups(groups) {
    args.samples = x.size(0), args.channels = x.size(1), args.positions = x.numel() / (x.size(0) * x.size(1));
    args.depth = args.channels / groups;
    args.x = x.const_data_ptr();
    args.weight = data_or_null(around.weight), args.bias = data_or_null(around.bias), args.add = data_or_null(around.add);
    args.scale = data_or_null(around.scale), args.shift = data_or_null(around.shift);
    const auto type = [](const Tensor& t) { return t.defined() ? cpu_dtype(t.scalar_type()) : Dtype::kAbsent; };
    spec.x = type(x), spec.y = type(y), spec.weight = type(around.weight), spec.bias = type(around.bias);
    spec.add = type(around.add), spec.scale = type(around.scale), spec.shift = type(around.shift);
    spec.activation = code_of(activation), spec.channels_last = last;
    divide();
    access.align = alignment_of_rows(x), access.align_out = alignment_of_rows(y);
  }

  // Tensors begin at any address; what follows are whole vectors.
  int32_t alignment_of_rows(const Tensor& t) const {
    const int64_t bytes = access.vec * size_of(t.scalar_type());
    return alignment_within(t.const_data_ptr(), bytes, bytes);
  }

  void divide() {
    const int64_t most = kVectorBytes / size_of(x.scalar_type()), row = args.depth * args.positions;
    const bool last = spec.channels_last;
    is_row = !last && row <= kGroupRule.row;
    access.vec = static_cast<int>(dividing_power(last ? args.channels : args.positions, most));
    access.threads = kGroupRule.threads;
    if (last) {
      access.lanes = tile_lanes(args.channels / access.vec);
      const int64_t span = access.lanes * access.vec;
      args.piece = std::max(ceil_div(kGroupRule.tile, span), ceil_div(args.positions, kGroupRule.tiles));
      args.pieces = ceil_div(args.positions, args.piece);
      blocks = args.samples * args.pieces * ceil_div(args.channels, span);
      return;
    }
    const int64_t cut = std::max<int64_t>(kGroupRule.piece, ceil_div(ceil_div(args.positions, kGroupRule.pieces), most) * most);
    args.piece = is_row || args.positions <= cut ? args.positions : cut;
    args.pieces = ceil_div(args.positions, args.piece);
    const int64_t vectors = args.piece / access.vec;
    const int64_t row_threads = kGroupRule.row_threads / (x.scalar_type() == at::kDouble ? 2 : 1);  // more registers each
    if (is_row)
      access.threads = static_cast<int>(std::clamp<int64_t>(power_from(ceil_div(row, kGroupRule.per_thread)), 32, row_threads));
    access.lanes = static_cast<int>(line_of(vectors, access.threads));
    // A row's lines have a channel each at a time.
    if (is_row)
      access.lanes = static_cast<int>(std::clamp<int64_t>(access.threads / power_from(args.depth), access.lanes,
                                                          std::max<int64_t>(access.lanes, power_from(vectors))));
    blocks = ceil_div(args.samples * args.channels * args.pieces, access.threads / access.lanes);
  }

  int64_t rows() const { return args.samples * groups; }
  Tensor scratch(int64_t count, int64_t each) const { return allocate({count, each}, x.options().dtype(acc_dtype(x))); }

  void step(GroupStep which, int64_t count, driver::Stream stream) {
    GroupNormSpec of_step = spec;
    of_step.step = which;
    launch(find_kernel({x.device(), of_step, access}, stream), count, 1, stream, &args);
  }
};

void group_norm_cuda(const Tensor& x, const GroupNormFwdCall& c, bool channels_last, Tensor& y, Tensor& stats) {
  const Around around(c);
  GroupNormRun run(x, y, around, c.num_groups, c.activation, channels_last);
  run.args.y = y.data_ptr(), run.args.stats = stats.data_ptr();
  run.args.eps = c.eps, run.args.scale_offset = c.scale_offset;
  const OnDevice on(x.device());
  if (run.is_row) return run.step(GroupStep::kRow, run.rows(), on.stream);
  const Tensor parts = run.scratch(3, run.args.samples * run.args.channels * run.args.pieces);
  run.args.parts = parts.data_ptr();
  run.step(GroupStep::kMoments, run.blocks, on.stream);
  run.step(GroupStep::kFinish, run.rows(), on.stream);
  run.step(GroupStep::kApply, run.blocks, on.stream);
}

void group_norm_bwd_cuda(const Tensor& x, const Tensor& dy, const GroupNormBwdCall& c, bool channels_last,
                         GroupNormGradients& gradients) {
  const Around around(c);
  GroupNormRun run(x, dy, around, c.num_groups, c.activation, channels_last);
  auto& [dx, dweight, dbias, dadd, dscale, dshift] = gradients;
  const Tensor stats = c.stats.contiguous();
  auto& args = run.args;
  run.spec.sums_x = dadd.defined();
  args.dy = dy.const_data_ptr(), args.y = memory_or_null(dx), args.stats = const_cast<void*>(stats.const_data_ptr());
  args.dadd = memory_or_null(dadd), args.dscale = memory_or_null(dscale), args.dshift = memory_or_null(dshift);
  args.scale_offset = c.scale_offset;
  const int64_t sums_each = run.spec.sums_x ? 3 : 2;
  const Tensor sums = run.scratch(sums_each, args.samples * args.channels), means = run.scratch(2, run.rows());
  args.sums = sums.data_ptr(), args.means = means.data_ptr();
  const PartialRows of_samples(x, args.samples, args.channels);
  args.pitch = of_samples.pitch;
  if (dweight.defined()) args.dweight = of_samples.data(0);
  if (dbias.defined()) args.dbias = of_samples.data(1);
  const OnDevice on(x.device());
  if (run.is_row) {
    run.step(GroupStep::kRowBwd, run.rows(), on.stream);
  } else {
    const Tensor parts = run.scratch(sums_each, args.samples * args.channels * args.pieces);
    args.parts = parts.data_ptr();
    run.step(GroupStep::kSums, run.blocks, on.stream);
    run.step(GroupStep::kFinishBwd, run.rows(), on.stream);
    if (dx.defined()) run.step(GroupStep::kDx, run.blocks, on.stream);
  }
  if (dweight.defined()) sum_partials(of_samples, dweight, dbias, on.stream, /*any=*/true);
  else if (dbias.defined()) sum_partials(of_samples, dbias, Tensor(), on.stream, /*any=*/true, 1);
}

// On the CPU only rehearsals come here.
constexpr Kernels group_norm_kernels{+[](const Tensor&, const GroupNormFwdCall&, bool, Tensor&, Tensor&) {}, group_norm_cuda};
constexpr Kernels group_norm_bwd_kernels{
    +[](const Tensor&, const Tensor&, const GroupNormBwdCall&, bool, GroupNormGradients&) {}, group_norm_bwd_cuda};

// ---- Checks

// Whether an absent tensor or one of this shape goes with the input.
bool goes_with(const OptionalTensor& t, const Tensor& input, int64_t dims, int64_t first) {
  if (!present(t)) return true;
  if (t->layout() != at::kStrided || t->device() != input.device() || !mixes(input.scalar_type(), t->scalar_type()) ||
      t->dim() != dims)
    return false;
  for (int64_t d = 0; d < dims; ++d)
    if (!alike(t->sym_size(d), input.sym_size(first + d))) return false;
  return true;
}

template <class Call> bool takes(const Call& c) {
  const Tensor& x = c.input;
  if (!readable(x) || !as_on_cuda(x) || x.dim() < 2 || c.num_groups < 1) return false;
  const auto channels = x.sym_size(1);
  if (!possible((channels % c.num_groups).sym_eq(0)) || known(x.sym_numel().sym_eq(0))) return false;
  if (known(x.sym_numel().sym_eq(c.num_groups))) return false;  // rows of one element, of which PyTorch's refuses one
  return goes_with(c.weight, x, 1, 1) && goes_with(c.bias, x, 1, 1) && goes_with(c.add, x, 2, 0) &&
         goes_with(c.scale, x, 2, 0) && goes_with(c.shift, x, 2, 0);
}

GroupNormFwdCall forward_of(const GroupNormCall& c) {
  return {c.input, c.num_groups, c.weight, c.bias, c.add, c.scale, c.shift, c.eps, c.scale_offset, c.activation, c.out_dtype};
}
GroupNormCall verb_of(const GroupNormFwdCall& c) {
  return {c.input, c.num_groups, c.weight, c.bias, c.add, c.scale, c.shift, c.eps, c.scale_offset, c.activation, c.out_dtype};
}

}  // namespace

bool accepts(const GroupNormCall& c) { return takes(c) && (!c.out_dtype || mixes(c.input.scalar_type(), *c.out_dtype)); }

GroupNormForward compute(const Backend& backend, const GroupNormFwdCall& c) {
  TORCH_CHECK(accepts(verb_of(c)), "kernel_fusion::group_norm_fwd: arguments that its kernels do not take");
  code_of(c.activation);
  c.tensors(check_all_memory);
  const bool last = has_channels_last(c.input);
  const Tensor x = laid_out(c.input, last);
  Tensor y = lying_like(x, last, c.out_dtype.value_or(x.scalar_type()));
  Tensor stats = allocate({2, x.size(0), c.num_groups}, x.options().dtype(acc_dtype(x)));
  group_norm_kernels(backend, x, c, last, y, stats);
  return {y, stats};
}

Tensor compute(const Backend& backend, const GroupNormCall& c) { return std::get<0>(compute(backend, forward_of(c))); }

GroupNormGradients compute(const Backend& backend, const GroupNormBwdCall& c) {
  const Tensor& input = c.input;
  TORCH_CHECK(takes(c) && readable(c.dy) && mixes(input.scalar_type(), c.dy.scalar_type()) && c.dy.device() == input.device() &&
                  c.dy.sizes().equals(input.sizes()) && c.stats.device() == input.device() &&
                  c.stats.scalar_type() == acc_dtype(input) && c.stats.layout() == at::kStrided &&
                  c.stats.sizes().equals({2, input.size(0), c.num_groups}),
              "kernel_fusion::group_norm_bwd: arguments that its kernels do not take");
  code_of(c.activation);
  c.tensors(check_all_memory);
  const bool last = has_channels_last(input);
  const Tensor x = laid_out(input, last), dy = laid_out(c.dy, last);
  const auto wanted = [&](int i, const OptionalTensor& t) {
    return c.output_mask[i] && present(t) ? allocate_like(*t, at::MemoryFormat::Contiguous) : Tensor();
  };
  GroupNormGradients gradients{c.output_mask[0] ? lying_like(x, last, x.scalar_type()) : Tensor(),
                               wanted(1, c.weight),
                               wanted(2, c.bias),
                               wanted(3, c.add),
                               wanted(4, c.scale),
                               wanted(5, c.shift)};
  group_norm_bwd_kernels(backend, x, dy, c, last, gradients);
  std::apply([&](auto&... each) { ((each.defined() ? void() : void(each = allocate({0}, x.options()))), ...); }, gradients);
  return gradients;
}

// ---- Autograd

namespace {

struct GroupNormBackward : SavingNode {
  enum { kInput, kAround, kStats = kAround + 5 };
  const int64_t num_groups;
  const double eps, scale_offset;
  const std::string activation;

  explicit GroupNormBackward(const GroupNormFwdCall& c)
      : num_groups(c.num_groups), eps(c.eps), scale_offset(c.scale_offset), activation(c.activation) {}

  std::string name() const override { return "GroupNormBackward"; }
  std::string key() const override { return key_of(num_groups, eps, scale_offset, activation); }

  variable_list gradients(variable_list&& grads) override {
    variable_list list = no_gradients();
    if (!grads[0].defined()) return list;
    std::array<OptionalTensor, 6> tensors;
    std::array<bool, 6> wanted;
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i] = optional(saved(i));
      wanted[i] = wants(i);
    }
    if (at::GradMode::is_enabled()) return differentiable(grads[0], tensors, wanted, std::move(list));
    const Tensor stats = saved(kStats);
    const auto& [x, w, b, add, scale, shift] = tensors;
    const GroupNormBwdCall call{grads[0], *x, stats, num_groups, w, b, add, scale, shift, scale_offset, activation, wanted};
    const auto found = compute_by(call.tensors(keys_of), call);
    const auto& [dx, dweight, dbias, dadd, dscale, dshift] = found;
    const Tensor* const each[] = {&dx, &dweight, &dbias, &dadd, &dscale, &dshift};
    for (size_t i = 0; i < wanted.size(); ++i)
      if (wanted[i]) list[i] = *each[i];
    return list;
  }

  // The gradients as differentiable functions of everything, by the definition. Its inputs are aliases, because one may depend
  // on another.
  variable_list differentiable(const Tensor& dy, std::array<OptionalTensor, 6> tensors, const std::array<bool, 6>& wanted,
                               variable_list list) const {
    variable_list inputs;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i]) tensors[i] = at::_ops::alias::call(*tensors[i]);
      if (wanted[i]) inputs.push_back(*tensors[i]);
    }
    const auto& [x, w, b, add, scale, shift] = tensors;
    const Tensor y =
        reference(GroupNormCall{*x, num_groups, w, b, add, scale, shift, eps, scale_offset, activation, dy.scalar_type()});
    auto found = differentiate(y, inputs, dy);
    for (size_t i = 0, next = 0; i < wanted.size(); ++i)
      if (wanted[i]) list[i] = std::move(found[next++]);
    return list;
  }
};

// The result is that of torch.nn.functional.group_norm, whose input is not copied to fp32 first.
Tensor group_norm_autocast(c10::DispatchKeySet, const GroupNormCall& given) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  static const bool widened = has_kernel("aten::group_norm", c10::DispatchKey::AutocastCUDA);
  const auto type = given.input.scalar_type();
  GroupNormCall call = given;
  if (widened && !call.out_dtype && (type == at::kHalf || type == at::kBFloat16)) call.out_dtype = at::kFloat;
  return call_boxed(operator_of<GroupNormCall>(), call);
}

}  // namespace

Tensor record(c10::DispatchKeySet keys, const GroupNormCall& call) {
  const GroupNormFwdCall forward = forward_of(call);
  const auto [y, stats] = below_autograd(keys, forward);
  const auto& [input, groups, weight, bias, add, scale, shift, eps, offset, activation, dtype] = call;
  set_history(std::make_unique<GroupNormBackward>(forward), {input, weight, bias, add, scale, shift}, {y},
              {input, weight, bias, add, scale, shift, stats});
  return y;
}

static const Verb<GroupNormCall> group_norm_verb;
static const Part<GroupNormFwdCall> group_norm_fwd_part;
static const Part<GroupNormBwdCall> group_norm_bwd_part;
static const Implements group_norm_at_autocast{
    GroupNormCall::kName, {c10::DispatchKey::AutocastCUDA}, Boxed<group_norm_autocast>::kernel};

}  // namespace kf
