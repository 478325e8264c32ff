// Pointwise chains, reductions and softmax on CUDA: arguments -> request -> launch.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

#include "cuda/launcher.h"
#include "cuda/requests.h"
#include "cuda/sum_partials.h"
#include "families.h"
#include "shared/pointwise_args.h"
#include "shared/reduce_args.h"
#include "shared/softmax_args.h"

namespace kf {
namespace {

constexpr int64_t kVectorBytes = 16;

int64_t size_of(at::ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); }

// The largest power of two that divides n and is at most `most`, itself one.
int64_t dividing_power(int64_t n, int64_t most) {
  while (n % most != 0) most /= 2;
  return most;
}

// The alignment of everything at p plus multiples of `steps` bytes, as far as vectors of so many bytes care.
int32_t alignment_within(const void* p, int64_t steps, int64_t vector_bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(steps);
  return std::min<int32_t>(alignment_of(reinterpret_cast<const void*>(bits)),
                           static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(vector_bytes))));
}

// Threads along the columns of a block of `threads` (kernels/column_sums.cuh): a warp, or fewer where the columns are few or
// most of the last tile would lie outside.
int32_t tile_lanes(int64_t vectors) {
  if (vectors < 32) return static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(vectors)));
  const auto covered = [&](int64_t lanes) { return ceil_div(vectors, lanes) * lanes; };
  if (covered(32) * 4 <= vectors * 5) return 32;
  return covered(16) * 4 <= vectors * 5 ? 16 : 8;
}

// ---- Pointwise -------------------------------------------------------------------------------------------------------------

constexpr int kOperands = PointwiseArgs::kOperands, kMaxDims = PointwiseArgs::kDims;
enum Slot { kOut, kOutB, kDY, kA, kB };  // y or da; db, or bits that are written; dy; a, or bits that are read; b
enum Mode : int32_t { kLinear, kVector, kBroadcast, kStrided, kGather };
enum : int32_t { kNoDropout, kAligned, kAnywhere };  // the positions of dropout

// An iterator as the kernels see it: operands in slots, and how each meets the iteration.
struct Iteration {
  const at::TensorIteratorBase& iter;
  std::array<int, kOperands> arg;  // the iterator's operand in each slot, -1: none
  std::vector<int64_t> shape;      // innermost first, at least one dimension
  PointwiseFields fields{};
  bool wide = true;  // the kernel's arithmetic of offsets has 64 bits

  Iteration(const at::TensorIteratorBase& iter, const std::array<int, kOperands>& arg)
      : iter(iter), arg(arg), shape(iter.shape().begin(), iter.shape().end()) {
    if (shape.empty()) shape.push_back(1);
    bool all_linear = true;
    for (int k = 0; k < kOperands; ++k) all_linear = all_linear && (!has(k) || linear(k));
    if (all_linear) shape.assign(1, iter.numel());
    choose_vector();
    for (int k = 0; k < kOperands; ++k) describe(k);
    fields.dims = static_cast<int32_t>(shape.size());
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
  // Whether elements are read again and again, so that caches hold them.
  bool repeats(int k) const {
    for (size_t d = 0; d < shape.size(); ++d)
      if (shape[d] > 1 && stride(k, d) == 0) return true;
    return false;
  }

  // Vectors of 16 bytes of the widest operand that is read by vectors. If rows are not whole vectors, operands that follow them
  // are looked up by element where caches serve that, and else all vectors become narrower.
  void choose_vector() {
    int64_t widest = 2;
    bool cached = true;
    for (int k = 0; k < kOperands; ++k) {
      if (!has(k)) continue;
      if (linear(k) || stride(k, 0) == bytes(k)) widest = std::max(widest, bytes(k));
      if (!linear(k) && !repeats(k)) cached = false;
    }
    fields.vec = static_cast<int32_t>(kVectorBytes / widest);
    if (shape.size() > 1 && !cached) fields.vec = static_cast<int32_t>(dividing_power(shape[0], fields.vec));
  }

  Mode mode(int k) const {
    if (linear(k)) return kLinear;
    if (shape.size() > 1 && shape[0] % fields.vec != 0) return kGather;
    if (stride(k, 0) == 0) return kBroadcast;
    return stride(k, 0) == bytes(k) ? kVector : kStrided;
  }

  void describe(int k) {
    fields.type[k] = has(k) ? dtype_code(iter.dtype(arg[k])) : -1;
    fields.align[k] = 16;
    if (!has(k)) return;
    const auto m = mode(k);
    fields.mode[k] = m;
    int64_t steps = 0;
    for (size_t d = 1; d < shape.size(); ++d) steps |= stride(k, d);
    if (m == kLinear || m == kVector)
      fields.align[k] = alignment_within(iter.data_ptr(arg[k]), m == kVector ? steps : 0, fields.vec * bytes(k));
    if (m != kLinear && !(m == kBroadcast && shape.size() == 1)) wide = false;
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

// `positions` is the slot whose offsets are the positions of dropout, and `origin` where its tensor begins.
void launch_pointwise(const Chain& chain, Kernel which, at::TensorIteratorBase& iter, const std::array<int, kOperands>& arg,
                      Slot positions, const char* origin) {
  Iteration iteration(iter, arg);
  if (!iteration.wide && !iter.can_use_32bit_indexing()) {
    if (chain.bits) driver::fail("pointwise kernels know no bits of calls that are cut into parts");
    for (auto& part : iter.with_32bit_indexing()) launch_pointwise(chain, which, part, arg, positions, origin);
    return;
  }
  if (iteration.shape.size() > kMaxDims)
    driver::fail("pointwise kernels take tensors of at most " + std::to_string(kMaxDims) +
                 " dimensions that cannot be merged; the backend 'eager' computes this call");
  auto& fields = iteration.fields;
  const auto* first = static_cast<const char*>(iter.data_ptr(arg[positions]));
  const int64_t position = (first - origin) / iteration.bytes(positions);
  fields.combine = static_cast<int32_t>(chain.combine);
  fields.activation = chain.activation;
  if (chain.seed) fields.dropout = fields.mode[positions] == kLinear && position % 8 == 0 ? kAligned : kAnywhere;
  const Slot bits = which == Kernel::kPointwise ? kOutB : kA;
  if (chain.bits) fields.type[bits] = PointwiseFields::kBits;
  const auto device = iter.device(arg[positions]);
  const OnDevice on(device);
  const auto& kernel = find_kernel({device.index(), which, fields}, on.stream);
  auto args = iteration.args(chain, position);
  if (chain.bits) args.data[bits] = chain.bits;
  launch(kernel, kernel.grid(args.size), 1, on.stream, &args);
}

// ---- Reductions ------------------------------------------------------------------------------------------------------------

// A reduction under way: what is summed, where to, and how.
struct Reduction {
  ReduceCall call;
  at::ScalarType acc;
  driver::Stream stream;

  Tensor partials(int64_t count) const { return at::empty({count}, at::TensorOptions(acc).device(call.device)); }
  const LoadedKernel& kernel(const ReduceFields& fields) const {
    return find_kernel({call.device.index(), Kernel::kReduce, fields}, stream);
  }
  ReduceFields fields(at::ScalarType out) const {
    ReduceFields f{};
    f.map = static_cast<int32_t>(call.map);
    f.in = dtype_code(call.in_type);
    f.out = dtype_code(out);
    f.acc = dtype_code(acc);
    return f;
  }
  ReduceArgs args(void* out, int64_t chunks, int64_t chunk) const {
    return {call.in, out, call.outer, call.reduced, call.inner, call.outer_stride, call.reduced_stride, call.inner_stride,
            chunks, chunk, chunks == 1 ? call.divisor : 1.0};
  }
  // What is left to do once the chunks are summed: to add `chunks` contiguous values (or rows of values).
  Reduction rest(const Tensor& sums, int64_t outer, int64_t chunks, int64_t inner) const {
    return {{Map::kNone, sums.const_data_ptr(), acc, outer, chunks, inner, chunks * inner, inner, 1, call.divisor, call.device},
            acc, stream};
  }
};

// A chunk of a row has 64 KB, so that the order of a row's sum depends on its length alone.
constexpr int64_t kChunkBytes = 65536;

void reduce_rows(const Reduction& r, Tensor& out) {
  const auto& call = r.call;
  const int64_t size = size_of(call.in_type), rows = call.outer * call.inner, chunk = kChunkBytes / size;
  const int64_t chunks = std::max<int64_t>(1, ceil_div(call.reduced, chunk));
  const Tensor sums = chunks > 1 ? r.partials(rows * chunks) : out;
  auto fields = r.fields(sums.scalar_type());
  fields.vec = static_cast<int32_t>(kVectorBytes / size);
  const int64_t vectors = std::max<int64_t>(1, ceil_div(std::min(call.reduced, chunk), fields.vec));
  fields.capacity = static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(vectors)));
  fields.contiguous = call.reduced_stride == 1 || call.reduced == 1;
  fields.chunked = chunks > 1;
  fields.nested = call.inner > 1;
  fields.align_out = 16;
  const int64_t steps = (call.outer > 1 ? call.outer_stride : 0) | (call.inner > 1 ? call.inner_stride : 0);
  fields.align = fields.contiguous ? alignment_within(call.in, steps * size, kVectorBytes) : 16;
  const auto& kernel = r.kernel(fields);
  const auto args = r.args(sums.data_ptr(), chunks, chunk);
  launch(kernel, kernel.grid(rows * chunks), 1, r.stream, &args);
  if (chunks > 1) reduce_rows(r.rest(sums, rows, chunks, 1), out);
}

// Blocks of columns per multiprocessor, as backends/cuda/reduce.py plans them. A constant, not what a kernel's registers allow: so
// the order of a column's sum depends on its shape and the device alone.
constexpr int64_t kColumnBlocks = 4;

// Rows are shared out among `chunks` blocks, as many as run at once, unless `whole`: then a block takes all of them.
void reduce_columns(const Reduction& r, Tensor& out, bool whole) {
  // Tiles of 256 bytes: those of 512 leave twice as many chunks to add up, and took 7.2 us instead of 6.7 at 2048x2048 fp32, the
  // same at 8192x8192 (H200, torch 2.11.0+cu130, in no result file). Many partial rows want many lines: there are few columns.
  // Few rows leave nothing to add up between lines: a block is one line then. A small one, and of partial rows a column to a thread,
  // so that many multiprocessors share the wait, and the next kernel's blocks find room beside it.
  // Where tiles occupy five in nine multiprocessors, and none of them twice, a large block takes all rows of a tile, which leaves
  // nothing to add up either: 8192x8192 fp32, 128 tiles, 63.5 us and, so, 61.5; 512x12288 bf16, 96 tiles, 6.3 and 5.8; but of 67
  // tiles 8000x4288 fp32 33.8 and 34.5. Not of narrow vectors, which would have fewer bytes in flight. Elsewhere a thread has at
  // least eight rows, so that 2048 of them have few shares: 2048x2048 bf16 6.0 us with 32 and 5.6 with 16.
  constexpr int64_t kThreads = 256, kRowsPerThread = 8, kFewRows = 16, kFewThreads = 64, kWholeThreads = 512;
  const auto& call = r.call;
  const int64_t size = size_of(call.in_type), most = whole && call.reduced <= kFewRows ? 1 : kVectorBytes / size;
  const int64_t vec = dividing_power(call.inner, most), vectors = call.inner / vec;
  const bool few = call.reduced <= kFewRows && vectors >= kFewThreads;
  const int64_t lanes = few ? kFewThreads : std::min<int64_t>(whole ? 8 : 16, tile_lanes(vectors));
  const int64_t tiles = ceil_div(vectors, lanes) * call.outer, places = multiprocessors(call.device);
  const bool alone = !whole && !few && vec * size >= 8 && tiles <= places && tiles * 9 >= places * 5;
  const int64_t wanted = std::min(places * kColumnBlocks / tiles, call.reduced / (kThreads / lanes * kRowsPerThread));
  const int64_t chunks = whole || few || alone ? 1 : std::max<int64_t>(1, wanted);
  const Tensor sums = chunks > 1 ? r.partials(call.outer * chunks * call.inner) : out;
  auto fields = r.fields(sums.scalar_type());
  fields.vec = static_cast<int32_t>(vec);
  fields.lanes = static_cast<int32_t>(lanes);
  fields.threads = static_cast<int32_t>(few ? kFewThreads : alone ? kWholeThreads : kThreads);
  fields.contiguous = 1;
  fields.align = alignment_within(call.in, (call.outer_stride | call.reduced_stride) * size, vec * size);
  fields.align_out = alignment_within(sums.data_ptr(), 0, vec * size_of(sums.scalar_type()));
  const auto& kernel = r.kernel(fields);
  const auto args = r.args(sums.data_ptr(), chunks, call.reduced);
  launch(kernel, tiles, chunks, r.stream, &args);
  if (chunks > 1) reduce_columns(r.rest(sums, call.outer, chunks, call.inner), out, true);
}

// ---- Softmax ---------------------------------------------------------------------------------------------------------------

// The number of vectors of a row rounded up to 2^k or 3 * 2^k: what a kernel is compiled for.
int32_t softmax_capacity(int64_t vectors) {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(vectors)));
  return static_cast<int32_t>(power >= 4 && vectors <= power / 4 * 3 ? power / 4 * 3 : power);
}

void check_softmax_cols(int64_t cols) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (cols > kMost)
    driver::fail("softmax kernels take rows of at most 2^30 elements, got " + std::to_string(cols) +
                 "; the backend 'eager' computes longer ones");
}

int32_t row_alignment(const Rows& rows, int64_t vec) {
  return std::min<int32_t>(rows.alignment, static_cast<int32_t>(vec * size_of(rows.tensor.scalar_type())));
}

}  // namespace

void pointwise_cuda(const Chain& chain, at::TensorIteratorBase& iter) {
  const bool binary = chain.combine != Combine::kFirst;
  launch_pointwise(chain, Kernel::kPointwise, iter, {0, -1, -1, 1, binary ? 2 : -1}, kOut,
                   static_cast<const char*>(iter.data_ptr(0)));
}

void pointwise_bwd_cuda(const Chain& chain, at::TensorIteratorBase& iter, std::array<bool, 2> wants) {
  const bool binary = chain.combine != Combine::kFirst;
  const int outputs = wants[0] + wants[1];
  launch_pointwise(chain, Kernel::kPointwiseBwd, iter,
                   {wants[0] ? 0 : -1, wants[1] ? outputs - 1 : -1, outputs, outputs + 1, binary ? outputs + 2 : -1}, kDY,
                   static_cast<const char*>(iter.data_ptr(outputs)));
}

void pointwise_bwd_columns_cuda(const ColumnCall& call, Tensor& da, Tensor& db) {
  const auto& chain = call.chain;
  const Tensor* tensors[] = {da.defined() ? &da : nullptr, &db, &call.dy, &call.a, &call.b};
  int64_t widest = 2;
  for (const Tensor* t : {tensors[kOut], tensors[kDY], tensors[kA]})
    if (t) widest = std::max<int64_t>(widest, t->element_size());
  PointwiseFields fields{};
  fields.combine = static_cast<int32_t>(chain.combine);
  fields.activation = chain.activation;
  fields.dropout = chain.seed ? kAligned : kNoDropout;  // vectors divide rows
  fields.dims = 1;
  fields.vec = static_cast<int32_t>(dividing_power(call.cols, kVectorBytes / widest));
  fields.lanes = tile_lanes(call.cols / fields.vec);
  for (int k = 0; k < kOperands; ++k) {
    const Tensor* t = tensors[k];
    fields.type[k] = t ? dtype_code(t->scalar_type()) : -1;
    fields.align[k] = t ? alignment_within(t->const_data_ptr(), 0, fields.vec * t->element_size()) : 16;
  }
  if (chain.bits) fields.type[kA] = PointwiseFields::kBits;
  const auto device = call.dy.device();
  const OnDevice on(device);
  const auto& kernel = find_kernel({device.index(), Kernel::kPointwiseBwd, fields}, on.stream);
  // As many blocks as run at once, but no more than have rows.
  const int64_t tiles = kernel.grid(call.cols), lines = kernel.threads / fields.lanes;
  const int64_t slabs = std::max<int64_t>(1, std::min(kernel.max_blocks / tiles, ceil_div(call.rows, lines)));
  const PartialRows partials(call.dy, slabs, call.cols);
  const void* a = chain.bits ? chain.bits : call.a.const_data_ptr();
  const PointwiseColumnsArgs args{call.dy.const_data_ptr(), a, call.b.const_data_ptr(),
                                  da.defined() ? da.data_ptr() : nullptr, partials.data(0), call.rows, call.cols,
                                  partials.pitch, chain.seed, chain.scale, chain.dropout.last()};
  launch(kernel, tiles, slabs, on.stream, &args);
  sum_partials(partials, &db, nullptr, on.stream);
}

void reduce_cuda(const ReduceCall& call, Tensor& out) {
  const bool wide = call.in_type == at::kDouble || out.scalar_type() == at::kDouble;
  const OnDevice on(call.device);
  const Reduction reduction{call, wide ? at::kDouble : at::kFloat, on.stream};
  if (call.inner > 1 && call.inner_stride == 1 && call.reduced > 0)
    reduce_columns(reduction, out, false);
  else
    reduce_rows(reduction, out);
}

void softmax_cuda(const SoftmaxCall& call, Tensor& y) {
  const Rows x(call.x, 1);
  check_softmax_cols(x.cols);
  const bool masked = call.mask.defined(), repeats = masked && call.mask.stride(-1) == 0;
  const Rows mask = masked ? Rows(repeats ? call.mask.narrow(-1, 0, 1) : call.mask, 1) : x;
  const int64_t vec = dividing_power(x.cols, kVectorBytes / size_of(call.x.scalar_type()));
  SoftmaxFields fields{};
  fields.x = dtype_code(call.x.scalar_type());
  fields.mask = -1;
  fields.causal = call.causal;
  fields.vec = static_cast<int32_t>(vec);
  fields.capacity = softmax_capacity(x.cols / vec);
  if (masked) {
    const bool boolean = mask.tensor.scalar_type() == at::kBool;
    fields.mask = boolean ? SoftmaxFields::kBooleanMask : dtype_code(mask.tensor.scalar_type());
    fields.strided_mask = mask.strided;
  }
  fields.mask_repeats = repeats;
  fields.strided_x = x.strided;
  fields.align_x = row_alignment(x, vec);
  fields.align_mask = masked && !repeats ? row_alignment(mask, vec) : 16;
  const auto device = call.x.device();
  const OnDevice on(device);
  const auto& kernel = find_kernel({device.index(), Kernel::kSoftmax, fields}, on.stream);
  const SoftmaxArgs args{x.data(), masked ? mask.data() : nullptr, y.data_ptr(), x.rows, x.cols,
                         call.causal ? call.x.size(-2) : 1, x.layout, mask.layout, call.scale};
  launch(kernel, kernel.grid(x.rows), 1, on.stream, &args);
}

void softmax_bwd_cuda(const Tensor& dy, const Tensor& y, double scale, bool leaves_out, Tensor& dx) {
  const Rows dy_rows(dy, 1), y_rows(y, 1);
  check_softmax_cols(y_rows.cols);
  const int64_t vec = dividing_power(y_rows.cols, kVectorBytes / size_of(y.scalar_type()));
  const SoftmaxBwdFields fields{dtype_code(dy.scalar_type()), dtype_code(y.scalar_type()), dtype_code(dx.scalar_type()),
                                leaves_out, static_cast<int32_t>(vec), softmax_capacity(y_rows.cols / vec), dy_rows.strided,
                                y_rows.strided, row_alignment(dy_rows, vec), row_alignment(y_rows, vec)};
  const auto device = y.device();
  const OnDevice on(device);
  const auto& kernel = find_kernel({device.index(), Kernel::kSoftmaxBwd, fields}, on.stream);
  const SoftmaxBwdArgs args{dy_rows.data(), y_rows.data(), dx.data_ptr(), y_rows.rows, y_rows.cols, dy_rows.layout,
                            y_rows.layout, scale};
  launch(kernel, kernel.grid(y_rows.rows), 1, on.stream, &args);
}

}  // namespace kf
