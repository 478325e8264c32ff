// CPU pointwise chains, forward and backward: the stretches of operands that the loops of cpu/activation_loops.h run over.
// Compiled once per instruction set.
//
// A two-dimensional region is cut into tiles: whole rows if all operands can be used in place, otherwise parts of one row or
// several short rows, of at most kChunk elements.
#include "cpu/activation_loops.h"
#include "cpu/chunk.h"
#include "cpu/kernels.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

struct Tile {
  int64_t inner, outer;            // the first indices
  int64_t inner_size, outer_size;  // the numbers of indices
  int64_t size() const { return inner_size * outer_size; }
};

template <class F> inline void for_tiles(const Region& region, int64_t chunk, bool in_place, F&& f) {
  const int64_t width = in_place ? region.inner_size : std::min(region.inner_size, chunk);
  const int64_t height = std::max<int64_t>(1, chunk / std::max<int64_t>(region.inner_size, 1));
  for (int64_t outer = 0; outer < region.outer_size; outer += height)
    for (int64_t inner = 0; inner < region.inner_size; inner += width)
      f(Tile{inner, outer, std::min(width, region.inner_size - inner), std::min(height, region.outer_size - outer)});
}

// Calls run(address, stride, size, first) for each stretch of operand k in a tile; `first` is the number of the
// stretch's first element in the tile. The tile is one stretch if both dimensions have the same stride.
template <class F> inline void for_stretches(const Region& region, int k, int64_t element, const Tile& tile, F&& run) {
  const int64_t inner = region.inner[k], outer = region.outer[k];
  char* start = region.data[k] + tile.inner * inner + tile.outer * outer;
  if (tile.outer_size == 1 || outer == tile.inner_size * inner) return run(start, inner / element, tile.size(), int64_t{0});
  for (int64_t row = 0; row < tile.outer_size; ++row)
    run(start + row * outer, inner / element, tile.inner_size, row * tile.inner_size);
}

// The operands of a region in the form that loops take.
template <class A> struct Operands {
  const ChainOperands& call;
  const Region& region;

  bool in_place(int count) const {
    for (int k = 0; k < count; ++k)
      if (region.inner[k] != size_of(call.types[k]) || !Source<A>::reads(call.types[k])) return false;
    return !call.chain.dropout;
  }

  Source<A> read(int k, const Tile& tile, A* room) const {
    const Dtype type = call.types[k];
    Source<A> found{kDtypeOf<A>, room};
    for_stretches(region, k, size_of(type), tile, [&](const char* p, int64_t stride, int64_t n, int64_t first) {
      if (n == tile.size()) found = read_chunk(type, p, stride, n, room);
      else load_chunk(type, p, stride, n, room + first);
    });
    return found;
  }

  // The target of operand k: where it lies, or `room`, which must then be stored to it.
  Target<A> written(int k, const Tile& tile, A* room) const {
    const Dtype type = call.types[k];
    Target<A> found{kDtypeOf<A>, room};
    for_stretches(region, k, size_of(type), tile, [&](char* p, int64_t stride, int64_t n, int64_t) {
      if (n == tile.size() && stride == 1 && Source<A>::reads(type)) found = Target<A>::streamed(type, p, call.streams);
    });
    return found;
  }

  void store(int k, const Tile& tile, const Target<A>& target, const A* room) const {
    if (target.data != room) return;
    for_stretches(region, k, size_of(call.types[k]), tile, [&](char* p, int64_t stride, int64_t n, int64_t first) {
      store_chunk(call.types[k], room + first, n, p, stride);
    });
  }

  // Dropout's mask for a tile. The position of an element is its offset in operand k.
  Source<A> kept(int k, const Tile& tile, MaskOf<A>* room) const {
    const Chain& chain = call.chain;
    if (!chain.dropout) return {};
    const int64_t element = size_of(call.types[k]);
    const auto seed = static_cast<uint64_t>(*chain.seed);
    const uint32_t last = chain.dropout.last();
    for_stretches(region, k, element, tile, [&](const char* p, int64_t stride, int64_t n, int64_t first) {
      const auto position = static_cast<uint64_t>((p - call.base) / element);
      if (stride == 1) return draw_kept<A>(position, seed, last, n, room + first);
      for (int64_t i = 0; i < n; ++i)
        draw_kept<A>(position + static_cast<uint64_t>(i * stride), seed, last, 1, room + first + i);
    });
    return {kDtypeOf<A>, room};
  }
};

template <class A> ChainLoop<A> loop_of(const Chain& chain) {
  ChainLoop<A> loop;
  loop.combine = chain.combine;
  loop.activation = chain.activation;
  loop.scale = static_cast<A>(chain.scale);
  return loop;
}

template <class A> void pointwise_region(const ChainOperands& call, const Region& region) {
  const Operands<A> operands{call, region};
  const bool binary = call.chain.combine != Combine::kFirst;
  ChainLoop<A> loop = loop_of<A>(call.chain);
  loop.to_bf16 = call.types[0] == Dtype::kBFloat16;
  Chunk<A> a, b, y;
  Chunk<MaskOf<A>> kept;
  for_tiles(region, kChunk<A>, operands.in_place(2 + binary), [&](const Tile& tile) {
    loop.a = operands.read(1, tile, a);
    if (binary) loop.b = operands.read(2, tile, b);
    loop.kept = operands.kept(0, tile, kept);
    loop.first = operands.written(0, tile, y);
    run_values(loop, tile.size());
    operands.store(0, tile, loop.first, y);
  });
  if (call.streams) finish_streams();
}

template <class A> void pointwise_bwd_region(const ChainOperands& call, const Region& region) {
  const Operands<A> operands{call, region};
  const bool binary = call.chain.combine != Combine::kFirst;
  const int dy = call.wants[0] + call.wants[1];
  ChainLoop<A> loop = loop_of<A>(call.chain);
  Chunk<A> grad, a, b, da, db;
  Chunk<MaskOf<A>> kept;
  for_tiles(region, kChunk<A>, operands.in_place(dy + 2 + binary), [&](const Tile& tile) {
    loop.dy = operands.read(dy, tile, grad);
    loop.a = operands.read(dy + 1, tile, a);
    if (binary) loop.b = operands.read(dy + 2, tile, b);
    loop.kept = operands.kept(dy, tile, kept);
    if (call.wants[0]) loop.first = operands.written(0, tile, da);
    if (call.wants[1]) loop.second = operands.written(call.wants[0], tile, db);
    run_gradients(loop, tile.size());
    if (call.wants[0]) operands.store(0, tile, loop.first, da);
    if (call.wants[1]) operands.store(call.wants[0], tile, loop.second, db);
  });
  if (call.streams) finish_streams();
}

// Adds four rows at a time in the compute type, and their sums in double.
template <class A>
void columns_region(const ChainColumns& call, int64_t begin, int64_t end, int64_t left, int64_t right, double* sums) {
  const Chain& chain = call.chain;
  const int64_t dy_size = size_of(call.dy_type), a_size = size_of(call.a_type), b_size = size_of(call.b_type);
  ChainLoop<A> loop = loop_of<A>(chain);
  Chunk<A> grad, a, b, da, partial;
  Chunk<MaskOf<A>> kept;
  for (int64_t start = left; start < right; start += kChunk<A>) {
    const int64_t n = std::min(kChunk<A>, right - start);
    load_chunk<A>(call.b_type, call.b + start * b_size, 1, n, b);
    loop.b = {kDtypeOf<A>, b};
    loop.sums = partial;
    std::fill_n(partial.values, kChunk<A>, A(0));
    for (int64_t r = begin; r < end; ++r) {
      const int64_t position = r * call.cols + start;
      loop.dy = read_chunk<A>(call.dy_type, call.dy + position * dy_size, 1, n, grad);
      loop.a = read_chunk<A>(call.a_type, call.a + position * a_size, 1, n, a);
      if (chain.dropout) {
        draw_kept<A>(static_cast<uint64_t>(position), static_cast<uint64_t>(*chain.seed), chain.dropout.last(), n, kept);
        loop.kept.data = kept.values;
      }
      char* result = call.da ? call.da + position * a_size : nullptr;
      const bool in_place = Source<A>::reads(call.a_type);
      if (result) loop.first = in_place ? Target<A>::streamed(call.a_type, result, call.streams) : Target<A>{kDtypeOf<A>, da};
      run_gradients(loop, n);
      if (result && !in_place) store_chunk<A>(call.a_type, da, n, result, 1);
      if ((r - begin) % 4 != 3 && r + 1 < end) continue;
      for (int64_t i = 0; i < n; ++i) sums[start + i] += partial.values[i];
      std::fill_n(partial.values, kChunk<A>, A(0));
    }
  }
  if (call.streams) finish_streams();
}

}  // namespace

void pointwise(const ChainOperands& call, const Region& region) {
  (call.wide ? pointwise_region<double> : pointwise_region<float>)(call, region);
}

void pointwise_bwd(const ChainOperands& call, const Region& region) {
  (call.wide ? pointwise_bwd_region<double> : pointwise_bwd_region<float>)(call, region);
}

void pointwise_bwd_columns(const ChainColumns& call, int64_t begin, int64_t end, int64_t left, int64_t right, double* sums) {
  (call.wide ? columns_region<double> : columns_region<float>)(call, begin, end, left, right, sums);
}

}  // namespace kf::cpu::CPU_CAPABILITY
