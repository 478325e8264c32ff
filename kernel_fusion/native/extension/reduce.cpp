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

#include "backends.h"
#include "dispatch.h"

namespace kf {

bool accepts(const ReduceVerbCall& c) {
  return readable(c.input) && supported(c.dtype.value_or(c.input.scalar_type())) &&
         (c.kind == "sum_squared" || c.kind == "mean_abs");
}

Tensor reference(const ReduceVerbCall& c) {
  static const auto& op = find_op("kernel_fusion::reduce_reference");
  return call_operator<Tensor>(op, c);
}

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
    backend.reduce({map, memory.const_data_ptr(), memory.scalar_type(), outer, count, inner, outer_stride, stride, inner_stride,
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
Tensor run(const Backend& backend, const Tensor& input, Map map, bool mean, const std::bitset<64>& reduced, bool keepdim,
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

Tensor reduce(const Backend& backend, const ReduceVerbCall& c) {
  const auto reduced = at::dim_list_to_bitset(c.dim.empty() ? at::OptionalIntArrayRef() : c.dim, c.input.dim());
  const auto result = c.dtype.value_or(c.input.scalar_type());
  const bool mean = c.kind == "mean_abs";
  check_memory(c.input);
  if (c.input.numel()) return run(backend, c.input, mean ? Map::kAbs : Map::kSquare, mean, reduced, c.keepdim, result);
  const double empty = mean ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  return allocate(result_shape(c.input, reduced, c.keepdim), c.input.options().dtype(result)).fill_(empty);
}

Tensor sum_to(const Backend& backend, const Tensor& input, at::IntArrayRef shape, at::ScalarType dtype) {
  TORCH_CHECK(input.dim() <= 64, "only tensors with up to 64 dims are supported");
  std::bitset<64> reduced;
  const int64_t leading = input.dim() - static_cast<int64_t>(shape.size());
  for (int64_t d = 0; d < input.dim(); ++d) reduced[d] = d < leading || shape[d - leading] != input.size(d);
  return run(backend, input, Map::kNone, /*mean=*/false, reduced, /*keepdim=*/true, dtype).view(shape);
}

namespace {

Tensor reduce_or_definition(const Backend& backend, const ReduceVerbCall& call) {
  return accepts(call) ? reduce(backend, call) : reference(call);
}

const Implements reduce_kernels("reduce", {&kCpu, &kCuda}, Implementation<reduce_call, reduce_or_definition>::kernel);

}  // namespace

}  // namespace kf
