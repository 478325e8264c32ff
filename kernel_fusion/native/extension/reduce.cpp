// The operator `reduce`: any dimensions of any strides, as steps of the one form that kernels take.
//
// Dimensions are ordered by stride, so that memory is read in order, and merged if possible. Each group of neighbouring reduced
// dimensions is one step, from the innermost outwards: (outer, reduced, inner). The first step maps; the others add up its
// sums, kept in the accumulator type; the last one divides for the mean.
#include <ATen/WrapDimUtilsMulti.h>

#include <algorithm>
#include <limits>

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

struct Level {
  int64_t size, stride;
  bool reduced;
};
using Levels = c10::SmallVector<Level, 8>;

// Dimensions from the outermost in memory inwards; expanded ones, which have no stride, come first.
c10::SmallVector<int64_t, 8> memory_order(const Tensor& t) {
  c10::SmallVector<int64_t, 8> order;
  for (int64_t d = 0; d < t.dim(); ++d) order.push_back(d);
  const auto rank = [&](int64_t d) { return t.stride(d) ? t.stride(d) : std::numeric_limits<int64_t>::max(); };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rank(a) > rank(b); });
  return order;
}

bool mergeable(const Level& outer, const Level& inner) { return outer.stride == inner.stride * inner.size; }

// Levels [begin, end) as one, or none if their strides do not allow it.
std::optional<Level> merged(const Levels& levels, size_t begin, size_t end) {
  Level all{1, 1, false};
  for (size_t i = end; i-- > begin;) {
    if (i + 1 < end && !mergeable(levels[i], all)) return std::nullopt;
    if (i + 1 == end) all.stride = levels[i].stride;
    all.size *= levels[i].size;
  }
  return all;
}

// Drops levels of one element, and merges neighbours of one kind if their strides allow it.
Levels coalesced(const Levels& levels) {
  Levels result;
  for (const auto& level : levels) {
    if (level.size == 1) continue;
    if (!result.empty() && result.back().reduced == level.reduced && mergeable(result.back(), level)) {
      result.back() = {result.back().size * level.size, level.stride, level.reduced};
    } else {
      result.push_back(level);
    }
  }
  return result;
}

void make_dense(Levels& levels) {
  int64_t stride = 1;
  for (size_t i = levels.size(); i-- > 0; stride *= levels[i].size) levels[i].stride = stride;
}

// The level to reduce next, [begin, end): the last one; none if only the map is left.
std::pair<size_t, size_t> innermost_reduced(const Levels& levels) {
  size_t end = levels.size();
  while (end > 0 && !levels[end - 1].reduced) --end;
  return {end ? end - 1 : 0, end};
}

// The state between steps: `memory` holds what is left to reduce, laid out as `levels` say.
struct Steps {
  const Backend& backend;
  Tensor memory;
  Levels levels;
  Map map;

  // Reduces one group of levels to a dense tensor of `dtype`.
  void step(at::ScalarType dtype, double divisor) {
    const auto [begin, end] = innermost_reduced(levels);
    const auto outer = merged(levels, 0, begin), reduced = merged(levels, begin, end),
               inner = merged(levels, end, levels.size());
    Tensor out = allocate({outer->size * inner->size}, memory.options().dtype(dtype));
    backend.reduce({map, memory.const_data_ptr(), memory.scalar_type(), outer->size, reduced->size, inner->size, outer->stride,
                    reduced->stride, inner->stride, divisor, memory.device()},
                   out);
    levels.erase(levels.begin() + begin, levels.begin() + end);
    make_dense(levels);
    levels = coalesced(levels);
    memory = std::move(out);
    map = Map::kNone;
  }

  // Whether the next step has the form that kernels take.
  bool ready() const {
    const auto [begin, end] = innermost_reduced(levels);
    return merged(levels, 0, begin) && merged(levels, end, levels.size());
  }

  bool last() const {
    return std::count_if(levels.begin(), levels.end(), [](const Level& l) { return l.reduced; }) <= 1;
  }
};

// The kept sizes in memory order, and each kept input dimension's place among them.
struct KeptDims {
  at::DimVector sizes, position;

  KeptDims(const Tensor& input, const c10::SmallVector<int64_t, 8>& order, const std::bitset<64>& reduced) {
    at::DimVector place(input.dim(), 0);
    for (const int64_t d : order) {
      if (reduced[d]) continue;
      place[d] = static_cast<int64_t>(sizes.size());
      sizes.push_back(input.size(d));
    }
    for (int64_t d = 0; d < input.dim(); ++d)
      if (!reduced[d]) position.push_back(place[d]);
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
  auto order = memory_order(input);
  const auto levels_of = [&](const Tensor& t) {
    Levels levels;
    for (const int64_t d : order) levels.push_back({t.size(d), t.stride(d), reduced[d]});
    return coalesced(levels);
  };
  Steps steps{backend, input, levels_of(input), map};
  if (!steps.ready()) {  // too many strides: a dense copy in the same order
    steps.memory = input.permute(order).contiguous();
    make_dense(steps.levels);
    steps.levels = coalesced(steps.levels);
  }
  const KeptDims kept(input, order, reduced);
  const int64_t outputs = c10::multiply_integers(kept.sizes);
  const double divisor = mean ? static_cast<double>(input.numel() / outputs) : 1.0;
  while (!steps.last()) steps.step(dtype == at::kDouble ? at::kDouble : acc_dtype(input), 1.0);
  steps.step(dtype, divisor);
  const auto shape = result_shape(input, reduced, keepdim);
  return steps.memory.view(kept.sizes).permute(kept.position).contiguous().view(shape);
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
