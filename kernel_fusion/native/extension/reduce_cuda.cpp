// Reductions on CUDA: arguments -> key -> launch.
#include <algorithm>
#include <bit>

#include "cuda/launcher.h"
#include "cuda/sum_partials.h"
#include "reduce.h"
#include "shared/reduce_args.h"

namespace kf {
namespace {

// A reduction in progress: what is summed, where to, and how.
struct Launches {
  Reduction call;
  at::ScalarType acc;
  driver::Stream stream;

  Tensor partials(int64_t count) const { return allocate({count}, at::TensorOptions(acc).device(call.device)); }
  const LoadedKernel& kernel(at::ScalarType out, const ReduceAccess& access) const {
    const ReduceSpec spec{call.map, cpu_dtype(call.in_type), cpu_dtype(out), cpu_dtype(acc)};
    return find_kernel({call.device, spec, access}, stream);
  }
  ReduceArgs args(void* out, int64_t chunks, int64_t chunk) const {
    const double divisor = chunks == 1 ? call.divisor : 1.0;
    return {call.in,           out,    call.outer, call.reduced, call.inner, call.outer_stride, call.reduced_stride,
            call.inner_stride, chunks, chunk,      divisor};
  }
  // The remaining work after the chunks are summed: adding `chunks` contiguous values (or rows of values).
  Launches rest(const Tensor& sums, int64_t outer, int64_t chunks, int64_t inner) const {
    return {{Map::kNone, sums.const_data_ptr(), acc, outer, chunks, inner, chunks * inner, inner, 1, call.divisor, call.device},
            acc,
            stream};
  }
};

constexpr ReduceRule kRule;

void reduce_rows(const Launches& r, Tensor& out) {
  const auto& call = r.call;
  const int64_t size = size_of(call.in_type), rows = call.outer * call.inner, chunk = kRule.chunk_bytes / size;
  const int64_t chunks = std::max<int64_t>(1, ceil_div(call.reduced, chunk));
  const Tensor sums = chunks > 1 ? r.partials(rows * chunks) : out;
  ReduceAccess access;
  const int64_t vectors = std::max<int64_t>(1, ceil_div(std::min(call.reduced, chunk) * size, kVectorBytes));
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

// One block takes a tile of columns, or several share its rows, by lengths that no key has, because each would need a kernel.
// The planner has the numbers and the reasons (backends/cuda/reduce.py).
void reduce_columns(const Launches& r, Tensor& out, bool of_chunks) {
  const auto& call = r.call;
  const int64_t size = size_of(call.in_type), places = multiprocessors(call.device);
  const bool few_rows = call.reduced <= kRule.few_rows;
  const int64_t vec = dividing_power(call.inner, of_chunks && few_rows ? 1 : kVectorBytes / size), vectors = call.inner / vec;
  const bool few = few_rows && vectors >= kRule.few_threads;
  const int64_t lanes =
      few ? kRule.few_threads : std::min<int64_t>(of_chunks ? kRule.lanes_of_chunks : kRule.lanes, tile_lanes(vectors));
  const int64_t tiles = ceil_div(vectors, lanes) * call.outer;
  const bool all = !of_chunks && !few && vec * size >= kRule.all_bytes && tiles <= places &&
                   tiles * kRule.filled[1] >= places * kRule.filled[0];
  const int64_t wanted =
      std::min(places * kRule.column_blocks / tiles, call.reduced / (kRule.column_threads / lanes * kRule.rows_per_thread));
  const int64_t chunks = of_chunks || few || all ? 1 : std::max<int64_t>(1, wanted);
  const Tensor sums = chunks > 1 ? r.partials(call.outer * chunks * call.inner) : out;
  const ReduceAccess access{.vec = static_cast<int>(vec),
                            .lanes = static_cast<int>(lanes),
                            .threads = few   ? kRule.few_threads
                                       : all ? kRule.all_threads
                                             : kRule.column_threads,
                            .align = alignment_within(call.in, (call.outer_stride | call.reduced_stride) * size, vec * size),
                            .align_out = alignment_within(sums.data_ptr(), 0, vec * size_of(sums.scalar_type()))};
  const auto& kernel = r.kernel(sums.scalar_type(), access);
  const auto args = r.args(sums.data_ptr(), chunks, call.reduced);
  launch(kernel, tiles, chunks, r.stream, &args);
  if (chunks > 1) reduce_columns(r.rest(sums, call.outer, chunks, call.inner), out, true);
}

}  // namespace

void reduce_cuda(const Reduction& call, Tensor& out) {
  const bool wide = call.in_type == at::kDouble || out.scalar_type() == at::kDouble;
  const OnDevice on(call.device);
  const Launches reduction{call, wide ? at::kDouble : at::kFloat, on.stream};
  if (call.inner > 1 && call.inner_stride == 1 && call.reduced > 0) reduce_columns(reduction, out, false);
  else reduce_rows(reduction, out);
}

}  // namespace kf
