// The rotary embedding on CUDA: arguments -> key -> launch. A norm before it is Triton's.
#include <algorithm>
#include <limits>

#include "backends.h"
#include "cuda/launcher.h"
#include "shared/rotary_args.h"

namespace kf {
namespace {

constexpr int64_t kMostThreads = 256;

Tensor with_dense_columns(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

// The alignment of vectors of the columns of t.
int32_t alignment_of_vectors(const Tensor& t, int64_t vec) {
  int64_t steps = 0;
  for (int64_t d = 0; d + 1 < t.dim(); ++d)
    if (t.size(d) > 1) steps |= t.stride(d) * t.element_size();
  return alignment_within(t.const_data_ptr(), steps, vec * t.element_size());
}

// One launch: query and key, or their gradients, from `x` to `y`; undefined ones are passed over.
void launch_rotary(std::array<Tensor, 2> x, const std::array<Tensor, 2>& y, Tensor cos, Tensor sin,
                   const OptionalTensor& positions, RotarySpec spec) {
  if (cos.stride(-1) != 1 || !cos.strides().equals(sin.strides())) {
    cos = cos.contiguous();
    sin = sin.contiguous();
  }
  const Tensor& any = y[0].defined() ? y[0] : y[1];
  const int64_t tokens = any.size(1), count = any.size(0) * tokens, cols = any.size(3), half = cos.size(2);
  if (count > std::numeric_limits<int32_t>::max())
    driver::fail("rotary kernels take at most 2^31 - 1 tokens, got " + std::to_string(count) +
                 "; the backend 'eager' takes more");
  const int64_t vec = dividing_power(cols - 2 * half, dividing_power(half, kVectorBytes / any.element_size()));
  RotaryAccess access{.vec = static_cast<int>(vec),
                      .align_angles = std::min(alignment_of_vectors(cos, vec), alignment_of_vectors(sin, vec))};
  RotaryArgs args{};
  int64_t heads = 0;
  for (int i = 0; i < 2; ++i) {
    if (!y[i].defined()) continue;
    x[i] = with_dense_columns(x[i]);
    access.align = std::min(access.align, alignment_of_vectors(x[i], vec));
    access.align_out = std::min(access.align_out, alignment_of_vectors(y[i], vec));
    args.of[i] = {x[i].const_data_ptr(), y[i].data_ptr(), {}, {}};
    for (int d = 0; d < 3; ++d) {
      args.of[i].x_stride[d] = x[i].stride(d);
      args.of[i].y_stride[d] = y[i].stride(d);
    }
    args.heads[i] = static_cast<unsigned>(x[i].size(2));
    heads += x[i].size(2);
  }
  args.tokens = static_cast<unsigned>(tokens);
  args.cos = cos.const_data_ptr();
  args.sin = sin.const_data_ptr();
  args.table_rows = cos.size(1);
  args.table_stride[0] = cos.size(0) > 1 ? cos.stride(0) : 0;
  args.table_stride[1] = cos.stride(1);
  if (present(positions)) {
    access.positions = static_cast<int>(positions->element_size());
    args.positions = positions->const_data_ptr();
    args.position_stride[0] = positions->size(0) > 1 ? positions->stride(0) : 0;
    args.position_stride[1] = positions->stride(1);
  }
  // A power of two, so that few numbers of heads need a kernel of their own.
  const auto items = static_cast<uint64_t>(heads * (cols - half) / vec);
  access.threads = static_cast<int>(std::clamp<int64_t>(static_cast<int64_t>(std::bit_ceil(items)), 32, kMostThreads));
  spec.x = cpu_dtype(any.scalar_type());
  spec.angles = cpu_dtype(cos.scalar_type());
  spec.cols = static_cast<int>(cols);
  spec.half = static_cast<int>(half);
  const auto device = any.device();
  const OnDevice on(device);
  const auto& kernel = find_kernel({device, spec, access}, on.stream);
  launch(kernel, kernel.grid(count), 1, on.stream, &args);
}

}  // namespace

void rotary_cuda(const RotaryCall& c, Tensor& query, Tensor& key) {
  if (c.eps) return;  // in a rehearsal: these kernels are Triton's
  const auto type = query.scalar_type();
  const bool rounds = c.rounding == "hf" && query.element_size() == 2 && c.cos.scalar_type() == type;
  launch_rotary({c.query, present(c.key) ? *c.key : Tensor()}, {query, key}, c.cos, c.sin, c.positions,
                {.interleaved = c.interleaved, .rounds = rounds});
}

void rotary_bwd_cuda(const RotaryBwdCall& c, RotaryGradients& gradients) {
  if (c.eps) return;
  auto& [dquery, dkey, dquery_weight, dkey_weight] = gradients;
  if (!dquery.defined() && !dkey.defined()) return;
  const auto type = c.dy.scalar_type();
  launch_rotary({c.dy, present(c.dy_key) ? c.dy_key->to(type) : Tensor()}, {dquery, dkey}, c.cos, c.sin, c.positions,
                {.interleaved = c.interleaved, .backward = 1});
}

}  // namespace kf
