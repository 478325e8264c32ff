// CPU reductions on chunks (cpu/chunk.h). Compiled once per instruction set.
//
// Sums within a chunk, or of a few rows, are kept in the compute type in as many lanes as a vector has, and joined in double: the
// error of a sum does not grow with its length. Every order is a function of the arguments alone.
#include <cmath>

#include "cpu/chunk.h"
#include "cpu/kernels.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

using at::vec::Vectorized;

constexpr int64_t kFlush = 16;

template <class A> inline Vectorized<A> add_mapped(Map map, Vectorized<A> sum, Vectorized<A> x) {
  if (map == Map::kSquare) return at::vec::fmadd(x, x, sum);
  return sum + (map == Map::kAbs ? x.abs() : x);
}

// A sum of which the rounding errors are summed too (Neumaier), for the many chunks of a long row of doubles.
struct Compensated {
  double sum = 0, lost = 0;
  void add(double v) {
    const double next = sum + v;
    lost += std::abs(sum) >= std::abs(v) ? (sum - next) + v : (v - next) + sum;
    sum = next;
  }
  // Without the lost digits where they are none: they are NaN where the sum is infinite.
  double value() const { return std::isfinite(sum) ? sum + lost : sum; }
};

// The sum of f over a chunk, whose padding is zero.
template <Map map, class A> inline double sum_chunk(const A* values, int64_t n) {
  using V = Vectorized<A>;
  constexpr int64_t kStep = V::size();
  V sums[4] = {V(0), V(0), V(0), V(0)};
  int64_t i = 0;
  for (; i + 4 * kStep <= n; i += 4 * kStep)
    for (int k = 0; k < 4; ++k) sums[k] = add_mapped(map, sums[k], V::loadu(values + i + k * kStep));
  for (; i < n; i += kStep) sums[0] = add_mapped(map, sums[0], V::loadu(values + i));
  A lanes[kStep];
  ((sums[0] + sums[1]) + (sums[2] + sums[3])).store(lanes);
  double total = 0;
  for (const A lane : lanes) total += lane;
  return total;
}

// sums += f(values)
template <Map map, class A> inline void add_to(A* sums, const A* values, int64_t n) {
  zip_chunk(sums, values, sums, n, [](auto sum, auto x) { return add_mapped(map, sum, x); });
}

template <class A> inline void clear(A* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = 0;
}

template <Map map, class A>
void rows(const Reduction& c, int64_t blocks, int64_t block, int64_t begin, int64_t end, double* sums) {
  const int64_t element = size_of(c.type);
  Chunk<A> values;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t first = task % blocks * block, last = std::min(c.reduced, first + block);
    const char* in = c.in + task / blocks * c.outer_stride * element;
    Compensated sum;
    for (int64_t start = first; start < last; start += kChunk<A>) {
      const int64_t n = std::min(kChunk<A>, last - start);
      load_chunk<A>(c.type, in + start * c.reduced_stride * element, c.reduced_stride, n, values);
      clear<A>(values + n, padded<A>(n) - n);
      sum.add(sum_chunk<map, A>(values, n));
    }
    sums[task - begin] = sum.value();
  }
}

// Short rows that follow each other without a gap are taken `fold` at a time, as one row that is folded at the end.
template <Map map, class A>
void columns(const Reduction& c, int64_t outer, int64_t begin, int64_t end, int64_t left, int64_t right, double* sums) {
  const int64_t element = size_of(c.type), width = right - left;
  const bool gapless = c.inner_stride == 1 && c.reduced_stride == c.inner && width == c.inner;
  const int64_t fold = gapless ? std::max<int64_t>(1, std::min(kChunk<A> / width, end - begin)) : 1;
  const char* in = c.in + (outer * c.outer_stride + left * c.inner_stride) * element;
  Chunk<A> values, partial;
  double wide[kChunk<A>];
  clear(wide, fold * width);
  for (int64_t row = begin; row < end;) {
    for (int64_t count = 0; count < kFlush && row < end; ++count) {
      const int64_t n = std::min(fold, end - row) * width;
      load_chunk<A>(c.type, in + row * c.reduced_stride * element, c.inner_stride, n, values);
      clear<A>(values + n, padded<A>(n) - n);
      add_to<map, A>(partial, values, n);
      row += fold;
    }
    for (int64_t i = 0; i < fold * width; ++i) wide[i] += partial.values[i];
    clear<A>(partial, kChunk<A>);
  }
  for (int64_t i = 0; i < width; ++i) sums[i] = wide[i];
  for (int64_t i = width; i < fold * width; ++i) sums[i % width] += wide[i];
}

// Calls the instance of `function` for the map and the compute type.
#define KF_REDUCE(function, ...)                                                          \
  switch (c.map) {                                                                        \
    case Map::kSquare:                                                                    \
      return (c.wide ? function<Map::kSquare, double> : function<Map::kSquare, float>)(__VA_ARGS__); \
    case Map::kAbs: return (c.wide ? function<Map::kAbs, double> : function<Map::kAbs, float>)(__VA_ARGS__); \
    case Map::kNone: return (c.wide ? function<Map::kNone, double> : function<Map::kNone, float>)(__VA_ARGS__); \
  }

}  // namespace

void reduce_rows(const Reduction& c, int64_t blocks, int64_t block, int64_t begin, int64_t end, double* sums) {
  KF_REDUCE(rows, c, blocks, block, begin, end, sums)
}

void reduce_columns(const Reduction& c, int64_t outer, int64_t begin, int64_t end, int64_t left, int64_t right,
                    double* sums) {
  KF_REDUCE(columns, c, outer, begin, end, left, right, sums)
}

#undef KF_REDUCE

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
