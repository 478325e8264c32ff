// CPU pointwise chains, forward and backward, on chunks (cpu/chunk.h). Compiled once per instruction set.
//
// A region of two dimensions is cut into tiles of at most kChunk elements: parts of one row, or several short rows. With
// `scale` and dropout folded into g = dropout(scale * dy), the gradients are g f'(a + b) for both operands of a sum,
// g f'(a b) times the other operand for a product, and g f'(a) b and g f(a) for a gate.
#include "cpu/chunk.h"
#include "cpu/kernels.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

struct Tile {
  int64_t inner, outer;            // where it begins
  int64_t inner_size, outer_size;  // its extents
  int64_t size() const { return inner_size * outer_size; }
};

template <class A, class F> inline void for_tiles(const Region& region, F&& f) {
  const int64_t width = std::min<int64_t>(region.inner_size, kChunk<A>);
  const int64_t height = std::max<int64_t>(1, kChunk<A> / std::max<int64_t>(region.inner_size, 1));
  for (int64_t outer = 0; outer < region.outer_size; outer += height)
    for (int64_t inner = 0; inner < region.inner_size; inner += width)
      f(Tile{inner, outer, std::min(width, region.inner_size - inner), std::min(height, region.outer_size - outer)});
}

// Calls run(address, stride, size, first) for the stretches of operand k that a tile is made of; `first` counts its elements.
// One stretch where the strides of both dimensions agree.
template <class F> inline void for_stretches(const Region& region, int k, int64_t element, const Tile& tile, F&& run) {
  const int64_t inner = region.inner[k], outer = region.outer[k];
  char* start = region.data[k] + tile.inner * inner + tile.outer * outer;
  if (tile.outer_size == 1 || outer == tile.inner_size * inner)
    return run(start, inner / element, tile.size(), int64_t{0});
  for (int64_t row = 0; row < tile.outer_size; ++row)
    run(start + row * outer, inner / element, tile.inner_size, row * tile.inner_size);
}

template <class A> struct Loop {
  const ChainOperands& call;
  const Region& region;

  // Where operand k can be read: in place, or in `room`.
  const A* read(int k, const Tile& tile, A* room) const {
    const Dtype type = call.types[k];
    const A* found = room;
    for_stretches(region, k, size_of(type), tile, [&](const char* p, int64_t stride, int64_t n, int64_t first) {
      if (n == tile.size()) found = read_chunk(type, p, stride, n, room);
      else load_chunk(type, p, stride, n, room + first);
    });
    return found;
  }

  // Where operand k can be computed: in place, or in `room`.
  A* written(int k, const Tile& tile, A* room) const {
    A* found = room;
    for_stretches(region, k, size_of(call.types[k]), tile, [&](char* p, int64_t stride, int64_t n, int64_t) {
      if (n == tile.size()) found = write_chunk(call.types[k], p, stride, n, room);
    });
    return found;
  }

  void store(int k, const Tile& tile, const A* in) const {
    const Dtype type = call.types[k];
    for_stretches(region, k, size_of(type), tile, [&](char* p, int64_t stride, int64_t n, int64_t first) {
      store_chunk(type, in + first, n, p, stride);
    });
  }

  // Positions are offsets in operand k.
  void dropout(int k, const Tile& tile, A* values) const {
    const Chain& chain = call.chain;
    if (chain.threshold == 0) return;
    const int64_t element = size_of(call.types[k]);
    const auto seed = static_cast<uint64_t>(*chain.seed);
    for_stretches(region, k, element, tile, [&](const char* p, int64_t stride, int64_t n, int64_t first) {
      const auto position = static_cast<uint64_t>((p - call.base) / element);
      if (stride == 1) return dropout_chunk(values + first, n, position, seed, chain.threshold);
      for (int64_t i = 0; i < n; ++i)
        dropout_chunk(values + first + i, 1, position + static_cast<uint64_t>(i * stride), seed, chain.threshold);
    });
  }
};

// The argument of the activation: a, or what is written to z.
template <class A> inline const A* combine_chunk(Combine combine, const A* a, const A* b, A* z, int64_t n) {
  if (combine == Combine::kFirst || combine == Combine::kGate) return a;
  (combine == Combine::kAdd ? add_chunk<A> : multiply_chunk<A>)(a, b, z, n);
  return z;
}

template <class A> void pointwise_loop(const ChainOperands& call, const Region& region) {
  const Chain& chain = call.chain;
  const Loop<A> loop{call, region};
  Chunk<A> first, second, third;
  for_tiles<A>(region, [&](const Tile& tile) {
    const int64_t n = tile.size();
    A* y = loop.written(0, tile, third);
    const A* a = loop.read(1, tile, first);
    const A* b = chain.combine == Combine::kFirst ? nullptr : loop.read(2, tile, second);
    activate_chunk<A>(chain.activation, combine_chunk<A>(chain.combine, a, b, y, n), y, n);
    if (chain.combine == Combine::kGate) multiply_chunk<A>(y, b, y, n);
    scale_chunk<A>(y, chain.scale, n);
    loop.dropout(0, tile, y);
    loop.store(0, tile, y);
  });
}

// The gradients of one chunk, of g = dropout(scale * dy). For a sum da alone, which is also db.
template <class A>
inline void gradients(const Chain& chain, const A* g, const A* a, const A* b, A* da, A* db, const bool (&wants)[2], int64_t n) {
  if (chain.combine == Combine::kGate) {
    if (wants[0]) {
      multiply_chunk<A>(g, b, da, n);
      multiply_slope<A>(chain.activation, da, a, da, n);
    }
    if (wants[1]) {
      activate_chunk<A>(chain.activation, a, db, n);
      multiply_chunk<A>(db, g, db, n);
    }
    return;
  }
  multiply_slope<A>(chain.activation, g, combine_chunk<A>(chain.combine, a, b, db, n), da, n);
  if (chain.combine == Combine::kMul) {
    if (wants[1]) multiply_chunk<A>(a, da, db, n);
    multiply_chunk<A>(da, b, da, n);
  }
}

// g = dropout(scale * dy): dy itself where nothing is to be done.
template <class A, class F> inline const A* drop_and_scale(const Chain& chain, const A* dy, A* room, int64_t n, F&& dropout) {
  if (chain.scale == 1.0 && chain.threshold == 0) return dy;
  const at::vec::Vectorized<A> factor(static_cast<A>(chain.scale));
  map_chunk(dy, room, n, [&](auto x) { return x * factor; });
  if (chain.threshold) dropout(room);
  return room;
}

template <class A> void pointwise_bwd_loop(const ChainOperands& call, const Region& region) {
  const Chain& chain = call.chain;
  const Loop<A> loop{call, region};
  const int dy = call.wants[0] + call.wants[1];
  Chunk<A> first, second, third, fourth, fifth;
  for_tiles<A>(region, [&](const Tile& tile) {
    const int64_t n = tile.size();
    A* da = call.wants[0] ? loop.written(0, tile, fourth) : fourth;
    A* db = call.wants[1] && chain.combine != Combine::kAdd ? loop.written(call.wants[0], tile, fifth) : fifth;
    const A* g = drop_and_scale<A>(chain, loop.read(dy, tile, first), first, n, [&](A* t) { loop.dropout(dy, tile, t); });
    const A* a = loop.read(dy + 1, tile, second);
    const A* b = chain.combine == Combine::kFirst ? nullptr : loop.read(dy + 2, tile, third);
    gradients<A>(chain, g, a, b, da, db, call.wants, n);
    if (call.wants[0]) loop.store(0, tile, da);
    if (call.wants[1]) loop.store(call.wants[0], tile, chain.combine == Combine::kAdd ? da : db);
  });
}

// The sums of four rows are kept in the compute type before they are added to the others in double.
template <class A>
void columns_loop(const ChainColumns& call, int64_t begin, int64_t end, int64_t left, int64_t right, double* sums) {
  const Chain& chain = call.chain;
  const int64_t dy_size = size_of(call.dy_type), a_size = size_of(call.a_type), b_size = size_of(call.b_type);
  const bool wants[2] = {call.da != nullptr, true};
  Chunk<A> first, second, row, third, db, partial;
  for (int64_t start = left; start < right; start += kChunk<A>) {
    const int64_t n = std::min(kChunk<A>, right - start);
    load_chunk<A>(call.b_type, call.b + start * b_size, 1, n, row);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t position = r * call.cols + start;
      const A* dy = read_chunk<A>(call.dy_type, call.dy + position * dy_size, 1, n, first);
      const A* a = read_chunk<A>(call.a_type, call.a + position * a_size, 1, n, second);
      const A* g = drop_and_scale<A>(chain, dy, first, n, [&](A* t) {
        dropout_chunk<A>(t, n, static_cast<uint64_t>(position), static_cast<uint64_t>(*chain.seed), chain.threshold);
      });
      A* da = call.da ? write_chunk<A>(call.a_type, call.da + position * a_size, 1, n, third) : third;
      gradients<A>(chain, g, a, row, da, db, wants, n);
      if (call.da) store_chunk<A>(call.a_type, da, n, call.da + position * a_size, 1);
      const A* sum = chain.combine == Combine::kAdd || chain.combine == Combine::kFirst ? da : db;
      add_chunk<A>(partial, sum, partial, n);
      if ((r - begin) % 4 != 3 && r + 1 < end) continue;
      for (int64_t i = 0; i < n; ++i) sums[start + i] += partial.values[i];
      std::fill_n(partial.values, kChunk<A>, A(0));
    }
  }
}

}  // namespace

void pointwise(const ChainOperands& call, const Region& region) {
  (call.wide ? pointwise_loop<double> : pointwise_loop<float>)(call, region);
}

void pointwise_bwd(const ChainOperands& call, const Region& region) {
  (call.wide ? pointwise_bwd_loop<double> : pointwise_bwd_loop<float>)(call, region);
}

void pointwise_bwd_columns(const ChainColumns& call, int64_t begin, int64_t end, int64_t left, int64_t right, double* sums) {
  (call.wide ? columns_loop<double> : columns_loop<float>)(call, begin, end, left, right, sums);
}

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
