// Row norms, forward and backward, of rows that lie in memory as they are: what the kernels with and without stages share.
//
// Forward: one pass over a row for the statistics (cpu/moments.h), one for the result. Backward: one pass for the two sums and the
// weight gradients, one for dx. The order of every sum depends on the row length alone.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/moments.h"
#include "cpu/results.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

// What begins `start` elements later; of what is absent, nothing.
template <class A> const A* from(const A* p, int64_t start) { return p ? p + start : nullptr; }

// mean (0 for RMSNorm) and rstd of the rows x[0 ... count), which are those from `first` on, stored where they are wanted. What takes
// long and would be waited for, root and division, is done of all together.
template <class T>
void statistics(const Forward& c, const T* const* x, int64_t first, int64_t count, AccOf<T>* mean, AccOf<T>* rstd) {
  using A = AccOf<T>;
  using V = Vectorized<double>;
  double means[kMostRows] = {}, variances[kMostRows] = {};
  if (are_read_twice<T>(c.cols, c.rms)) {
    moments_read_twice(x, count, c.cols, means, variances);
  } else if (are_joined(count, c.cols)) {
    moments_together(x, count, c.cols, c.rms, means, variances);
  } else {
    A center[kMostRows] = {};
    for (int64_t r = 0; !c.rms && r < count; ++r) center[r] = center_of(x[r], std::min(c.cols, kStretch));
    for (int64_t r = 0; r < count; ++r) {
      const Moments m = moments(x[r], c.cols, c.rms, center[r]);
      means[r] = m.mean;
      variances[r] = m.variance;
    }
  }
  for (int64_t r = 0; r < count; r += V::size()) (V(1) / (V::loadu(variances + r) + V(c.eps)).sqrt()).store(variances + r);
  std::copy_n(means, count, mean);
  std::copy_n(variances, count, rstd);
  if (c.mean) std::copy_n(mean, count, static_cast<A*>(c.mean) + first);
  if (c.rstd) std::copy_n(rstd, count, static_cast<A*>(c.rstd) + first);
}

// What `statistics` finds of one row, from the moments of its stretches.
inline RowStatistics statistics_from(const Forward& c, const StretchMoments* stretches) {
  JoinedMoments row;
  for (int64_t start = 0; start < c.cols; start += kStretch)
    row.add(stretches[start / kStretch], std::min(kStretch, c.cols - start), c.rms);
  const auto [mean, variance] = row.total(1 / static_cast<double>(c.cols));
  return {mean, 1 / std::sqrt(variance + c.eps)};
}

// y = (x - mean) * rstd * weight + bias over [0, n), to `results`, which may be x. `next`: how far ahead of x lies what will be read
// in its place, which is fetched into the L2 cache; 0: nothing is. Always inline: handed over in memory, `results` cost every row some
// 25 cycles, forward of 5242 x 100 fp32 0.24 ns per element instead of 0.19 (EPYC with AVX-512, 1 thread).
template <class X, class W, class Y>
KF_INLINE void normalize(const X* x, AccOf<X> mean, AccOf<X> rstd, const W* weight, const W* bias, int64_t n, Results<Y> results,
                         int64_t next = 0) {
  using A = AccOf<X>;
  const auto means = both(mean), rstds = both(rstd);
  const auto write = [&](auto&& scale_shift) {
    sweep<A>(n, [&](int64_t i, auto part) {
      if constexpr (sizeof(X) == 2)
        if (next) __builtin_prefetch(x + i + next, 0, 2);
      results.put(i, scale_shift((load_pair(x + i, part) - means) * rstds, i, part), part);
    });
  };
  if (weight && bias)
    write([&](auto v, int64_t i, auto part) { return fma(v, load_pair(weight + i, part), load_pair(bias + i, part)); });
  else if (weight) write([&](auto v, int64_t i, auto part) { return v * load_pair(weight + i, part); });
  else if (bias) write([&](auto v, int64_t i, auto part) { return v + load_pair(bias + i, part); });
  else write([](auto v, int64_t, auto) { return v; });
}

template <class A> A saved_mean(const Backward& c, int64_t row) { return c.rms ? A(0) : static_cast<const A*>(c.mean)[row]; }

// What backward reads and writes of one row. dx, null where it is not wanted, may be dy.
template <class X, class DY> struct Row {
  const X* x;
  const DY* dy;
  X* dx;
  AccOf<X> mean, rstd;
  const X* dh = nullptr;  // is added to dx; null: nothing
  int64_t next_x = 0, next_dy = 0;  // how far ahead of x and dy lies what will be read in their place
  double sum_g = 0, sum_gx = 0;
  AccOf<X>* kept = nullptr;  // of each pair xhat and then g, for the second pass; see backward_together
  const AccOf<X>* bias = nullptr;  // where an activation comes after the norm
};

// The gradient before the activation after the norm, at z = xhat * w + b, where a row of dy says that it arrives behind one.
template <class DY> inline constexpr bool kBehind = requires { typename DY::Activation; };
template <class DY, class V> KF_INLINE V dz_of(const V& dy, const V& xhat, const V& w, const V& b) {
  if constexpr (kBehind<DY>) return DY::dz(dy, fma(xhat, w, b));
  else return dy;
}

// The address of an element.
inline const char* element(Dtype dtype, const void* tensor, int64_t index) {
  return static_cast<const char*>(tensor) + index * size_of(dtype);
}
inline char* element(Dtype dtype, void* tensor, int64_t index) { return static_cast<char*>(tensor) + index * size_of(dtype); }

// A row from column `start` on. Row `next` will be read in its place; the row itself: none will.
template <class X, class DY> Row<X, DY> row_of(const Backward& c, int64_t row, int64_t next, int64_t start = 0) {
  using A = AccOf<X>;
  const int64_t x = row_offset(c.x_rows, row), dy = row_offset(c.dy_rows, row);
  Row<X, DY> result{reinterpret_cast<const X*>(element(c.x_type, c.x, x + start)),
                    reinterpret_cast<const DY*>(element(c.dy_type, c.dy, dy + start)),
                    c.dx ? static_cast<X*>(c.dx) + row * c.cols + start : nullptr, saved_mean<A>(c, row),
                    static_cast<const A*>(c.rstd)[row],
                    c.dh ? static_cast<const X*>(c.dh) + row_offset(c.dh_rows, row) + start : nullptr};
  result.next_x = row_offset(c.x_rows, next) - x;
  result.next_dy = row_offset(c.dy_rows, next) - dy;
  return result;
}

// As many rows as `add_columns` has registers for, and whether it has more for the addresses of what it fetches and keeps: two rows
// of fp16 with AVX2 lose a tenth by that in the L1 cache (Xeon).
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRowsAtOnce = 4;
constexpr bool kHasRoom = true;
#else
constexpr int kRowsAtOnce = 2;
constexpr bool kHasRoom = false;
#endif

// Whether rows go one by one: those that come from afar. Processors see ahead best in two streams of addresses without a gap, and
// the reads of a row overlap with the stores of the one before: of fp32 21845 x 384 takes 0.22 ns per element instead of 0.43, of
// 16 bits 8192 x 1024 0.17 instead of 0.22. Shorter rows share the joining of their sums instead, longer ones the loads of dweight
// and dbias, for which the L1 cache then has no room (EPYC with AVX-512, 1 thread).
template <class X> bool goes_alone(const Backward& c) {
  const int64_t bytes = c.cols * sizeof(X);
  return c.is_far && (sizeof(X) != 2 ? bytes >= 512 && bytes <= 8192 : kHasRoom && bytes >= 768 && bytes <= 2048);
}

// Whether then x of the next row is fetched by the first pass, and its dy by the second: from 3 KB on, since processors stop to see
// ahead at the end of a page. 1365 x 1536 fp32 takes 0.28 ns per element instead of 0.44, 8192 x 1024 0.23 instead of 0.31, 8738 x 960
// 0.26 instead of 0.34, 10922 x 768 as long; shorter rows lose by it (EPYC with AVX-512, 1 thread).
template <class X> bool fetches_next(const Backward& c) { return goes_alone<X>(c) && c.cols * sizeof(X) >= 3072; }

// Columns of a row that are fetched together.
template <class A> constexpr int64_t kFetched = 8 * Pair<A>::kStep;

// Whether of several rows both passes fetch what they read next, block by block: processors hardly see ahead in so many streams of
// addresses. Of 16 bits 1000 x 1024 takes 0.30 ns per element instead of 0.38, 4096 x 4096 0.54 instead of 0.64, 10000 x 10000 0.58
// instead of 0.77 (Xeon, 1 thread).
template <class X> bool fetches_blocks(const Backward& c) { return kHasRoom && !goes_alone<X>(c) && (sizeof(X) == 2 || c.streams); }

// Whether of these the first pass fetches two blocks ahead, and the second what comes after these rows, to the L2 cache: where rows are
// in memory a block does not last as long as one is waited for. Of 16 bits 4096 x 4096 takes 3.3 ms instead of 3.6, 8192 x 2048 3.3
// instead of 3.5, and of two threads 1.8 instead of 1.9 and 1.7 instead of 1.9 (EPYC with AVX-512).
template <class X> bool fetches_far(const Backward& c) { return fetches_blocks<X>(c) && sizeof(X) == 2 && c.is_far; }

// Fetches what will be read soon.
KF_INLINE void fetch(const void* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(p) + line);
}

// Adds to the sums of some rows, and to dweight and dbias, what the columns [start, stop) have, at most kStretch; where the rows
// are the `first`, dweight and dbias begin with them. The rows share the loads of weight and of dweight and dbias, to which they are
// added one by one. xhat is rounded for itself: elements that are alike are so with all digits, and cancel in dweight with them.
template <bool keeps, class X, class DY, size_t... r>
void add_columns(const Backward& c, Row<X, DY>* rows, bool first, int64_t start, int64_t stop, std::index_sequence<r...>) {
  using A = AccOf<X>;
  using P = Pair<A>;
  using V = Vectorized<A>;
  constexpr size_t kRows = sizeof...(r);
  constexpr int64_t kBlock = kFetched<A>;
  const bool fetches = fetches_blocks<X>(c), fetches_rows = fetches_next<X>(c);
  const int64_t ahead = fetches_far<X>(c) && c.cols > 2 * kBlock ? 2 * kBlock : kBlock;
  const auto* weight = static_cast<const A*>(c.weight);
  auto* dweight = static_cast<A*>(c.dweight);
  auto* dbias = static_cast<A*>(c.dbias);
  const A *old_dweight = first ? nullptr : dweight, *old_dbias = first ? nullptr : dbias;
  const std::array<const X*, kRows> x{rows[r].x...};
  const std::array<const DY*, kRows> dy{rows[r].dy...};
  const std::array<A*, kRows> kept{rows[r].kept...};
  const A* bias = rows[0].bias;
  const std::array<V, kRows> mean{V(rows[r].mean)...}, rstd{V(rows[r].rstd)...};
  // One vector for both halves of a pair, one after the other: there are not registers enough for more.
  Sums<A, kRows> gs{(static_cast<void>(r), V(0))...}, gxs = gs;
  int64_t i = start;
  while (i + P::kStep <= stop) {
    Sums<A, kRows> g_block{(static_cast<void>(r), V(0))...}, gx_block = g_block;  // two levels, as in lanes_over
    const bool is_last = i + ahead >= c.cols;  // what follows it is the first block of the next row
    const std::array<int64_t, kRows> next_x{(is_last ? rows[r].next_x - i : ahead)...};
    const std::array<int64_t, kRows> next_dy{(is_last ? rows[r].next_dy - i : ahead)...};
    const int64_t end = std::min(stop, i + kBlock);
    // Read by the second pass, and fetched while the first waits for memory: with a residual, 4096 x 768 fp32 takes 2.1 ms instead of
    // 2.3, 2048 x 2048 bf16 1.6 instead of 1.85 (EPYC with AVX-512, 1 thread).
    if (rows[0].dh) (fetch(rows[r].dh + i, (end - i) * sizeof(X)), ...);
    for (; i + P::kStep <= end; i += P::kStep) {
      if (fetches) {
        (__builtin_prefetch(x[r] + i + next_x[r]), ...);
        (__builtin_prefetch(dy[r] + i + next_dy[r]), ...);
      }
      if (kRows == 1 && fetches_rows) fetch(x[0] + i + rows[0].next_x, P::kStep * sizeof(X));
      const P w = weight ? load_pair(weight + i) : both<A>(1);
      const P b = kBehind<DY> && bias ? load_pair(bias + i) : both<A>(0);
      P dw = old_dweight ? load_pair(dweight + i) : both<A>(0), db = old_dbias ? load_pair(dbias + i) : both<A>(0);
      const auto add = [&]<size_t kRow, V P::*kHalf>() {
        const V xhat = (load_pair(x[kRow] + i).*kHalf - mean[kRow]) * rstd[kRow];
        const V d = dz_of<DY>(load_pair(dy[kRow] + i).*kHalf, xhat, w.*kHalf, b.*kHalf), g = d * w.*kHalf;
        if constexpr (keeps) {
          A* const p = kept[kRow] + 2 * i + (kHalf == &P::a ? 0 : V::size());
          xhat.store(p);
          g.store(p + P::kStep);
        }
        dw.*kHalf = at::vec::fmadd(d, xhat, dw.*kHalf);
        db.*kHalf = db.*kHalf + d;
        g_block[kRow] = g_block[kRow] + g;
        gx_block[kRow] = at::vec::fmadd(g, xhat, gx_block[kRow]);
      };
      ((add.template operator()<r, &P::a>(), add.template operator()<r, &P::b>()), ...);
      if (dweight) store_pair(dweight + i, dw);
      if (dbias) store_pair(dbias + i, db);
    }
    ((gs[r] = gs[r] + g_block[r], gxs[r] = gxs[r] + gx_block[r]), ...);
  }
  if (i < stop) {
    const Part part{stop - i};
    const P w = weight ? load_pair(weight + i, part) : both<A>(1), b = kBehind<DY> && bias ? load_pair(bias + i, part) : both<A>(0);
    P dw = old_dweight ? load_pair(dweight + i, part) : both<A>(0), db = old_dbias ? load_pair(dbias + i, part) : both<A>(0);
    const auto add = [&](size_t row) {
      const P xhat = first_of(load_pair(x[row] + i, part) - P{mean[row], mean[row]}, part) * P{rstd[row], rstd[row]};
      const P d = dz_of<DY>(load_pair(dy[row] + i, part), xhat, w, b), g = d * w, gx = g * xhat;
      if constexpr (keeps) {
        store_pair(kept[row] + 2 * i, xhat);
        store_pair(kept[row] + 2 * i + P::kStep, g);
      }
      dw = fma(d, xhat, dw);
      db = db + d;
      gs[row] = gs[row] + (g.a + g.b);
      gxs[row] = gxs[row] + (gx.a + gx.b);
    };
    (add(r), ...);
    if (dweight) store_pair(dweight + i, dw, part);
    if (dbias) store_pair(dbias + i, db, part);
  }
  const auto g = joined<A>(gs), gx = joined<A>(gxs);
  ((rows[r].sum_g += g[r], rows[r].sum_gx += gx[r]), ...);
}

// dx of the columns [start, stop), once the sums are those of the whole row, to all `results`, which begin at `start`. These are
// given by value, so that no store can be taken for a change of them.
template <class X, class DY, class... R>
KF_INLINE void write_dx(const Backward& c, const Row<X, DY>& row, int64_t start, int64_t stop, R... results) {
  using A = AccOf<X>;
  using P = Pair<A>;
  const X* x = row.x + start;
  const DY* dy = row.dy + start;
  const X* dh = from(row.dh, start);
  const A* weight = from(static_cast<const A*>(c.weight), start);
  const A mean = row.mean, rstd = row.rstd, slope = static_cast<A>(-row.sum_gx / c.cols) * rstd;
  const double mean_g = c.rms ? 0 : row.sum_g / c.cols;
  // x of 16 bits can hardly be more than some thousand times as large as it varies: what rounding `shift` adds is small beside
  // rounding dx.
  constexpr bool kFolds = sizeof(X) == 2;
  const A shift = static_cast<A>(kFolds ? -mean_g - static_cast<double>(mean) * slope : -mean_g);
  // Without room for blocks, short rows that follow are fetched here: of 16 bits 5461 x 1536 takes 0.18 ns per element instead of
  // 0.34 (EPYC, AVX2, 1 thread).
  const bool fetches_both = !kHasRoom && !goes_alone<X>(c) && c.streams && c.cols * sizeof(X) <= 8192;
  const bool fetches = fetches_blocks<X>(c), fetches_rows = fetches_far<X>(c), fetches_dy = fetches_both || fetches_next<X>(c);
  const P means = both(mean), rstds = both(rstd), slopes = both(slope), shifts = both(shift);
  const auto gradient = [&](const P& g_shifted, const P& v) { return fma(kFolds ? v : v - means, slopes, g_shifted) * rstds; };
  const A* bias = from(row.bias, start);
  sweep<A>(stop - start, [&](int64_t i, auto part) {
    if (fetches) {
      __builtin_prefetch(x + i + kFetched<A>);
      __builtin_prefetch(dy + i + kFetched<A>);
    }
    if (fetches_rows) {
      __builtin_prefetch(x + i + row.next_x, 0, 2);
      __builtin_prefetch(dy + i + row.next_dy, 0, 2);
    }
    if (fetches_dy) fetch(dy + i + row.next_dy, P::kStep * sizeof(DY));
    if (fetches_both) fetch(x + i + row.next_x, P::kStep * sizeof(X));
    const P w = weight ? load_pair(weight + i, part) : both<A>(1);
    const P v = load_pair(x + i, part), b = kBehind<DY> && bias ? load_pair(bias + i, part) : both<A>(0);
    const P d = dz_of<DY>(load_pair(dy + i, part), (v - means) * rstds, w, b);
    // In rows of one element dx is exactly 0: of a part, g is rounded as it was for its sum.
    const P shifted = std::is_same_v<decltype(part), Whole> ? fma(d, w, shifts) : d * w + shifts;
    const P g = gradient(shifted, v);
    (results.put(i, dh ? g + load_pair(dh + i, part) : g, part), ...);
  });
}

// dx of a whole row, from what was kept of it.
template <class X, class DY> KF_INLINE void write_kept_dx(const Backward& c, const Row<X, DY>& row, Results<X> results) {
  using A = AccOf<X>;
  using P = Pair<A>;
  const P rstds = both(row.rstd), slopes = both(static_cast<A>(-row.sum_gx / c.cols));
  const P shifts = both(c.rms ? A(0) : static_cast<A>(-row.sum_g / c.cols));
  sweep<A>(c.cols, [&](int64_t i, auto part) {
    const A* p = row.kept + 2 * i;
    const P g = fma(load_pair(p), slopes, load_pair(p + P::kStep) + shifts) * rstds;
    results.put(i, row.dh ? g + load_pair(row.dh + i, part) : g, part);
  });
}

// dweight and dbias: with room for totals the error of a sum grows no faster with the rows than that of PyTorch's sums, which are
// cascades.
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
      for (int64_t i = 0; i < c.cols; ++i) sum[i] = static_cast<A>(total[i] + sum[i]);
    });
  }

 private:
  // Out of line: inlined, it takes registers from the loops beside it.
  [[gnu::noinline]] void add_to_totals() {
    each([&](A* sum, double* total) {
      if (empty) std::copy_n(sum, c.cols, total);
      else for (int64_t i = 0; i < c.cols; ++i) total[i] += sum[i];
    });
    empty = false;
  }

  template <class F> KF_INLINE void each(F&& f) {
    if (c.dweight) f(static_cast<A*>(c.dweight), c.totals);
    if (c.dbias) f(static_cast<A*>(c.dbias), c.totals + c.cols);
  }

  const Backward& c;
  bool empty = true;  // the totals
};

// What `add_columns` adds, of any number of rows.
template <bool keeps, class X, class DY>
void add_stretch(const Backward& c, Row<X, DY>* rows, int64_t count, bool first, int64_t start, int64_t stop) {
  int64_t r = 0;
  const auto add = [&]<size_t kRows>(std::index_sequence<kRows>) {
    for (; r + static_cast<int64_t>(kRows) <= count; r += kRows)
      add_columns<keeps>(c, rows + r, first && r == 0, start, stop, std::make_index_sequence<kRows>());
  };
  add(std::index_sequence<kRowsAtOnce>());
  if constexpr (kRowsAtOnce > 2) add(std::index_sequence<2>());
  add(std::index_sequence<1>());
}

// Elements of rows taken together of which the second pass gets xhat and g from the first: so many that these, x, dy, dx and what
// belongs to the columns have room in the L1 cache. Of 16 bits that spares converting them again, for which fp16 takes four
// instructions of eight: 100 x 512 0.23 ns per element instead of 0.26, 5000 x 256 0.33 instead of 0.36. Of 768 or 1024 columns two
// rows gain a tenth, but four would take 0.58 instead of 0.42 (Xeon, 1 thread).
constexpr int64_t kKept = 2048;

constexpr int64_t kLongRow = 32768;

// Of short rows so few that they are still in the cache for the second pass. Long ones never are: there it is dweight and dbias
// that ought to stay; beyond 2048 columns of fp32 too: 699 x 3000 takes 0.31 ns per element with four rows, 0.46 with two (EPYC
// with AVX-512, 1 thread). Very short rows of fp32, for which loading these takes longest, while they are in the cache: 10000 x 64
// takes 0.215 ms with four, 0.235 with two, but of memory 83886 x 100 5.4 instead of 4.0 (there too). Two of 16 bits where these can
// be kept (see kKept), but more cannot.
template <class X> int rows_together(const Backward& c) {
  if (c.cols > kLongRow) return 8;
  if (goes_alone<X>(c)) return 1;
  if (sizeof(X) != 2) return c.cols > 2048 || (c.cols < 128 && !c.is_far) ? kRowsAtOnce : 2;
  return kRowsAtOnce * c.cols > kKept && 2 * c.cols <= kKept ? 2 : kRowsAtOnce;
}

// The sums of a few rows, from one strip of columns to the next: while the rows pass by, what is added up stays in the cache.
// `first`: as in add_columns.
template <class X, class DY> void add_together(const Backward& c, Row<X, DY>* rows, int count, bool first) {
  const int64_t width = strip_width(c.cols);
  for (int64_t start = 0; start < c.cols; start += width)
    add_stretch<false>(c, rows, count, first, start, std::min(start + width, c.cols));
}

// These and dx of a few rows, likewise.
template <class X, class DY>
KF_INLINE void backward_together(const Backward& c, Row<X, DY>* rows, int count, bool first, RowResults<X>& results) {
  if constexpr (sizeof(X) == 2 && kHasRoom)
    if (rows[0].dx && rows_together<X>(c) * c.cols <= kKept) {  // also of the last rows, fewer: dx depends on its row alone
      using A = AccOf<X>;
      alignas(64) A room[2 * (kKept + kRowsAtOnce * Pair<A>::kStep)];
      for (int r = 0; r < count; ++r) rows[r].kept = room + 2 * r * whole_pairs<A>(c.cols);
      add_stretch<true>(c, rows, count, first, 0, c.cols);
      for (int r = 0; r < count; ++r) {
        write_kept_dx(c, rows[r], results.open(rows[r].dx));
        results.close(c.cols);
      }
      return;
    }
  add_together(c, rows, count, first);
  if (!rows[0].dx) return;
  for (int64_t start = 0; start < c.cols; start += kStretch)
    for (int r = 0; r < count; ++r) {
      const int64_t stop = std::min(start + kStretch, c.cols);
      write_dx(c, rows[r], start, stop, results.open(rows[r].dx + start));
      results.close(stop - start);
    }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
