// CPU reductions on chunks (cpu/chunk.h). Compiled once per instruction set.
//
// The sums within a chunk, or of a few rows, stay in the lanes of vectors of the compute type. They are joined in double, so
// the error of a sum does not grow with its length. The arguments alone decide the order of every sum.
#include <algorithm>
#include <cmath>

#include "cpu/chunk.h"
#include "cpu/kernels.h"
#include "cpu/rows.h"
#include "cpu/sums.h"

namespace kf::cpu::CPU_CAPABILITY {

StoreSums store_sums;

namespace {

constexpr int64_t kFlush = 16;

template <class A> inline Pair<A> add_mapped(Map map, const Pair<A>& sum, const Pair<A>& x) {
  if (map == Map::kSquare) return fma(x, x, sum);
  return map == Map::kAbs ? sum + Pair<A>{x.a.abs(), x.b.abs()} : sum + x;
}

// A sum and the sum of its rounding errors (Neumaier's method), for the many chunks of a long row of doubles.
struct Compensated {
  double sum = 0, lost = 0;
  void add(double v) {
    const double next = sum + v;
    lost += std::abs(sum) >= std::abs(v) ? (sum - next) + v : (v - next) + sum;
    sum = next;
  }
  // `lost` is NaN if the sum is infinite.
  double value() const { return std::isfinite(sum) ? sum + lost : sum; }
};

// The sum of f over n elements.
template <Map map, class A> inline double sum_of_mapped(const Source<A>& in, int64_t n) {
  constexpr int64_t kStep = Pair<A>::kStep;
  Pair<A> first = both<A>(0), second = both<A>(0);
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    first = add_mapped(map, first, in.load(i));
    second = add_mapped(map, second, in.load(i + kStep));
  }
  for (; i + kStep <= n; i += kStep) first = add_mapped(map, first, in.load(i));
  if (i < n) first = add_mapped(map, first, in.load(i, Part{n - i}));
  return total(first + second);
}

// Adds f(in) to `sums`, rounded up to whole pairs.
template <Map map, class A> inline void add_to(A* sums, const Source<A>& in, int64_t n) {
  sweep<A>(n, [&](int64_t i, auto part) { store_pair(sums + i, add_mapped(map, load_pair(sums + i), in.load(i, part))); });
}

// The policy of row reductions.
template <Map map, class A> struct ReducedRows {
  using Args = Reduction;
  static constexpr int64_t kTogether = 256;
  struct Row {
    const char* in;
    int64_t index;
  };
  const Reduction& c;

  Row row(int64_t index, char*) const { return {c.in + index * c.outer_stride * size_of(c.type), index}; }

  double reduce(const Row& row, int64_t begin, int64_t end) const {
    Chunk<A> values;
    Compensated sum;
    for (int64_t start = begin; start < end; start += kChunk<A>) {
      const int64_t n = std::min(kChunk<A>, end - start);
      const char* chunk = row.in + start * c.reduced_stride * size_of(c.type);
      sum.add(sum_of_mapped<map, A>(read_chunk<A>(c.type, chunk, c.reduced_stride, n, values), n));
    }
    return sum.value();
  }

  void finish(const Row* rows, int64_t count, const double* carries, int64_t pieces, Args::Total*) const {
    double sums[kTogether];
    for (int64_t r = 0; r < count; ++r, carries += pieces) {
      sums[r] = carries[0];
      for (int64_t i = 1; i < pieces; ++i) sums[r] += carries[i];
    }
    store_sums(sums, count, c.divisor, c.out_type, c.out + rows->index * size_of(c.out_type));
  }
};

// Sums over columns. `fold` short rows without gaps between them are taken as one row, whose sums are folded at the end.
template <Map map, class A>
void columns(const Reduction& c, int64_t outer, int64_t begin, int64_t end, int64_t left, int64_t right, double* sums) {
  const int64_t element = size_of(c.type), width = right - left;
  const bool gapless = c.inner_stride == 1 && c.reduced_stride == c.inner && width == c.inner;
  const int64_t fold = gapless ? std::max<int64_t>(1, std::min(kChunk<A> / width, end - begin)) : 1;
  const char* in = c.in + (outer * c.outer_stride + left * c.inner_stride) * element;
  Chunk<A> values, partial;
  double wide[kChunk<A>];
  std::fill_n(wide, fold * width, 0.0);
  std::fill_n(partial.values, kChunk<A>, A(0));
  for (int64_t row = begin; row < end;) {
    for (int64_t count = 0; count < kFlush && row < end; ++count) {
      const int64_t n = std::min(fold, end - row) * width;
      const char* chunk = in + row * c.reduced_stride * element;
      add_to<map, A>(partial, read_chunk<A>(c.type, chunk, c.inner_stride, n, values), n);
      row += fold;
    }
    for (int64_t i = 0; i < fold * width; ++i) wide[i] += partial.values[i];
    std::fill_n(partial.values, kChunk<A>, A(0));
  }
  for (int64_t i = 0; i < width; ++i) sums[i] = wide[i];
  for (int64_t i = width; i < fold * width; ++i) sums[i % width] += wide[i];
}

template <Map map, class A> void reduce_rows_of(const Reduction& c, const RowTask<Reduction>& task) {
  run_rows(ReducedRows<map, A>{c}, c, task);
}

// Calls the instance of `function` for the map and the compute type.
#define KF_REDUCE(function, ...)                                                                                      \
  switch (c.map) {                                                                                                    \
    case Map::kSquare: return (c.wide ? function<Map::kSquare, double> : function<Map::kSquare, float>)(__VA_ARGS__); \
    case Map::kAbs: return (c.wide ? function<Map::kAbs, double> : function<Map::kAbs, float>)(__VA_ARGS__);          \
    case Map::kNone: return (c.wide ? function<Map::kNone, double> : function<Map::kNone, float>)(__VA_ARGS__);       \
  }

// Adds eight rows at a time, then those sums. It takes kWidth columns, as many as registers hold.
template <int64_t kWidth, class A> void add_rows_of(const A* rows, int64_t count, int64_t pitch, double* sums) {
  constexpr int64_t kGroup = 8;
  double total[kWidth] = {};
  for (int64_t first = 0; first < count; first += kGroup) {
    double group[kWidth] = {};
    for (int64_t r = first; r < std::min(count, first + kGroup); ++r)
      for (int64_t i = 0; i < kWidth; ++i) group[i] += rows[r * pitch + i];
    for (int64_t i = 0; i < kWidth; ++i) total[i] += group[i];
  }
  std::copy_n(total, kWidth, sums);
}

template <class A> void add_rows_of(const A* rows, int64_t count, int64_t pitch, int64_t n, double* sums) {
  constexpr int64_t kWidth = 2 * Vectorized<float>::size();
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) add_rows_of<kWidth>(rows + i, count, pitch, sums + i);
  for (; i < n; ++i) add_rows_of<1>(rows + i, count, pitch, sums + i);
}

}  // namespace

void add_rows(Dtype type, const void* rows, int64_t count, int64_t pitch, int64_t n, double* sums) {
  if (type == Dtype::kDouble) add_rows_of(static_cast<const double*>(rows), count, pitch, n, sums);
  else add_rows_of(static_cast<const float*>(rows), count, pitch, n, sums);
}

void reduce_rows(const Reduction& c, const RowTask<Reduction>& task) { KF_REDUCE(reduce_rows_of, c, task) }

void reduce_columns(const Reduction& c, int64_t outer, int64_t begin, int64_t end, int64_t left, int64_t right, double* sums) {
  KF_REDUCE(columns, c, outer, begin, end, left, right, sums)
}

#undef KF_REDUCE

void store_sums(const double* sums, int64_t n, double divisor, Dtype type, void* out) {
  with_type(type, [&]<class T>(T*) {
    using A = AccOf<T>;
    Chunk<A> rounded;
    for (int64_t start = 0; start < n; start += kChunk<A>) {
      const int64_t count = std::min(kChunk<A>, n - start);
      if (divisor == 1.0)  // the division would take longer than everything else
        for (int64_t i = 0; i < count; ++i) rounded.values[i] = static_cast<A>(sums[start + i]);
      else
        for (int64_t i = 0; i < count; ++i) rounded.values[i] = static_cast<A>(sums[start + i] / divisor);
      convert(rounded.values, count, static_cast<T*>(out) + start);
    }
  });
}

}  // namespace kf::cpu::CPU_CAPABILITY
