// The operator `reduce`: any dimensions of any strides, as steps of the one form that kernels take.
//
// Dimensions are ordered by stride, so that memory is read in order, and merged if possible. Each group of neighbouring reduced
// dimensions is one step, from the innermost outwards: (outer, reduced, inner). The first step maps; the others add up its
// sums, kept in the accumulator type; the last one divides for the mean.
#include <ATen/WrapDimUtilsMulti.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "pointwise.h"
#include "reduce.h"
#include "verb.h"

namespace kf {
namespace {

// Dimensions from the outermost in memory inwards; expanded ones, which have no stride, come first.
at::DimVector memory_order(const Tensor& t) {
  at::DimVector order(t.dim());
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](int64_t d) { return t.stride(d) ? t.stride(d) : std::numeric_limits<int64_t>::max(); };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rank(a) > rank(b); });
  return order;
}

// The reduction that is left: its dimensions of more than one element, from the outermost in memory inwards.
struct Remainder {
  Tensor memory;
  Map map;
  at::DimVector sizes, strides;
  c10::SmallVector<bool, 8> reduced;

  // Whether a dimension and the next lie as one.
  bool is_joined(size_t d) const { return strides[d] == strides[d + 1] * sizes[d + 1]; }

  // The dimensions to reduce next, [begin, end): the innermost that lie as one; none if only the map is left.
  std::pair<size_t, size_t> next() const {
    size_t end = sizes.size();
    while (end > 0 && !reduced[end - 1]) --end;
    size_t begin = end ? end - 1 : 0;
    while (begin > 0 && reduced[begin - 1] && is_joined(begin - 1)) --begin;
    return {begin, end};
  }
  bool last() const {
    const auto* const begin = reduced.begin() + next().first;
    return std::find(reduced.begin(), begin, true) == begin;
  }

  // Size and stride of the dimensions [begin, end) as one; none if they lie apart.
  std::optional<std::pair<int64_t, int64_t>> merged(size_t begin, size_t end) const {
    for (size_t d = begin; d + 1 < end; ++d)
      if (!is_joined(d)) return std::nullopt;
    const int64_t size = std::accumulate(sizes.begin() + begin, sizes.begin() + end, int64_t{1}, std::multiplies<>());
    return std::pair(size, begin < end ? strides[end - 1] : 1);
  }
  // Whether the next step has the form that kernels take.
  bool ready() const {
    const auto [begin, end] = next();
    return merged(0, begin) && merged(end, sizes.size());
  }

  void set_dense(Tensor dense) {
    memory = std::move(dense);
    strides = c10::contiguous_strides(sizes);
  }

  // Reduces the next dimensions to a dense tensor of `dtype`.
  void step(const Backend& backend, at::ScalarType dtype, double divisor) {
    const auto [begin, end] = next();
    const auto [outer, outer_stride] = *merged(0, begin);
    const auto [count, stride] = *merged(begin, end);
    const auto [inner, inner_stride] = *merged(end, sizes.size());
    Tensor out = allocate({outer * inner}, memory.options().dtype(dtype));
    constexpr Kernels reduce_kernels{reduce_cpu, reduce_cuda};
    reduce_kernels(backend,
                   {map, memory.const_data_ptr(), memory.scalar_type(), outer, count, inner, outer_stride, stride, inner_stride,
                    divisor, memory.device()},
                   out);
    sizes.erase(sizes.begin() + begin, sizes.begin() + end);
    reduced.erase(reduced.begin() + begin, reduced.begin() + end);
    set_dense(std::move(out));
    map = Map::kNone;
  }
};

at::DimVector result_shape(const Tensor& input, const std::bitset<64>& reduced, bool keepdim) {
  at::DimVector shape;
  for (int64_t d = 0; d < input.dim(); ++d) {
    if (!reduced[d]) shape.push_back(input.size(d));
    else if (keepdim) shape.push_back(1);
  }
  return shape;
}

// The sum of map(input) over the dimensions in `reduced`, or its mean. There are elements.
Tensor reduced_by(const Backend& backend, const Tensor& input, Map map, bool mean, const std::bitset<64>& reduced, bool keepdim,
                  at::ScalarType dtype) {
  const auto order = memory_order(input);
  Remainder rest{input, map};
  at::DimVector kept;
  int64_t count = 1;
  for (const int64_t d : order) {
    if (reduced[d]) count *= input.size(d);
    if (input.size(d) == 1) continue;
    if (!reduced[d]) kept.push_back(d);
    rest.sizes.push_back(input.size(d));
    rest.strides.push_back(input.stride(d));
    rest.reduced.push_back(reduced[d]);
  }
  if (!rest.ready()) rest.set_dense(input.permute(order).contiguous());  // too many strides: a dense copy in the same order
  while (!rest.last()) rest.step(backend, dtype == at::kDouble ? at::kDouble : acc_dtype(input), 1.0);
  rest.step(backend, dtype, mean ? static_cast<double>(count) : 1.0);
  at::DimVector back(kept.size());
  std::iota(back.begin(), back.end(), 0);
  std::sort(back.begin(), back.end(), [&](int64_t a, int64_t b) { return kept[a] < kept[b]; });
  return rest.memory.view(rest.sizes).permute(back).contiguous().view(result_shape(input, reduced, keepdim));
}

}  // namespace

bool accepts(const ReduceCall& c) {
  return readable(c.input) && supported(c.dtype.value_or(c.input.scalar_type())) &&
         (c.kind == "sum_squared" || c.kind == "mean_abs");
}

Tensor compute(const Backend& backend, const ReduceCall& c) {
  const auto reduced = at::dim_list_to_bitset(c.dim.empty() ? at::OptionalIntArrayRef() : c.dim, c.input.dim());
  const auto result = c.dtype.value_or(c.input.scalar_type());
  const bool mean = c.kind == "mean_abs";
  check_memory(c.input);
  if (c.input.numel()) return reduced_by(backend, c.input, mean ? Map::kAbs : Map::kSquare, mean, reduced, c.keepdim, result);
  const double empty = mean ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  return allocate(result_shape(c.input, reduced, c.keepdim), c.input.options().dtype(result)).fill_(empty);
}

Tensor sum_to(const Backend& backend, const Tensor& input, at::IntArrayRef shape, at::ScalarType dtype) {
  TORCH_CHECK(input.dim() <= 64, "only tensors with up to 64 dims are supported");
  std::bitset<64> reduced;
  const int64_t leading = input.dim() - static_cast<int64_t>(shape.size());
  for (int64_t d = 0; d < input.dim(); ++d) reduced[d] = d < leading || shape[d - leading] != input.size(d);
  return reduced_by(backend, input, Map::kNone, /*mean=*/false, reduced, /*keepdim=*/true, dtype).view(shape);
}

// ---- Autograd. Gradients are pointwise chains.
// -------------------------------------------------------------------------------

namespace {

// dy, with the shape of x.
Tensor expanded(const Tensor& dy, const Tensor& x, at::IntArrayRef dim, bool keepdim) {
  Tensor result = dy;
  if (!keepdim) {
    std::vector<bool> reduced(x.dim(), dim.empty());
    for (const auto d : dim)
      if (x.dim()) reduced[d < 0 ? d + x.dim() : d] = true;
    for (int64_t d = 0; d < x.dim(); ++d)
      if (reduced[d]) result = result.unsqueeze(d);
  }
  return result.expand_symint(x.sym_sizes());
}

// dx = 2 x dy, or sign(x) dy / n: the gradient of one operand of a chain that has x twice, in x's dtype. It is computed in dy's
// type, which must not be narrower than fp64 x.
Tensor reduce_backward(const Tensor& given, const Tensor& x, const ReduceCall& c) {
  const Tensor dy = x.scalar_type() == at::kDouble ? given.to(at::kDouble) : given;
  if (c.kind == "sum_squared")
    return std::get<0>(
        pointwise_bwd({expanded(dy, x, c.dim, c.keepdim), x, x, "mul", "identity", 2.0, 0.0, {}, {true, false}}));
  const c10::SymInt outputs = dy.sym_numel(), inputs = x.sym_numel();
  const auto known_outputs = outputs.maybe_as_int(), known_inputs = inputs.maybe_as_int();
  double factor = 1.0;
  Tensor scaled = dy;
  if (known_outputs && known_inputs) {
    factor = *known_inputs ? static_cast<double>(*known_outputs) / static_cast<double>(*known_inputs) : 1.0;
  } else {  // a number unknown during tracing cannot be an argument
    scaled = dy.div(at::Scalar(inputs / outputs));
  }
  return std::get<1>(
      pointwise_bwd({expanded(scaled, x, c.dim, c.keepdim), x, x, "gate", "sign", factor, 0.0, {}, {false, true}}));
}

struct ReduceBackward : SavingNode {
  const std::vector<int64_t> dim;
  const bool keepdim, mean;

  explicit ReduceBackward(const ReduceCall& c) : dim(c.dim.vec()), keepdim(c.keepdim), mean(c.kind == "mean_abs") {}

  std::string name() const override { return "ReduceBackward"; }
  std::string key() const override { return key_of(dim, keepdim, mean); }

  variable_list gradients(variable_list&& grads) override {
    if (!grads[0].defined()) return no_gradients();
    const Tensor x = saved(0), &dy = grads[0];
    const ReduceCall call{x, dim, keepdim, mean ? "mean_abs" : "sum_squared", dy.scalar_type()};
    return at::GradMode::is_enabled() ? differentiate(reference(call), {x}, dy) : variable_list{reduce_backward(dy, x, call)};
  }
};

}  // namespace

Tensor record(c10::DispatchKeySet keys, const ReduceCall& call) {
  Tensor y = below_autograd(keys, call);
  set_history(std::make_unique<ReduceBackward>(call), {call.input}, {y}, {call.input});
  return y;
}

static const Verb<ReduceCall> reduce_verb;

}  // namespace kf
