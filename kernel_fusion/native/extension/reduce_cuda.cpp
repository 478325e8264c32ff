// Reductions on CUDA: arguments -> key -> launch.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

#include "backends.h"
#include "cpu/dtype.h"
#include "cuda/launcher.h"
#include "cuda/vectors.h"
#include "shared/reduce_args.h"

namespace kf {
namespace {

// A reduction under way: what is summed, where to, and how.
struct Reduction {
  ReduceCall call;
  at::ScalarType acc;
  driver::Stream stream;

  Tensor partials(int64_t count) const { return at::empty({count}, at::TensorOptions(acc).device(call.device)); }
  const LoadedKernel& kernel(at::ScalarType out, const ReduceAccess& access) const {
    const ReduceSpec spec{call.map, cpu_dtype(call.in_type), cpu_dtype(out), cpu_dtype(acc)};
    return find_kernel({call.device, spec, access}, stream);
  }
  ReduceArgs args(void* out, int64_t chunks, int64_t chunk) const {
    return {call.in,
            out,
            call.outer,
            call.reduced,
            call.inner,
            call.outer_stride,
            call.reduced_stride,
            call.inner_stride,
            chunks,
            chunk,
            chunks == 1 ? call.divisor : 1.0};
  }
  // What is left to do once the chunks are summed: to add `chunks` contiguous values (or rows of values).
  Reduction rest(const Tensor& sums, int64_t outer, int64_t chunks, int64_t inner) const {
    return {{Map::kNone, sums.const_data_ptr(), acc, outer, chunks, inner, chunks * inner, inner, 1, call.divisor, call.device},
            acc,
            stream};
  }
};

// A chunk of a row has 64 KB, so that the order of a row's sum depends on its length alone.
constexpr int64_t kChunkBytes = 65536;

void reduce_rows(const Reduction& r, Tensor& out) {
  const auto& call = r.call;
  const int64_t size = size_of(call.in_type), rows = call.outer * call.inner, chunk = kChunkBytes / size;
  const int64_t chunks = std::max<int64_t>(1, ceil_div(call.reduced, chunk));
  const Tensor sums = chunks > 1 ? r.partials(rows * chunks) : out;
  ReduceAccess access{.vec = static_cast<int>(kVectorBytes / size)};
  const int64_t vectors = std::max<int64_t>(1, ceil_div(std::min(call.reduced, chunk), access.vec));
  access.capacity = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(vectors)));
  access.contiguous = call.reduced_stride == 1 || call.reduced == 1;
  access.chunked = chunks > 1;
  access.nested = call.inner > 1;
  const int64_t steps = (call.outer > 1 ? call.outer_stride : 0) | (call.inner > 1 ? call.inner_stride : 0);
  if (access.contiguous) access.align = alignment_within(call.in, steps * size, kVectorBytes);
  const auto& kernel = r.kernel(sums.scalar_type(), access);
  const auto args = r.args(sums.data_ptr(), chunks, chunk);
  launch(kernel, kernel.grid(rows * chunks), 1, r.stream, &args);
  if (chunks > 1) reduce_rows(r.rest(sums, rows, chunks, 1), out);
}

// kColumnBlocks blocks of columns per multiprocessor, a constant and not what a kernel's registers allow: so the order of a
// column's sum depends on its shape and the device alone. Rows are shared out among `chunks` blocks, as many as run at once,
// unless `whole`: then a block takes all of them.
void reduce_columns(const Reduction& r, Tensor& out, bool whole) {
  // Tiles of 256 bytes: those of 512 leave twice as many chunks to add up, and took 7.2 us instead of 6.7 at 2048x2048 fp32,
  // the same at 8192x8192 (H200, torch 2.11.0+cu130, in no result file). Many partial rows want many lines: there are few
  // columns. Few rows leave nothing to add up between lines: a block is one line then. A small one, and of partial rows a
  // column to a thread, so that many multiprocessors share the wait, and the next kernel's blocks find room beside it. Where
  // tiles occupy five in nine multiprocessors, and none of them twice, a large block takes all rows of a tile, which leaves
  // nothing to add up either: 8192x8192 fp32, 128 tiles, 63.5 us and, so, 61.5; 512x12288 bf16, 96 tiles, 6.3 and 5.8; but of
  // 67 tiles 8000x4288 fp32 33.8 and 34.5. Not of narrow vectors, which would have fewer bytes in flight. Elsewhere a thread
  // has at least eight rows, so that 2048 of them have few shares: 2048x2048 bf16 6.0 us with 32 and 5.6 with 16.
  constexpr int64_t kThreads = kColumnThreads, kRowsPerThread = 8, kFewRows = 16, kFewThreads = 64, kWholeThreads = 512;
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
  const ReduceAccess access{.vec = static_cast<int>(vec),
                            .lanes = static_cast<int>(lanes),
                            .threads = static_cast<int>(few     ? kFewThreads
                                                        : alone ? kWholeThreads
                                                                : kThreads),
                            .align = alignment_within(call.in, (call.outer_stride | call.reduced_stride) * size, vec * size),
                            .align_out = alignment_within(sums.data_ptr(), 0, vec * size_of(sums.scalar_type()))};
  const auto& kernel = r.kernel(sums.scalar_type(), access);
  const auto args = r.args(sums.data_ptr(), chunks, call.reduced);
  launch(kernel, tiles, chunks, r.stream, &args);
  if (chunks > 1) reduce_columns(r.rest(sums, call.outer, chunks, call.inner), out, true);
}

}  // namespace

void reduce_cuda(const ReduceCall& call, Tensor& out) {
  const bool wide = call.in_type == at::kDouble || out.scalar_type() == at::kDouble;
  const OnDevice on(call.device);
  const Reduction reduction{call, wide ? at::kDouble : at::kFloat, on.stream};
  if (call.inner > 1 && call.inner_stride == 1 && call.reduced > 0) reduce_columns(reduction, out, false);
  else reduce_rows(reduction, out);
}

}  // namespace kf
