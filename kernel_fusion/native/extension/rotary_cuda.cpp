// The rotary embedding on CUDA: from an operator's arguments to a kernel's key and its launch.
#include <algorithm>
#include <limits>

#include "cuda/launcher.h"
#include "cuda/sum_partials.h"
#include "rotary.h"
#include "shared/rotary_args.h"

namespace kf {
namespace {

constexpr int64_t kMostThreads = 256;

// The alignment that vectors of `vec` columns have in every head of t.
int32_t alignment_of_vectors(const Tensor& t, int64_t vec) {
  int64_t steps = 0;
  for (int64_t d = 0; d + 1 < t.dim(); ++d)
    if (t.size(d) > 1) steps |= t.stride(d) * t.element_size();
  return alignment_within(t.const_data_ptr(), steps, vec * t.element_size());
}

// Whether the kernels serve a call: with a norm, each lane must hold its part of a head in registers.
bool fits_registers(const RotaryCall& c) { return !c.eps || c.query.size(3) <= kLongestHead; }

// A launch that takes query and key, or their gradients, from `x` to `y`. A tensor that is undefined in `x` or `y` is passed
// over.
struct RotaryLaunch {
  RotarySpec spec;
  RotaryAccess access;
  RotaryNormArgs args{};
  std::array<Tensor, 2> x;
  Tensor cos, sin;
  int64_t examples, tokens, heads = 0;

  RotaryLaunch(std::array<Tensor, 2> given, const std::array<Tensor, 2>& y, const Tensor& c, const Tensor& s,
               const OptionalTensor& positions, RotarySpec of)
      : spec(of), x(std::move(given)), cos(c), sin(s) {
    if (cos.stride(-1) != 1 || !cos.strides().equals(sin.strides())) {
      cos = cos.contiguous();
      sin = sin.contiguous();
    }
    const Tensor& any = x[0].defined() ? x[0] : x[1];
    examples = any.size(0);
    tokens = any.size(1);
    const int64_t cols = any.size(3), half = cos.size(2), others = cols - 2 * half;
    if (examples * tokens > std::numeric_limits<int32_t>::max())
      driver::fail("rotary kernels take at most 2^31 - 1 tokens, got " + std::to_string(examples * tokens) +
                   "; the backend 'eager' takes more");
    // With a norm, the columns that are not rotated are also taken as pairs, and a single one as a vector.
    const int64_t apart = !spec.norm ? others : others % 2 == 0 ? others / 2 : 1;
    access.vec = static_cast<int>(dividing_power(apart, dividing_power(half, kVectorBytes / any.element_size())));
    access.align_angles = std::min(alignment_of_vectors(cos, access.vec), alignment_of_vectors(sin, access.vec));
    RotaryArgs& rotary = args.rotary;
    for (int i = 0; i < 2; ++i) {
      if (!x[i].defined()) continue;
      x[i] = with_dense_columns(x[i]);
      access.align = std::min(access.align, alignment_of_vectors(x[i], access.vec));
      rotary.of[i].x = x[i].const_data_ptr();
      set_strides(x[i], rotary.of[i].x_stride);
      rotary.heads[i] = static_cast<unsigned>(x[i].size(2));
      heads += x[i].size(2);
      if (!y[i].defined()) continue;
      access.align_out = std::min(access.align_out, alignment_of_vectors(y[i], access.vec));
      rotary.of[i].y = y[i].data_ptr();
      set_strides(y[i], rotary.of[i].y_stride);
    }
    rotary.tokens = static_cast<unsigned>(tokens);
    rotary.cos = cos.const_data_ptr();
    rotary.sin = sin.const_data_ptr();
    rotary.table_rows = cos.size(1);
    rotary.table_stride[0] = cos.size(0) > 1 ? cos.stride(0) : 0;
    rotary.table_stride[1] = cos.stride(1);
    if (present(positions)) {
      access.positions = static_cast<int>(positions->element_size());
      rotary.positions = positions->const_data_ptr();
      rotary.position_stride[0] = positions->size(0) > 1 ? positions->stride(0) : 0;
      rotary.position_stride[1] = positions->stride(1);
    }
    spec.x = cpu_dtype(any.scalar_type());
    spec.angles = cpu_dtype(cos.scalar_type());
    spec.cols = static_cast<int>(cols);
    spec.half = static_cast<int>(half);
  }

  static void set_strides(const Tensor& t, long long (&strides)[3]) {
    for (int d = 0; d < 3; ++d) strides[d] = t.stride(d);
  }

  // One block takes a token, and its warps take equal numbers of items.
  void without_norm() {
    const int64_t items = heads * (spec.cols - spec.half) / access.vec, rounds = ceil_div(items, kMostThreads);
    access.threads = static_cast<int>(ceil_div(ceil_div(items, rounds), 32) * 32);
    launch_over(examples * tokens, cos.device(), spec, access, &args.rotary);
  }

  // Divides the blocks between query and key in proportion to their heads, at least one each. Returns the number of blocks.
  int64_t split(const LoadedKernel& kernel) {
    int64_t wanted[2];
    for (int i = 0; i < 2; ++i) {
      args.rows[i] = examples * tokens * args.rotary.heads[i];
      wanted[i] = args.rows[i] > 0;
    }
    const int64_t rows = args.rows[0] + args.rows[1], grid = std::max(wanted[0] + wanted[1], kernel.grid(rows));
    const int64_t share = (args.rows[0] * grid + rows / 2) / rows;
    args.query_blocks = static_cast<unsigned>(std::clamp(share, wanted[0], grid - wanted[1]));
    return grid;
  }
};

// The weights as contiguous tensors. They are small, so a copy costs little.
struct RotaryWeights {
  std::array<Tensor, 2> weight;

  template <class Call> RotaryWeights(const Call& c, RotaryLaunch& to) {
    const OptionalTensor* given[] = {&c.query_weight, &c.key_weight};
    for (int i = 0; i < 2; ++i) {
      if (!to.x[i].defined() || !present(*given[i])) continue;
      weight[i] = (*given[i])->contiguous();
      to.args.weight[i] = weight[i].const_data_ptr();
      to.access.align_weights = std::min(to.access.align_weights, alignment_of_vectors(weight[i], to.access.vec));
    }
    const auto type = [](const Tensor& t) { return t.defined() ? cpu_dtype(t.scalar_type()) : Dtype::kAbsent; };
    to.spec.query_weight = type(weight[0]);
    // If there is no key, its weight's type is the query's, so that no further kernel is compiled.
    to.spec.key_weight = to.x[1].defined() ? type(weight[1]) : to.spec.query_weight;
    to.spec.offset = c.weight_offset != 0.0;
    to.access.threads = 0;
    to.args.eps = *c.eps;
    to.args.weight_offset = c.weight_offset;
  }
};

template <class Call> RotarySpec spec_of(const Call& c, const Tensor& query, bool backward) {
  const bool hf = c.rounding == "hf" && query.element_size() == 2;
  // Without a norm, products are rounded only in forward, and only if the angles have the query's type.
  const bool rounds = hf && (c.eps || (!backward && c.cos.scalar_type() == query.scalar_type()));
  return {.interleaved = c.interleaved, .rounds = rounds, .backward = backward, .norm = c.eps.has_value()};
}

}  // namespace

void rotary_cuda(const RotaryCall& c, Tensor& query, Tensor& key) {
  if (!fits_registers(c)) return;  // only a rehearsal comes here: such calls take Triton
  RotaryLaunch to({c.query, present(c.key) ? *c.key : Tensor()}, {query, key}, c.cos, c.sin, c.positions,
                  spec_of(c, c.query, false));
  if (!c.eps) return to.without_norm();
  const RotaryWeights weights(c, to);
  const auto device = to.cos.device();
  const OnDevice on(device);
  const auto& kernel = find_kernel({device, to.spec, to.access}, on.stream);
  const int64_t grid = to.split(kernel);
  launch(kernel, grid, 1, on.stream, &to.args);
}

void rotary_bwd_cuda(const RotaryBwdCall& c, RotaryGradients& gradients) {
  auto& [dquery, dkey, dquery_weight, dkey_weight] = gradients;
  const auto type = c.dy.scalar_type();
  const Tensor dy_key = present(c.dy_key) ? c.dy_key->to(type) : Tensor();
  if (!c.eps) {
    if (!dquery.defined() && !dkey.defined()) return;
    RotaryLaunch to({dquery.defined() ? c.dy : Tensor(), dkey.defined() ? dy_key : Tensor()}, {dquery, dkey}, c.cos, c.sin,
                    c.positions, spec_of(c, c.dy, true));
    return to.without_norm();
  }
  const bool wanted[] = {dquery.defined() || dquery_weight.defined(), dkey.defined() || dkey_weight.defined()};
  if ((!wanted[0] && !wanted[1]) || c.query->size(3) > kLongestHead) return;
  const auto x_type = c.query->scalar_type();
  RotaryLaunch to({wanted[0] ? c.dy.to(x_type) : Tensor(), wanted[1] ? dy_key.to(x_type) : Tensor()}, {dquery, dkey}, c.cos,
                  c.sin, c.positions, spec_of(c, *c.query, true));
  const RotaryWeights weights(c, to);
  std::array<Tensor, 2> x;
  for (int i = 0; i < 2; ++i) {
    if (!wanted[i]) continue;
    x[i] = with_dense_columns(i == 0 ? *c.query : *c.key);
    to.access.align = std::min(to.access.align, alignment_of_vectors(x[i], to.access.vec));
    to.args.x[i] = x[i].const_data_ptr();
    RotaryLaunch::set_strides(x[i], to.args.x_stride[i]);
  }
  to.spec.sums = dquery_weight.defined() || dkey_weight.defined();
  const auto device = to.cos.device();
  const OnDevice on(device);
  const auto& kernel = find_kernel({device, to.spec, to.access}, on.stream);
  const int64_t grid = to.split(kernel);
  if (!to.spec.sums) return launch(kernel, grid, 1, on.stream, &to.args);
  const PartialRows partials(*c.query, grid, to.spec.cols);
  for (int i = 0; i < 2; ++i) to.args.partials[i] = partials.data(i);
  to.args.partial_pitch = partials.pitch;
  launch(kernel, grid, 1, on.stream, &to.args);
  sum_partials(partials, dquery_weight, dkey_weight, on.stream);
}

}  // namespace kf
