// The arithmetic of backward row norms. A first pass over a row computes its two sums and adds to the gradients of weight and
// bias; a second pass computes dx. The row length alone decides the order of every sum.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/activation_loops.h"
#include "cpu/kernels.h"
#include "cpu/results.h"
#include "cpu/sums.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

// The number of rows for which `add_columns` has registers, and whether the addresses of prefetched and kept data fit too.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRowsAtOnce = 4;
constexpr bool kHasRoom = true;
#else
constexpr int kRowsAtOnce = 2;
constexpr bool kHasRoom = false;
#endif

constexpr int64_t kLongRow = 32768;

// At most this many elements keep xhat and g between the passes, so that the second need not convert x and dy again. They fit
// into the L1 cache together with x, dy, dx and the vectors of the columns.
constexpr int64_t kKept = 2048;

// How many rows are taken together and what is prefetched, decided once per call.
struct Passes {
  // Rows are taken one by one. Processors prefetch two contiguous streams best, and a row's reads overlap with the stores of
  // the row before. Shorter rows are taken together, because they share the joining of sums, and longer ones, because they
  // share the loads of dweight and dbias.
  bool alone;
  bool next_row;  // prefetch the next row's x in the first pass and dy in the second: processors stop at a page's end
  bool blocks;    // prefetch the next block in both passes: processors hardly prefetch the streams of several rows
  bool far;       // prefetch into L2: two blocks ahead in the first pass, the following rows in the second
  bool rows;      // prefetch both next rows in the second pass, instead of blocks
  int together;   // the number of rows taken together

  Passes(const Backward& c, int64_t cols, int64_t element_size) {
    const int64_t bytes = cols * element_size;
    const bool is_16_bit = element_size == 2;
    alone = c.is_far && (is_16_bit ? kHasRoom && bytes >= 768 && bytes <= 2048 : bytes >= 512 && bytes <= 8192);
    next_row = alone && bytes >= 3072;
    blocks = kHasRoom && !alone && (is_16_bit || c.streams);
    far = blocks && is_16_bit && c.is_far;
    rows = !kHasRoom && !alone && c.streams && bytes <= 8192;
    together = rows_together(c, cols, is_16_bit);
  }

 private:
  // Short rows are few enough for the second pass to find them in the cache. Long rows are taken in larger numbers,
  // which keeps dweight and dbias in the cache; fp32 rows beyond 2048 columns do the same. Very short fp32 rows in a cache
  // spend most of their time on loading dweight and dbias. fp16 and bf16 rows are limited to the two that can keep xhat and g.
  int rows_together(const Backward& c, int64_t cols, bool is_16_bit) const {
    if (cols > kLongRow) return kMostRowsTogether;
    if (alone) return 1;
    if (!is_16_bit) return cols > 2048 || (cols < 128 && !c.is_far) ? kRowsAtOnce : 2;
    return kRowsAtOnce * cols > kKept && 2 * cols <= kKept ? 2 : kRowsAtOnce;
  }

 public:
  static constexpr int kMostRowsTogether = 8;
};

// Whether relu stands before the norm (x) and after it (z, which its gradient needs). It is applied as elements are read.
struct Relus {
  bool x, z;
};
struct NoRelus {  // a norm without stages, known at compile time
  static constexpr bool x = false, z = false;
};

// A row, or its part from some column on: the tensors read, the address of dx (perhaps that of dy), and the row's sums.
template <class X, class DY> struct Row {
  using A = AccOf<X>;
  const X* x;
  const DY* dy;
  X* dx;
  A mean, rstd;
  const X* dh = nullptr;            // is added to dx
  int64_t next_x = 0, next_dy = 0;  // distances to the row that is read next, in elements
  double sum_g = 0, sum_gx = 0;
  A* kept = nullptr;        // room for xhat and g, which the second pass reads
  const A* bias = nullptr;  // needed to compute z again
};

// Row `row` from column `start` on. `next` is the row read after it, or the row itself if there is none.
template <class X, class DY> Row<X, DY> row_of(const Backward& c, int64_t row, int64_t next, int64_t start = 0) {
  using A = AccOf<X>;
  const int64_t x = row_offset(c.x_rows, row), dy = row_offset(c.dy_rows, row);
  Row<X, DY> result{static_cast<const X*>(c.x) + x + start, static_cast<const DY*>(c.dy) + dy + start,
                    c.dx ? static_cast<X*>(c.dx) + row * c.cols + start : nullptr,
                    c.rms ? A(0) : static_cast<const A*>(c.mean)[row], static_cast<const A*>(c.rstd)[row]};
  if (c.dh) result.dh = static_cast<const X*>(c.dh) + row_offset(c.dh_rows, row) + start;
  result.next_x = row_offset(c.x_rows, next) - x;
  result.next_dy = row_offset(c.dy_rows, next) - dy;
  return result;
}

// The gradient at z = xhat * w + b, given that of the result.
template <class V> KF_INLINE V dz_of(bool relu, const V& dy, const V& xhat, const V& w, const V& b) {
  return relu ? times_slope<act::relu>(dy, fma(xhat, w, b)) : dy;
}

// The number of elements that a prefetch runs ahead.
template <class A> constexpr int64_t kFetched = 8 * Pair<A>::kStep;

// A prepared weight. An absent weight is 1.
template <class A> struct PreparedWeight {
  const A* data;

  PreparedWeight from(int64_t start) const { return {cpu::CPU_CAPABILITY::from(data, start)}; }
  template <class P> KF_INLINE Pair<A> load(int64_t i, P part) const { return data ? load_pair(data + i, part) : both<A>(1); }
};

template <class X> PreparedWeight<AccOf<X>> weight_of(const Backward& c) { return {static_cast<const AccOf<X>*>(c.weight)}; }

// The weight of each column and the sums of its gradients, for rows that share them. The `first` rows begin the sums; other
// rows add to them.
template <class A> struct SharedColumns {
  PreparedWeight<A> weight;
  A *dweight, *dbias, *old_dweight, *old_dbias;

  SharedColumns(const Backward& c, bool first)
      : weight(weight_of<A>(c)), dweight(static_cast<A*>(c.dweight)), dbias(static_cast<A*>(c.dbias)),
        old_dweight(first ? nullptr : dweight), old_dbias(first ? nullptr : dbias) {}
  template <class P> KF_INLINE Pair<A> load_dweight(int64_t i, P part) const {
    return old_dweight ? load_pair(dweight + i, part) : both<A>(0);
  }
  template <class P> KF_INLINE Pair<A> load_dbias(int64_t i, P part) const {
    return old_dbias ? load_pair(dbias + i, part) : both<A>(0);
  }
  template <class P> KF_INLINE void store(int64_t i, const Pair<A>& dw, const Pair<A>& db, P part) const {
    if (dweight) store_pair(dweight + i, dw, part);
    if (dbias) store_pair(dbias + i, db, part);
  }
};

// Adds columns [start, stop), at most kStretch, to the sums of some rows and to dweight and dbias. The rows share the loads of
// the columns' vectors and are added one by one. xhat is rounded before it is used: equal elements then have equal digits,
// and cancel in dweight.
template <bool keeps, class X, class DY, class R, class C, size_t... r>
void add_columns(const Backward& c, const Passes& passes, R relus, Row<X, DY>* rows, C columns, int64_t start, int64_t stop,
                 std::index_sequence<r...>) {
  using A = AccOf<X>;
  using P = Pair<A>;
  using V = Vectorized<A>;
  constexpr size_t kRows = sizeof...(r);
  constexpr int64_t kBlock = kFetched<A>;
  const bool fetches = passes.blocks, fetches_row = kRows == 1 && passes.next_row;
  const int64_t next_row = rows[0].next_x, ahead = passes.far && c.cols > 2 * kBlock ? 2 * kBlock : kBlock;
  const std::array<const X*, kRows> x{rows[r].x...};
  const std::array<const DY*, kRows> dy{rows[r].dy...};
  const std::array<A*, kRows> kept{rows[r].kept...};
  const A* bias = relus.z ? rows[0].bias : nullptr;
  const std::array<V, kRows> mean{V(rows[r].mean)...}, rstd{V(rows[r].rstd)...};
  // One vector serves both halves of a pair in turn, because there are few registers.
  Sums<A, kRows> gs{(static_cast<void>(r), V(0))...}, gxs = gs;
  const auto add = [&](int64_t i, auto part, auto& g_sums, auto& gx_sums) KF_INLINE_LAMBDA {
    const P w = columns.weight.load(i, part), b = bias ? load_pair(bias + i, part) : both<A>(0);
    P dw = columns.load_dweight(i, part), db = columns.load_dbias(i, part);
    const auto add_half = [&]<size_t kRow, V P::* kHalf>() KF_INLINE_LAMBDA {
      V v = load_pair(x[kRow] + i, part).*kHalf;
      if (relus.x) v = act::relu::value<Math<A>>(v);
      const V xhat = (v - mean[kRow]) * rstd[kRow];
      const V d = dz_of(relus.z, load_pair(dy[kRow] + i, part).*kHalf, xhat, w.*kHalf, b.*kHalf), g = d * w.*kHalf;
      if constexpr (keeps) {
        A* const p = kept[kRow] + 2 * i + (kHalf == &P::a ? 0 : V::size());
        xhat.store(p);
        g.store(p + P::kStep);
      }
      dw.*kHalf = fma(d, xhat, dw.*kHalf);
      db.*kHalf = db.*kHalf + d;
      g_sums[kRow] = g_sums[kRow] + g;
      gx_sums[kRow] = fma(g, xhat, gx_sums[kRow]);
    };
    ((add_half.template operator()<r, &P::a>(), add_half.template operator()<r, &P::b>()), ...);
    columns.store(i, dw, db, part);
  };
  int64_t i = start;
  while (i + P::kStep <= stop) {
    Sums<A, kRows> g_block{(static_cast<void>(r), V(0))...}, gx_block = g_block;  // two levels of sums, as in lanes_over
    const bool is_last = i + ahead >= c.cols;                                     // then the next row's first block follows
    const std::array<int64_t, kRows> next_x{(is_last ? rows[r].next_x - i : ahead)...};
    const std::array<int64_t, kRows> next_dy{(is_last ? rows[r].next_dy - i : ahead)...};
    const int64_t end = std::min(stop, i + kBlock);
    // dh is needed in the second pass. It is prefetched here, because the first pass waits for memory anyway.
    if (rows[0].dh) (fetch(rows[r].dh + i, (end - i) * sizeof(X)), ...);
    for (; i + P::kStep <= end; i += P::kStep) {
      if (fetches) {
        (__builtin_prefetch(x[r] + i + next_x[r]), ...);
        (__builtin_prefetch(dy[r] + i + next_dy[r]), ...);
      }
      if (fetches_row) fetch(x[0] + i + next_row, P::kStep * sizeof(X));
      add(i, Whole{}, g_block, gx_block);
    }
    ((gs[r] = gs[r] + g_block[r], gxs[r] = gxs[r] + gx_block[r]), ...);
  }
  if (i < stop) add(i, Part{stop - i}, gs, gxs);
  const auto g = joined<A>(gs), gx = joined<A>(gxs);
  ((rows[r].sum_g += g[r], rows[r].sum_gx += gx[r]), ...);
}

// Writes dx of columns [start, stop), once the row's sums are whole. `results` is passed by value, so that the compiler knows
// that no store changes it.
template <class X, class DY, class R, class W, class Out>
KF_INLINE void write_dx(const Backward& c, const Passes& passes, R relus, const Row<X, DY>& row, W whole_weight, int64_t start,
                        int64_t stop, Out results) {
  using A = AccOf<X>;
  using P = Pair<A>;
  const X *x = row.x + start, *dh = from(row.dh, start);
  const DY* dy = row.dy + start;
  const W weight = whole_weight.from(start);
  const A mean = row.mean, rstd = row.rstd, slope = static_cast<A>(-row.sum_gx / c.cols) * rstd;
  const double mean_g = c.rms ? 0 : row.sum_g / c.cols;
  // In fp16 and bf16, x is at most some thousand times its own variation, so rounding `shift` hardly shows.
  constexpr bool kFolds = sizeof(X) == 2;
  const A shift = static_cast<A>(kFolds ? -mean_g - static_cast<double>(mean) * slope : -mean_g);
  const P means = both(mean), rstds = both(rstd), slopes = both(slope), shifts = both(shift);
  const auto gradient = [&](const P& g_shifted, const P& v) { return fma(kFolds ? v : v - means, slopes, g_shifted) * rstds; };
  const A* bias = relus.z ? from(row.bias, start) : nullptr;
  const int64_t next_x = row.next_x, next_dy = row.next_dy;
  const bool fetches_blocks = passes.blocks, fetches_far = passes.far;
  const bool fetches_x = passes.rows, fetches_dy = passes.rows || passes.next_row;
  sweep<A>(stop - start, [&](int64_t i, auto part) KF_INLINE_LAMBDA {
    if (fetches_blocks) {
      __builtin_prefetch(x + i + kFetched<A>);
      __builtin_prefetch(dy + i + kFetched<A>);
    }
    if (fetches_far) {
      __builtin_prefetch(x + i + next_x, 0, 2);
      __builtin_prefetch(dy + i + next_dy, 0, 2);
    }
    if (fetches_dy) fetch(dy + i + next_dy, P::kStep * sizeof(DY));
    if (fetches_x) fetch(x + i + next_x, P::kStep * sizeof(X));
    const P w = weight.load(i, part), b = bias ? load_pair(bias + i, part) : both<A>(0);
    P v = load_pair(x + i, part);
    if (relus.x) v = value_of<act::relu>(v);
    const P d = dz_of(relus.z, load_pair(dy + i, part), (v - means) * rstds, w, b);
    // dx of a row of one element must be exactly 0, so its g is rounded here as it was in the sum.
    const P shifted = std::is_same_v<decltype(part), Whole> ? fma(d, w, shifts) : d * w + shifts;
    const P g = gradient(shifted, v);
    results.put(i, dh ? g + load_pair(dh + i, part) : g, part);
  });
}

// Writes dx of a whole row from the xhat and g that the first pass kept.
template <class X, class DY, class R> KF_INLINE void write_kept_dx(const Backward& c, const Row<X, DY>& row, R results) {
  using A = AccOf<X>;
  using P = Pair<A>;
  const P rstds = both(row.rstd), slopes = both(static_cast<A>(-row.sum_gx / c.cols));
  const P shifts = both(c.rms ? A(0) : static_cast<A>(-row.sum_g / c.cols));
  const A* kept = row.kept;
  const auto* dh = row.dh;
  sweep<A>(c.cols, [&](int64_t i, auto part) {
    const A* p = kept + 2 * i;
    const P g = fma(load_pair(p), slopes, load_pair(p + P::kStep) + shifts) * rstds;
    results.put(i, dh ? g + load_pair(dh + i, part) : g, part);
  });
}

// The sums of dweight, dbias and dgate over rows. With totals in double, their errors grow with the number of rows no faster
// than those of PyTorch's cascaded sums.
template <class A> class ColumnSums {
 public:
  explicit ColumnSums(const Backward& c) : c(c) {}

  // Whether the sums begin anew at this row of the block; if so, the sums so far are added to the totals.
  bool begin_anew(int64_t row) {
    if (row == 0) return true;
    if (!c.totals || row % kRowsSummed) return false;
    add_to_totals();
    return true;
  }

  // Leaves the sums over all rows in dweight, dbias and dgate, rounded to the accumulator type.
  [[gnu::noinline]] void finish() {
    if (empty) return;
    each([&](A* sum, double* total) {
      for (int64_t i = 0; i < cols; ++i) sum[i] = static_cast<A>(total[i] + sum[i]);
    });
  }

 private:
  // It is not inlined, because it would take registers from neighbouring loops.
  [[gnu::noinline]] void add_to_totals() {
    each([&](A* sum, double* total) {
      if (empty) std::copy_n(sum, cols, total);
      else
        for (int64_t i = 0; i < cols; ++i) total[i] += sum[i];
    });
    empty = false;
  }

  template <class F> KF_INLINE void each(F&& f) {
    if (c.dweight) f(static_cast<A*>(c.dweight), c.totals);
    if (c.dbias) f(static_cast<A*>(c.dbias), c.totals + cols);
    if (c.dgate) f(static_cast<A*>(c.dgate), c.totals + 2 * cols);
  }

  const Backward& c;
  const int64_t cols = c.groups * c.cols;
  bool empty = true;  // nothing has been added to the totals
};

// The first pass over columns [start, stop) of `count` rows, as many at once as registers allow.
template <bool keeps, class X, class DY, class R>
void add_stretch(const Backward& c, const Passes& passes, R relus, Row<X, DY>* rows, int64_t count, bool first, int64_t start,
                 int64_t stop) {
  int64_t r = 0;
  const auto add = [&]<size_t kRows>(std::index_sequence<kRows>) {
    for (; r + static_cast<int64_t>(kRows) <= count; r += kRows)
      add_columns<keeps>(c, passes, relus, rows + r, SharedColumns<AccOf<X>>(c, first && r == 0), start, stop,
                         std::make_index_sequence<kRows>());
  };
  add(std::index_sequence<kRowsAtOnce>());
  if constexpr (kRowsAtOnce > 2) add(std::index_sequence<2>());
  add(std::index_sequence<1>());
}

// The first pass over a few rows, strip by strip, so that the vectors of a strip's columns stay in the cache.
template <class X, class DY, class R>
void add_together(const Backward& c, const Passes& passes, R relus, Row<X, DY>* rows, int count, bool first) {
  const int64_t width = strip_width(c.cols);
  for (int64_t start = 0; start < c.cols; start += width)
    add_stretch<false>(c, passes, relus, rows, count, first, start, std::min(start + width, c.cols));
}

// Both passes over a few rows.
template <class X>
KF_INLINE void backward_together(const Backward& c, const Passes& passes, Row<X, X>* rows, int count, bool first,
                                 RowResults& results) {
  using R = Results<X>;
  if constexpr (sizeof(X) == 2 && kHasRoom)
    if (c.dx && passes.together * c.cols <= kKept) {  // decided without `count`: dx depends on its row alone
      using A = AccOf<X>;
      alignas(64) A room[2 * (kKept + kRowsAtOnce * Pair<A>::kStep)];
      for (int r = 0; r < count; ++r) rows[r].kept = room + 2 * r * whole_pairs<A>(c.cols);
      add_stretch<true>(c, passes, NoRelus{}, rows, count, first, 0, c.cols);
      for (int r = 0; r < count; ++r) {
        write_kept_dx(c, rows[r], results.open<R>(rows[r].dx));
        results.close(c.cols);
      }
      return;
    }
  add_together(c, passes, NoRelus{}, rows, count, first);
  if (!c.dx) return;
  for (int64_t start = 0; start < c.cols; start += kStretch)
    for (int r = 0; r < count; ++r) {
      const int64_t stop = std::min(start + kStretch, c.cols);
      write_dx(c, passes, NoRelus{}, rows[r], weight_of<X>(c), start, stop, results.open<R>(rows[r].dx + start));
      results.close(stop - start);
    }
}

}  // namespace
}  // namespace kf::cpu::CPU_CAPABILITY
