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

  void load(int k, const Tile& tile, A* out) const {
    const Dtype type = call.types[k];
    for_stretches(region, k, size_of(type), tile, [&](const char* p, int64_t stride, int64_t n, int64_t first) {
      load_chunk(type, p, stride, n, out + first);
    });
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

// z = the argument of the activation, where a holds `a` before.
template <class A> inline void combine_chunk(Combine combine, A* a, const A* b, int64_t n) {
  if (combine == Combine::kAdd) add_chunk(a, b, n);
  if (combine == Combine::kMul) multiply_chunk(a, b, n);
}

template <class A> void pointwise_loop(const ChainOperands& call, const Region& region) {
  const Chain& chain = call.chain;
  const Loop<A> loop{call, region};
  Chunk<A> a, b;
  for_tiles<A>(region, [&](const Tile& tile) {
    const int64_t n = tile.size();
    loop.load(1, tile, a);
    if (chain.combine != Combine::kFirst) loop.load(2, tile, b);
    combine_chunk<A>(chain.combine, a, b, n);
    activate_chunk<A>(chain.activation, a, n);
    if (chain.combine == Combine::kGate) multiply_chunk<A>(a, b, n);
    scale_chunk<A>(a, chain.scale, n);
    loop.dropout(0, tile, a);
    loop.store(0, tile, a);
  });
}

// g *= the slope of the activation at z, which is overwritten.
template <class A> inline void multiply_slope(int32_t activation, A* g, A* z, int64_t n) {
  if (is_identity(activation)) return;
  slope_chunk<A>(activation, z, z, n);
  multiply_chunk<A>(g, z, n);
}

// The gradients of one chunk. g: in, dropout(scale * dy); out, da. a: in, a; out, db, but for a sum, whose db is da. z: room.
template <class A>
inline void gradients(const Chain& chain, A* g, A* a, const A* b, A* z, const bool (&wants)[2], int64_t n) {
  map_chunk<A>(a, z, n, [](auto x) { return x; });
  combine_chunk<A>(chain.combine, z, b, n);
  if (chain.combine == Combine::kGate) {
    if (wants[1]) {
      activate_chunk<A>(chain.activation, a, n);
      multiply_chunk<A>(a, g, n);
    }
    if (!wants[0]) return;
    multiply_slope<A>(chain.activation, g, z, n);
    return multiply_chunk<A>(g, b, n);
  }
  multiply_slope<A>(chain.activation, g, z, n);
  if (chain.combine == Combine::kMul) {
    multiply_chunk<A>(a, g, n);
    multiply_chunk<A>(g, b, n);
  }
}

template <class A> void pointwise_bwd_loop(const ChainOperands& call, const Region& region) {
  const Chain& chain = call.chain;
  const Loop<A> loop{call, region};
  const int dy = call.wants[0] + call.wants[1];
  Chunk<A> g, a, b, z;
  for_tiles<A>(region, [&](const Tile& tile) {
    const int64_t n = tile.size();
    loop.load(dy, tile, g);
    loop.load(dy + 1, tile, a);
    if (chain.combine != Combine::kFirst) loop.load(dy + 2, tile, b);
    scale_chunk<A>(g, chain.scale, n);
    loop.dropout(dy, tile, g);
    gradients<A>(chain, g, a, b, z, call.wants, n);
    if (call.wants[0]) loop.store(0, tile, g);
    if (call.wants[1]) loop.store(call.wants[0], tile, chain.combine == Combine::kAdd ? g : a);
  });
}

template <class A>
void columns_loop(const ChainColumns& call, int64_t begin, int64_t end, int64_t left, int64_t right, double* sums) {
  const Chain& chain = call.chain;
  const int64_t dy_size = size_of(call.dy_type), a_size = size_of(call.a_type), b_size = size_of(call.b_type);
  const bool wants[2] = {call.da != nullptr, true};
  Chunk<A> g, a, z, row;
  for (int64_t start = left; start < right; start += kChunk<A>) {
    const int64_t n = std::min(kChunk<A>, right - start);
    load_chunk<A>(call.b_type, call.b + start * b_size, 1, n, row);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t position = r * call.cols + start;
      load_chunk<A>(call.dy_type, call.dy + position * dy_size, 1, n, g);
      load_chunk<A>(call.a_type, call.a + position * a_size, 1, n, a);
      scale_chunk<A>(g, chain.scale, n);
      if (chain.threshold) {
        const auto seed = static_cast<uint64_t>(*chain.seed);
        dropout_chunk<A>(g, n, static_cast<uint64_t>(position), seed, chain.threshold);
      }
      gradients<A>(chain, g, a, row, z, wants, n);
      if (call.da) store_chunk<A>(call.a_type, g, n, call.da + position * a_size, 1);
      const A* db = chain.combine == Combine::kAdd ? g : a;
      for (int64_t i = 0; i < n; ++i) sums[start + i] += db[i];
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
