// Pointwise chains on CUDA: from an operator's arguments to a kernel's key and its launch.
#include <algorithm>

#include "cuda/launcher.h"
#include "cuda/sum_partials.h"
#include "pointwise.h"
#include "shared/pointwise_args.h"

namespace kf {
namespace {

constexpr int kMaxDims = PointwiseArgs::kDims;
// The operands by their role in a kernel. kOut is y or da, kOutB is db or the bits that are written, and kA is a or the bits
// that are read.
enum Slot { kOut, kOutB, kDY, kA, kB };

// An iterator as the kernels see it: which operand has which role, and with which strides.
struct Iteration {
  const at::TensorIteratorBase& iter;
  std::array<int, kOperands> arg;  // the iterator's operand in each slot, or -1 for none
  std::vector<int64_t> shape;      // at least one dimension, the innermost first
  PointwiseAccess access{};
  bool wide = true;  // the kernel computes offsets in 64 bits

  Iteration(const at::TensorIteratorBase& iter, const std::array<int, kOperands>& arg)
      : iter(iter), arg(arg), shape(iter.shape().begin(), iter.shape().end()) {
    if (shape.empty()) shape.push_back(1);
    bool all_linear = true;
    for (int k = 0; k < kOperands; ++k) all_linear = all_linear && (!has(k) || linear(k));
    if (all_linear) shape.assign(1, iter.numel());
    describe_vectors();
    for (int k = 0; k < kOperands; ++k) describe(k);
    access.dims = static_cast<int>(shape.size());
  }

  bool has(int k) const { return arg[k] >= 0; }
  int64_t bytes(int k) const { return iter.element_size(arg[k]); }
  int64_t stride(int k, size_t dim) const {  // in bytes
    return dim < static_cast<size_t>(iter.ndim()) ? iter.strides(arg[k])[dim] : 0;
  }
  bool linear(int k) const {
    int64_t expected = bytes(k);
    for (int d = 0; d < iter.ndim(); ++d) {
      if (iter.shape()[d] != 1 && stride(k, d) != expected) return false;
      expected *= iter.shape()[d];
    }
    return true;
  }
  // Whether operand k repeats elements, so that caches hold them.
  bool repeats(int k) const {
    for (size_t d = 0; d < shape.size(); ++d)
      if (shape[d] > 1 && stride(k, d) == 0) return true;
    return false;
  }

  void describe_vectors() {
    int64_t widest = 2;
    bool all_repeat = true;
    for (int k = 0; k < kOperands; ++k) {
      if (!has(k)) continue;
      if (linear(k) || stride(k, 0) == bytes(k)) widest = std::max(widest, bytes(k));
      if (!linear(k) && !repeats(k)) all_repeat = false;
    }
    access.vec = static_cast<int>(kVectorBytes / widest);
    if (shape.size() == 1 || shape[0] % access.vec == 0) return;
    access.divisor = static_cast<int>(dividing_power(shape[0], access.vec));
    access.repeats = all_repeat;
  }

  Mode mode(int k) const {
    if (linear(k)) return Mode::kLinear;
    if (stride(k, 0) == 0) return Mode::kBroadcast;
    return stride(k, 0) == bytes(k) ? Mode::kVector : Mode::kStrided;
  }

  void describe(int k) {
    if (!has(k)) return;
    const auto m = mode(k);
    access.operands[k].mode = m;
    int64_t steps = 0;
    for (size_t d = 1; d < shape.size(); ++d) steps |= stride(k, d);
    if (m == Mode::kLinear || m == Mode::kVector)
      access.operands[k].align = alignment_within(iter.data_ptr(arg[k]), m == Mode::kVector ? steps : 0, access.vec * bytes(k));
    if (m != Mode::kLinear && !(m == Mode::kBroadcast && shape.size() == 1)) wide = false;
  }

  PointwiseArgs args(const Chain& chain, int64_t position) const {
    PointwiseArgs args{};
    for (int k = 0; k < kOperands; ++k) args.data[k] = has(k) ? iter.data_ptr(arg[k]) : nullptr;
    args.size = iter.numel();
    args.position = position;
    args.seed = chain.seed;
    args.scale = chain.scale;
    args.dropout_last = chain.dropout.last();
    for (size_t d = 0; d < shape.size(); ++d) {
      if (d + 1 < shape.size()) args.dim[d] = fast_divisor(static_cast<unsigned>(shape[d]));
      for (int k = 0; k < kOperands; ++k)
        if (has(k)) args.stride[d][k] = static_cast<unsigned>(stride(k, d) / bytes(k));
    }
    return args;
  }
};

// The spec of a chain with operands of these types, in the order of `Slot`.
PointwiseSpec spec_of(const Chain& chain, bool backward, const std::array<Dtype, kOperands>& types) {
  return {.combine = chain.combine,
          .activation = chain.activation,
          .dropout = chain.seed != nullptr,
          .a = chain.bits && backward ? Dtype::kBit : types[kA],
          .b = types[kB],
          .y = backward ? Dtype::kAbsent : types[kOut],
          .dy = types[kDY],
          .da = backward ? types[kOut] : Dtype::kAbsent,
          .db = types[kOutB],
          .bits = chain.bits && !backward};
}

// Launches the kernel. `positions` is the slot by whose offsets dropout numbers elements, kOut in forward and kDY in backward;
// `origin` is the address of its tensor.
void launch_pointwise(const Chain& chain, at::TensorIteratorBase& iter, const std::array<int, kOperands>& arg, Slot positions,
                      const char* origin) {
  Iteration iteration(iter, arg);
  if (!iteration.wide && !iter.can_use_32bit_indexing()) {
    if (chain.bits) driver::fail("pointwise kernels know no bits of calls that are cut into parts");
    for (auto& part : iter.with_32bit_indexing()) launch_pointwise(chain, part, arg, positions, origin);
    return;
  }
  if (iteration.shape.size() > kMaxDims)
    driver::fail("pointwise kernels take tensors of at most " + std::to_string(kMaxDims) +
                 " dimensions that cannot be merged; the backend 'eager' computes this call");
  const bool backward = positions == kDY;
  auto& access = iteration.access;
  std::array<Dtype, kOperands> types;
  for (int k = 0; k < kOperands; ++k) types[k] = iteration.has(k) ? cpu_dtype(iter.dtype(arg[k])) : Dtype::kAbsent;
  const auto* first = static_cast<const char*>(iter.data_ptr(arg[positions]));
  const int64_t position = (first - origin) / iteration.bytes(positions);
  access.aligned_positions = chain.seed && access.operands[positions].mode == Mode::kLinear && position % 8 == 0;
  auto args = iteration.args(chain, position);
  if (chain.bits) args.data[backward ? kA : kOutB] = chain.bits;
  launch_over(args.size, iter.device(arg[positions]), spec_of(chain, backward, types), access, &args);
}

}  // namespace

void pointwise_cuda(const Chain& chain, at::TensorIteratorBase& iter) {
  const bool binary = chain.combine != Combine::kFirst;
  launch_pointwise(chain, iter, {0, -1, -1, 1, binary ? 2 : -1}, kOut, static_cast<const char*>(iter.data_ptr(0)));
}

void pointwise_bwd_cuda(const Chain& chain, at::TensorIteratorBase& iter, std::array<bool, 2> wants) {
  const bool binary = chain.combine != Combine::kFirst;
  const int outputs = wants[0] + wants[1];
  launch_pointwise(chain, iter,
                   {wants[0] ? 0 : -1, wants[1] ? outputs - 1 : -1, outputs, outputs + 1, binary ? outputs + 2 : -1}, kDY,
                   static_cast<const char*>(iter.data_ptr(outputs)));
}

void pointwise_bwd_columns_cuda(const ColumnCall& call, Tensor& da, Tensor& db) {
  const auto& chain = call.chain;
  const Tensor* tensors[] = {da.defined() ? &da : nullptr, &db, &call.dy, &call.a, &call.b};
  int64_t widest = 2;
  for (const Tensor* t : {tensors[kOut], tensors[kDY], tensors[kA]})
    if (t) widest = std::max<int64_t>(widest, t->element_size());
  PointwiseAccess access{.vec = static_cast<int>(dividing_power(call.cols, kVectorBytes / widest)),
                         .aligned_positions = chain.seed != nullptr};  // a vector never crosses the end of a row
  access.lanes = tile_lanes(call.cols / access.vec);
  std::array<Dtype, kOperands> types;
  for (int k = 0; k < kOperands; ++k) {
    const Tensor* t = tensors[k];
    types[k] = t ? cpu_dtype(t->scalar_type()) : Dtype::kAbsent;
    if (t) access.operands[k].align = alignment_within(t->const_data_ptr(), 0, access.vec * t->element_size());
  }
  const auto device = call.dy.device();
  const OnDevice on(device);
  const auto& kernel = find_kernel({device, spec_of(chain, /*backward=*/true, types), access}, on.stream);
  // As many blocks as run at once, but no more than there are rows for.
  const int64_t tiles = kernel.grid(call.cols), lines = kernel.threads / access.lanes;
  const int64_t slabs = std::max<int64_t>(1, std::min(kernel.max_blocks / tiles, ceil_div(call.rows, lines)));
  const PartialRows partials(call.dy, slabs, call.cols);
  const void* a = chain.bits ? chain.bits : call.a.const_data_ptr();
  const PointwiseColumnsArgs args{call.dy.const_data_ptr(),
                                  a,
                                  call.b.const_data_ptr(),
                                  memory_or_null(da),
                                  partials.data(0),
                                  call.rows,
                                  call.cols,
                                  partials.pitch,
                                  chain.seed,
                                  chain.scale,
                                  chain.dropout.last()};
  launch(kernel, tiles, slabs, on.stream, &args);
  sum_partials(partials, db, {}, on.stream);
}

}  // namespace kf
