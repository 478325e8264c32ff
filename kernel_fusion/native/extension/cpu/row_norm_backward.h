// The arithmetic of the backward row norms: one pass over a row for the two sums and the weight gradients, one for dx. The
// order of every sum depends on the row length alone.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/activation_loops.h"
#include "cpu/kernels.h"
#include "cpu/results.h"
#include "cpu/sums.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

// As many rows as `add_columns` has registers for, and whether it has more for the addresses of what it fetches and keeps.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRowsAtOnce = 4;
constexpr bool kHasRoom = true;
#else
constexpr int kRowsAtOnce = 2;
constexpr bool kHasRoom = false;
#endif

constexpr int64_t kLongRow = 32768;

// Elements of rows taken together of which the second pass gets xhat and g from the first, which spares converting x and dy
// again: so many that these, x, dy, dx and what belongs to the columns have room in the L1 cache.
constexpr int64_t kKept = 2048;

// How the rows of a call are taken, and what is fetched before it is read; decided once, by where rows lie and how long they
// are.
struct Passes {
  // Rows go one by one: processors see ahead best in two streams of addresses without a gap, and the reads of a row overlap
  // with the stores of the one before. Shorter rows share the joining of their sums instead, longer ones the loads of dweight
  // and dbias.
  bool alone;
  bool next_row;  // the first pass fetches x of the next row, the second its dy: processors stop seeing ahead at the end of a
                  // page
  bool blocks;    // both passes fetch the next block of columns: processors hardly see ahead in the streams of several rows
  bool far;       // the first pass fetches two blocks ahead, and the second the rows after these, to the L2 cache
  bool rows;      // the second pass fetches both rows that come next, where there was no room to fetch blocks
  int together;   // rows that are taken together

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
  // Short rows: so few that they are still in the cache for the second pass. Long ones never are; dweight and dbias ought to
  // stay instead, also for fp32 beyond 2048 columns. Loading these takes longest for very short rows of fp32 in the cache. Two
  // rows of fp16 or bf16 if these can be kept, but more cannot.
  int rows_together(const Backward& c, int64_t cols, bool is_16_bit) const {
    if (cols > kLongRow) return kMostRowsTogether;
    if (alone) return 1;
    if (!is_16_bit) return cols > 2048 || (cols < 128 && !c.is_far) ? kRowsAtOnce : 2;
    return kRowsAtOnce * cols > kKept && 2 * cols <= kKept ? 2 : kRowsAtOnce;
  }

 public:
  static constexpr int kMostRowsTogether = 8;
};

// relu before the norm, of x, and after it, where its gradient needs z. Both are applied to elements as they are read.
struct Relus {
  bool x, z;
};
struct NoRelus {  // as the loops of the bare norm know when they are compiled
  static constexpr bool x = false, z = false;
};

// The part of one row in backward: what is read, where dx goes, and its sums. dx may be dy.
template <class X, class DY> struct Row {
  using A = AccOf<X>;
  const X* x;
  const DY* dy;
  X* dx;  // null: not wanted
  A mean, rstd;
  const X* dh = nullptr;            // is added to dx
  int64_t next_x = 0, next_dy = 0;  // how far ahead of x and dy lies what will be read in their place
  double sum_g = 0, sum_gx = 0;
  A* kept = nullptr;        // of each pair xhat and then g, for the second pass; see backward_together
  const A* bias = nullptr;  // for z
};

// A row from column `start` on. Row `next` will be read in its place; the row itself: none will.
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

// dz, the gradient before the activation behind the norm.
template <class V> KF_INLINE V dz_of(bool relu, const V& dy, const V& xhat, const V& w, const V& b) {
  return relu ? times_slope<act::relu>(dy, fma(xhat, w, b)) : dy;
}

// Columns of a row that are fetched together.
template <class A> constexpr int64_t kFetched = 8 * Pair<A>::kStep;

// Fetches what will be read soon.
KF_INLINE void fetch(const void* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(p) + line);
}

// Adds to the sums of some rows, and to dweight and dbias, what the columns [start, stop) have, at most kStretch; where the
// rows are the `first`, dweight and dbias begin with them. The rows share the loads of weight and of dweight and dbias, to
// which they are added one by one. xhat is rounded for itself: elements that are alike are so with all digits, and cancel in
// dweight with them.
template <bool keeps, class X, class DY, class R, size_t... r>
void add_columns(const Backward& c, const Passes& passes, R relus, Row<X, DY>* rows, bool first, int64_t start, int64_t stop,
                 std::index_sequence<r...>) {
  using A = AccOf<X>;
  using P = Pair<A>;
  using V = Vectorized<A>;
  constexpr size_t kRows = sizeof...(r);
  constexpr int64_t kBlock = kFetched<A>;
  const bool fetches = passes.blocks, fetches_row = kRows == 1 && passes.next_row;
  const int64_t next_row = rows[0].next_x, ahead = passes.far && c.cols > 2 * kBlock ? 2 * kBlock : kBlock;
  const auto* weight = static_cast<const A*>(c.weight);
  auto* dweight = static_cast<A*>(c.dweight);
  auto* dbias = static_cast<A*>(c.dbias);
  const A *old_dweight = first ? nullptr : dweight, *old_dbias = first ? nullptr : dbias;
  const std::array<const X*, kRows> x{rows[r].x...};
  const std::array<const DY*, kRows> dy{rows[r].dy...};
  const std::array<A*, kRows> kept{rows[r].kept...};
  const A* bias = relus.z ? rows[0].bias : nullptr;
  const std::array<V, kRows> mean{V(rows[r].mean)...}, rstd{V(rows[r].rstd)...};
  // One vector for both halves of a pair, one after the other: there are not registers enough for more.
  Sums<A, kRows> gs{(static_cast<void>(r), V(0))...}, gxs = gs;
  const auto add = [&](int64_t i, auto part, auto& g_sums, auto& gx_sums) KF_INLINE_LAMBDA {
    const P w = weight ? load_pair(weight + i, part) : both<A>(1), b = bias ? load_pair(bias + i, part) : both<A>(0);
    P dw = old_dweight ? load_pair(dweight + i, part) : both<A>(0), db = old_dbias ? load_pair(dbias + i, part) : both<A>(0);
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
    if (dweight) store_pair(dweight + i, dw, part);
    if (dbias) store_pair(dbias + i, db, part);
  };
  int64_t i = start;
  while (i + P::kStep <= stop) {
    Sums<A, kRows> g_block{(static_cast<void>(r), V(0))...}, gx_block = g_block;  // two levels, as in lanes_over
    const bool is_last = i + ahead >= c.cols;  // what follows it is the first block of the next row
    const std::array<int64_t, kRows> next_x{(is_last ? rows[r].next_x - i : ahead)...};
    const std::array<int64_t, kRows> next_dy{(is_last ? rows[r].next_dy - i : ahead)...};
    const int64_t end = std::min(stop, i + kBlock);
    // The second pass reads it; the first waits for memory anyway.
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

// dx of the columns [start, stop), once the sums are those of the whole row, to `results`, which begin at `start`. These are
// given by value, so that no store can be taken for a change of them.
template <class X, class DY, class R, class Out>
KF_INLINE void write_dx(const Backward& c, const Passes& passes, R relus, const Row<X, DY>& row, int64_t start, int64_t stop,
                        Out results) {
  using A = AccOf<X>;
  using P = Pair<A>;
  const X *x = row.x + start, *dh = from(row.dh, start);
  const DY* dy = row.dy + start;
  const A* weight = from(static_cast<const A*>(c.weight), start);
  const A mean = row.mean, rstd = row.rstd, slope = static_cast<A>(-row.sum_gx / c.cols) * rstd;
  const double mean_g = c.rms ? 0 : row.sum_g / c.cols;
  // x of 16 bits can hardly be more than some thousand times as large as it varies: what rounding `shift` adds is small beside
  // rounding dx.
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
    const P w = weight ? load_pair(weight + i, part) : both<A>(1), b = bias ? load_pair(bias + i, part) : both<A>(0);
    P v = load_pair(x + i, part);
    if (relus.x) v = value_of<act::relu>(v);
    const P d = dz_of(relus.z, load_pair(dy + i, part), (v - means) * rstds, w, b);
    // In rows of one element dx is exactly 0: of a part, g is rounded as it was for its sum.
    const P shifted = std::is_same_v<decltype(part), Whole> ? fma(d, w, shifts) : d * w + shifts;
    const P g = gradient(shifted, v);
    results.put(i, dh ? g + load_pair(dh + i, part) : g, part);
  });
}

// dx of a whole row, from what was kept of it.
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

// dweight and dbias: with room for totals the error of a sum grows no faster with the rows than that of PyTorch's sums, which
// are cascades.
template <class A> class ColumnSums {
 public:
  explicit ColumnSums(const Backward& c) : c(c) {}

  // Whether dweight and dbias begin anew with row `row`, counted from the first.
  bool begin_anew(int64_t row) {
    if (row == 0) return true;
    if (!c.totals || row % kRowsSummed) return false;
    add_to_totals();
    return true;
  }

  // The sums of all rows, rounded.
  [[gnu::noinline]] void finish() {
    if (empty) return;
    each([&](A* sum, double* total) {
      for (int64_t i = 0; i < cols; ++i) sum[i] = static_cast<A>(total[i] + sum[i]);
    });
  }

 private:
  // Out of line: inlined, it takes registers from the loops beside it.
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
  }

  const Backward& c;
  const int64_t cols = c.groups * c.cols;
  bool empty = true;  // the totals
};

// Calls `add_columns` for any number of rows.
template <bool keeps, class X, class DY, class R>
void add_stretch(const Backward& c, const Passes& passes, R relus, Row<X, DY>* rows, int64_t count, bool first, int64_t start,
                 int64_t stop) {
  int64_t r = 0;
  const auto add = [&]<size_t kRows>(std::index_sequence<kRows>) {
    for (; r + static_cast<int64_t>(kRows) <= count; r += kRows)
      add_columns<keeps>(c, passes, relus, rows + r, first && r == 0, start, stop, std::make_index_sequence<kRows>());
  };
  add(std::index_sequence<kRowsAtOnce>());
  if constexpr (kRowsAtOnce > 2) add(std::index_sequence<2>());
  add(std::index_sequence<1>());
}

// The sums of a few rows, from one strip of columns to the next: while the rows pass by, what is added up stays in the cache.
// `first`: as in add_columns.
template <class X, class DY, class R>
void add_together(const Backward& c, const Passes& passes, R relus, Row<X, DY>* rows, int count, bool first) {
  const int64_t width = strip_width(c.cols);
  for (int64_t start = 0; start < c.cols; start += width)
    add_stretch<false>(c, passes, relus, rows, count, first, start, std::min(start + width, c.cols));
}

// These and dx of a few rows, likewise.
template <class X>
KF_INLINE void backward_together(const Backward& c, const Passes& passes, Row<X, X>* rows, int count, bool first,
                                 RowResults& results) {
  using R = Results<X>;
  if constexpr (sizeof(X) == 2 && kHasRoom)
    if (c.dx && passes.together * c.cols <= kKept) {  // also of the last rows, fewer: dx depends on its row alone
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
      write_dx(c, passes, NoRelus{}, rows[r], start, stop, results.open<R>(rows[r].dx + start));
      results.close(stop - start);
    }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
