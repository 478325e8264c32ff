// out[o][c][i] is the sum of map(in[o][r][i]) over the rows r of chunk c, divided by a divisor. Chunks take some lines of
// rows at a time, in turn. A second call adds up the chunks. The kernel reads `in` once. Block (o * tiles + t, c) takes
// column tile t of in[o].
#pragma once

#include "shared/reduce_args.h"
#include "sums.cuh"

namespace kf {

template <class S> __device__ void reduce_columns(const ReduceArgs& args) {
  using A = typename S::Acc;
  using Out = typename S::Out;
  constexpr int kSpan = S::kLanes * S::kVec, kLines = Tile<S>::kLines;
  const Tile<S> tile;
  const auto tiles = static_cast<unsigned>((args.inner + kSpan - 1) / kSpan), outer = blockIdx.x / tiles;
  const i64 col = tile.col(blockIdx.x - outer * tiles), line = static_cast<i64>(blockIdx.y) * kLines + tile.line;
  const auto* column = static_cast<const typename S::In*>(args.in) + settled(outer * args.outer_stride + col);
  wait_for_previous_kernel(column + line * args.reduced_stride);
  A sums[S::kVec] = {};
  if (col < args.inner)
    batched<S::kUnroll>(
        line, static_cast<i64>(args.reduced), static_cast<i64>(args.chunks) * kLines,
        [&](i64 row) { return load_once<S::kAlign, S::kVec>(column + row * args.reduced_stride); },
        [&](i64, const Pack<typename S::In, S::kVec>& pack) { add_mapped<S::kMap>(sums, pack); });
  tile.add_lines(sums);
  if (tile.line > 0 || col >= args.inner) return;
#pragma unroll
  for (int e = 0; e < S::kVec; ++e) sums[e] /= static_cast<A>(args.divisor);
  Out* out = static_cast<Out*>(args.out) + (outer * args.chunks + blockIdx.y) * args.inner + col;
  store<S::kAlignOut>(out, narrow_pack<Out>(sums));
}

}  // namespace kf
