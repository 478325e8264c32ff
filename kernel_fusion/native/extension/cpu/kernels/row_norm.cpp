// CPU row norm, forward and backward, on at::vec. Compiled once per instruction set (-DCPU_CAPABILITY=...).
//
// Forward: one pass over a row for the statistics (cpu/moments.h), one for the result. Backward: one pass for the two sums and the
// weight gradients, one for dx.
// The order of every sum depends on the row length alone. With stages (cpu/chains.h) a row is first brought, chunk by chunk, to the
// accumulator type in a buffer, unless it lies in memory like that, and the same code finds it there.
#include "cpu/chains.h"
#include "cpu/chunk.h"
#include "cpu/kernels.h"
#include "cpu/moments.h"
#include "cpu/pairs.h"

#include <algorithm>
#include <limits>
#include <memory>

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kLongRow = 32768;

// Two vectors of elements that lie side by side, in the order of `Interleaved`.
inline Pair<float> interleaved(const Pair<float>& v) {
  const auto [even, odd] = at::vec::deinterleave2(v.a, v.b);
  return {even, odd};
}

// A sum of gradients back from the order of `Interleaved`.
inline void restore(float* sum, int64_t cols) {
  constexpr int64_t kStep = Pair<float>::kStep;
  for (int64_t i = 0; i + kStep <= cols; i += kStep) {
    const auto v = load_pair(sum + i);
    const auto [first, second] = at::vec::interleave2(v.a, v.b);
    store_pair(sum + i, {first, second});
  }
}

// A NaN as arithmetic makes them, for `interleaved_bits`.
template <class A> inline Vectorized<A> plain_nan(const Vectorized<A>& v) {
  return Vectorized<A>::blendv(v, Vectorized<A>(std::numeric_limits<A>::quiet_NaN()), v != v);
}
template <class A> inline A plain_nan(A v) { return v == v ? v : std::numeric_limits<A>::quiet_NaN(); }

template <class T> void prepare_as(const Parameter& p, int64_t begin, int64_t end) {
  using A = AccOf<T>;
  const T* in = static_cast<const T*>(p.data) + begin;
  A* out = static_cast<A*>(p.out) + begin;
  const A offset = p.offset == 0 ? A(-0.0) : static_cast<A>(p.offset);  // -0.0 changes nothing, not even the sign of a zero
  const auto offsets = both(offset);
  sweep<A>(
      end - begin,
      [&](int64_t i) {
        auto v = load_pair(in + i) + offsets;
        v = {plain_nan(v.a), plain_nan(v.b)};
        if constexpr (std::is_same_v<A, float>)
          if (p.interleaved) v = interleaved(v);
        store_pair(out + i, v);
      },
      [&](int64_t i) { out[i] = plain_nan(load_one(in + i) + offset); });
}

// What begins `start` elements later; of what is absent, nothing.
template <class A> const A* from(const A* p, int64_t start) { return p ? p + start : nullptr; }

// As many rows as are normalised together, at most.
constexpr int64_t kMostRows = 16;

// mean (0 for RMSNorm) and rstd of the rows x[0 ... count), which are those from `first` on, stored where they are wanted. What takes
// long and would be waited for, root and division, is done of all together.
template <class T>
void statistics(const Forward& c, const T* const* x, int64_t first, int64_t count, AccOf<T>* mean, AccOf<T>* rstd) {
  using A = AccOf<T>;
  double variance[kMostRows];
  for (int64_t r = 0; r < count; ++r) {
    const Moments m = moments(x[r], c.cols, c.rms);
    mean[r] = static_cast<A>(m.mean);
    variance[r] = m.variance;
  }
  const double eps = c.eps;
  for (int64_t r = 0; r < count; ++r) rstd[r] = static_cast<A>(1 / std::sqrt(variance[r] + eps));
  if (c.mean) std::copy_n(mean, count, static_cast<A*>(c.mean) + first);
  if (c.rstd) std::copy_n(rstd, count, static_cast<A*>(c.rstd) + first);
}

// y = (x - mean) * rstd * weight + bias over [0, n); y may be x.
template <class X, class Y>
inline void normalize(const X* x, AccOf<X> mean, AccOf<X> rstd, const AccOf<X>* weight, const AccOf<X>* bias, int64_t n, Y* y,
                      bool streams = false) {
  using A = AccOf<X>;
  const auto target = Target<A>::streamed(kDtypeOf<Y>, y, streams);
  const auto means = both(mean), rstds = both(rstd);
  const auto write = [&](auto&& scale_shift) {
    sweep<A>(
        n, [&](int64_t i) { target.template store<Y>(i, scale_shift((load_pair(x + i) - means) * rstds, i)); },
        [&](int64_t i) { y[i] = static_cast<Y>(scale_shift((load_one(x + i) - mean) * rstd, i)); });
  };
  // Loads from an accumulator array, as a pair or as one element, like `like`.
  const auto at = [](const A* p, int64_t i, auto like) {
    if constexpr (std::is_same_v<decltype(like), A>) return p[i];
    else return load_pair(p + i);
  };
  if (weight && bias) write([&](auto v, int64_t i) { return fma(v, at(weight, i, v), at(bias, i, v)); });
  else if (weight) write([&](auto v, int64_t i) { return v * at(weight, i, v); });
  else if (bias) write([&](auto v, int64_t i) { return v + at(bias, i, v); });
  else write([](auto v, int64_t) { return v; });
}

// The statistics of several short rows, and then their results, which find the rows in the L1 cache.
template <class X, class Y> void forward_rows(const Forward& c, int64_t begin, int64_t end) {
  using A = AccOf<X>;
  constexpr int64_t kBytes = 16384;
  const auto *weight = static_cast<const A*>(c.weight), *bias = static_cast<const A*>(c.bias);
  const int64_t together = std::clamp<int64_t>(kBytes / (c.cols * sizeof(X)), 1, kMostRows);
  for (int64_t first = begin; first < end; first += together) {
    const int64_t count = std::min(together, end - first);
    const X* x[kMostRows];
    A mean[kMostRows], rstd[kMostRows];
    for (int64_t r = 0; r < count; ++r) x[r] = static_cast<const X*>(c.x) + row_offset(c.x_rows, first + r);
    statistics(c, x, first, count, mean, rstd);
    Y* y = static_cast<Y*>(c.y) + first * c.cols;
    for (int64_t r = 0; r < count; ++r, y += c.cols) normalize(x[r], mean[r], rstd[r], weight, bias, c.cols, y, c.streams);
  }
  if (c.streams) finish_streams();
}

template <class A> A saved_mean(const Backward& c, int64_t row) { return c.rms ? A(0) : static_cast<const A*>(c.mean)[row]; }

// What backward reads and writes of one row. dx, null where it is not wanted, may be dy.
template <class X, class DY> struct Row {
  const X* x;
  const DY* dy;
  X* dx;
  AccOf<X> mean, rstd;
  int64_t next_x = 0, next_dy = 0;  // how far ahead of x and dy lies what will be read in their place
  double sum_g = 0, sum_gx = 0;
};

// Adds to the sums of kRows rows, and to dweight and dbias, what the columns [start, stop) have, at most kStretch. The rows
// share the loads of weight and of dweight and dbias, to which they are added one by one.
template <size_t kRows, class X, class DY>
void add_columns(const Backward& c, Row<X, DY>* rows, int64_t start, int64_t stop) {
  using A = AccOf<X>;
  using P = Pair<A>;
  using V = Vectorized<A>;
  const auto* weight = static_cast<const A*>(c.weight);
  auto* dweight = static_cast<A*>(c.dweight);
  auto* dbias = static_cast<A*>(c.dbias);
  const X* x[kRows];
  const DY* dy[kRows];
  A mean[kRows], rstd[kRows], g_rest[kRows] = {}, gx_rest[kRows] = {};
  V gs[kRows], gxs[kRows];  // one vector for both halves of a pair, one after the other: there are not registers enough for more
  for (size_t r = 0; r < kRows; ++r) {
    x[r] = rows[r].x;
    dy[r] = rows[r].dy;
    mean[r] = rows[r].mean;
    rstd[r] = rows[r].rstd;
    gs[r] = gxs[r] = V(0);
  }
  int64_t i = start;
  while (i + P::kStep <= stop) {
    V g_block[kRows], gx_block[kRows];  // two levels, as in sums_over
    std::fill_n(g_block, kRows, V(0));
    std::fill_n(gx_block, kRows, V(0));
    for (const int64_t end = std::min(stop, i + 8 * P::kStep); i + P::kStep <= end; i += P::kStep) {
      const P w = weight ? load_pair(weight + i) : both<A>(1);
      P dw = dweight ? load_pair(dweight + i) : both<A>(0), db = dbias ? load_pair(dbias + i) : both<A>(0);
      for (size_t r = 0; r < kRows; ++r) {
        const auto add = [&]<V P::*kHalf>() {
          const V d = load_pair(dy[r] + i).*kHalf, xhat = (load_pair(x[r] + i).*kHalf - V(mean[r])) * V(rstd[r]), g = d * w.*kHalf;
          dw.*kHalf = at::vec::fmadd(d, xhat, dw.*kHalf);
          db.*kHalf = db.*kHalf + d;
          g_block[r] = g_block[r] + g;
          gx_block[r] = at::vec::fmadd(g, xhat, gx_block[r]);
        };
        add.template operator()<&P::a>();
        add.template operator()<&P::b>();
      }
      if (dweight) store_pair(dweight + i, dw);
      if (dbias) store_pair(dbias + i, db);
    }
    for (size_t r = 0; r < kRows; ++r) {
      gs[r] = gs[r] + g_block[r];
      gxs[r] = gxs[r] + gx_block[r];
    }
  }
  for (; i < stop; ++i) {
    A dw = dweight ? dweight[i] : A(0), db = dbias ? dbias[i] : A(0);
    for (size_t r = 0; r < kRows; ++r) {
      const A d = load_one(dy[r] + i), xhat = (load_one(x[r] + i) - mean[r]) * rstd[r], g = weight ? d * weight[i] : d;
      dw = fma(d, xhat, dw);
      db += d;
      g_rest[r] += g;
      gx_rest[r] += g * xhat;
    }
    if (dweight) dweight[i] = dw;
    if (dbias) dbias[i] = db;
  }
  for (size_t r = 0; r < kRows; ++r) {
    rows[r].sum_g += total<A>({gs[r], V(0)}) + g_rest[r];
    rows[r].sum_gx += total<A>({gxs[r], V(0)}) + gx_rest[r];
  }
}

// dx of the columns [start, stop), once the sums are those of the whole row.
template <class X, class DY> void write_dx(const Backward& c, const Row<X, DY>& row, int64_t start, int64_t stop) {
  using A = AccOf<X>;
  using P = Pair<A>;
  const X* x = row.x + start;
  const DY* dy = row.dy + start;
  X* dx = row.dx + start;
  const A* weight = from(static_cast<const A*>(c.weight), start);
  const A mean = row.mean, rstd = row.rstd;
  const A mean_g = c.rms ? A(0) : static_cast<A>(row.sum_g / c.cols), minus_mean_gx = static_cast<A>(-row.sum_gx / c.cols);
  const int64_t next_x = row.next_x, next_dy = row.next_dy;
  const auto gradient = [](auto g, auto xhat, auto mean_g, auto minus_mean_gx, auto rstd) {
    return fma(xhat, minus_mean_gx, g - mean_g) * rstd;
  };
  const auto target = Target<A>::streamed(kDtypeOf<X>, dx, c.streams);
  const P means = both(mean), rstds = both(rstd), mean_gs = both(mean_g), minus_mean_gxs = both(minus_mean_gx);
  sweep<A>(
      stop - start,
      [&](int64_t i) {
        __builtin_prefetch(x + i + next_x);
        __builtin_prefetch(dy + i + next_dy);
        const P xhat = (load_pair(x + i) - means) * rstds;
        const P g = weight ? load_pair(dy + i) * load_pair(weight + i) : load_pair(dy + i);
        target.template store<X>(i, gradient(g, xhat, mean_gs, minus_mean_gxs, rstds));
      },
      [&](int64_t i) {
        const A g = weight ? load_one(dy + i) * weight[i] : load_one(dy + i);
        dx[i] = static_cast<X>(gradient(g, (load_one(x + i) - mean) * rstd, mean_g, minus_mean_gx, rstd));
      });
}

// What `add_columns` adds, of any number of rows.
template <class X, class DY> void add_stretch(const Backward& c, Row<X, DY>* rows, int64_t count, int64_t start, int64_t stop) {
  int64_t r = 0;
  for (; r + 2 <= count; r += 2) add_columns<2>(c, rows + r, start, stop);
  if (r < count) add_columns<1>(c, rows + r, start, stop);
}

// Rows two at a time, from one stretch of columns to the next: while the rows pass by, what is added up stays in the cache.
template <class X, class DY> void backward_together(const Backward& c, Row<X, DY>* rows, int count) {
  for (int64_t start = 0; start < c.cols; start += kStretch) add_stretch(c, rows, count, start, std::min(start + kStretch, c.cols));
  for (int r = 0; r < count; ++r)
    if (rows[r].dx) write_dx(c, rows[r], 0, c.cols);
}

// Of short rows so few that they are still in the cache for the second pass. Long ones never are: there it is dweight and dbias
// that ought to stay.
inline int rows_together(int64_t cols) { return cols <= kLongRow ? 2 : 8; }

// Rows up to this size are fetched while others are finished: processors see ahead in one stream of addresses, but not where the
// next of several short ones begins.
constexpr size_t kAheadBytes = 8192;

template <class X, class DY> Row<X, DY> row_of(const Backward& c, int64_t row) {
  return {static_cast<const X*>(c.x) + row_offset(c.x_rows, row), static_cast<const DY*>(c.dy) + row_offset(c.dy_rows, row),
          c.dx ? static_cast<X*>(c.dx) + row * c.cols : nullptr, saved_mean<AccOf<X>>(c, row),
          static_cast<const AccOf<X>*>(c.rstd)[row]};
}

// What was added up of the columns [start, stop), from the order of `Interleaved`.
template <class X> void restore_sums(const Backward& c, int64_t start, int64_t stop) {
  if constexpr (std::is_same_v<X, Interleaved>)
    for (void* sum : {c.dweight, c.dbias})
      if (sum) restore(static_cast<float*>(sum) + start, stop - start);
}

template <class X, class DY> void backward_rows(const Backward& c, int64_t begin, int64_t end) {
  const int together = rows_together(c.cols);
  const bool looks_ahead = c.cols * sizeof(X) <= kAheadBytes;
  Row<X, DY> rows[8];
  for (int64_t first = begin; first < end; first += together) {
    const int count = static_cast<int>(std::min<int64_t>(together, end - first));
    for (int r = 0; r < count; ++r) {
      const int64_t row = first + r, next = row + together;
      rows[r] = row_of<X, DY>(c, row);
      if (!looks_ahead || next >= end) continue;
      rows[r].next_x = row_offset(c.x_rows, next) - row_offset(c.x_rows, row);
      rows[r].next_dy = row_offset(c.dy_rows, next) - row_offset(c.dy_rows, row);
    }
    backward_together(c, rows, count);
  }
  restore_sums<X>(c, 0, c.cols);
  if (c.streams) finish_streams();
}

template <class X, class DY> void sums_of_stretches(const Backward& c, int64_t count, int64_t begin, int64_t end, RowSums* sums) {
  using A = AccOf<X>;
  for (int64_t stretch = begin; stretch < end; ++stretch) {
    const int64_t start = stretch * kStretch, stop = std::min(start + kStretch, c.cols);
    for (void* sum : {c.dweight, c.dbias})
      if (sum) std::fill(static_cast<A*>(sum) + start, static_cast<A*>(sum) + stop, A(0));
    Row<X, DY> rows[kFewRows];
    for (int64_t r = 0; r < count; ++r) rows[r] = row_of<X, DY>(c, r);
    add_stretch(c, rows, count, start, stop);
    restore_sums<X>(c, start, stop);
    for (int64_t r = 0; r < count; ++r) sums[stretch * count + r] = {rows[r].sum_g, rows[r].sum_gx};
  }
}

template <class X, class DY> void dx_of_stretches(const Backward& c, int64_t count, int64_t begin, int64_t end, const RowSums* sums) {
  for (int64_t r = 0; r < count; ++r) {
    auto row = row_of<X, DY>(c, r);
    row.sum_g = sums[r].g;
    row.sum_gx = sums[r].gx;
    write_dx(c, row, begin * kStretch, std::min(end * kStretch, c.cols));
  }
  if (c.streams) finish_streams();
}

// ---- With stages -----------------------------------------------------------------------------------------------------------

// `with_type` for the types that go with accumulators A.
template <class A, class F> void with_acc(Dtype dtype, F&& f) {
  with_type(dtype, [&](auto* type) {
    if constexpr (std::is_same_v<AccOf<std::remove_pointer_t<decltype(type)>>, A>) f(type);
  });
}

template <class A, class F> void each_chunk(int64_t cols, F&& f) {
  for (int64_t start = 0; start < cols; start += kChunk<A>) f(start, std::min(kChunk<A>, cols - start));
}

// The address of an element.
inline const char* element(Dtype dtype, const void* tensor, int64_t index) {
  return static_cast<const char*>(tensor) + index * size_of(dtype);
}
inline char* element(Dtype dtype, void* tensor, int64_t index) { return static_cast<char*>(tensor) + index * size_of(dtype); }

// What begins `start` elements later; of what is absent, nothing.
template <class A> Source<A> from(Source<A> x, int64_t start) {
  if (x.data) x.data = element(x.type, x.data, start);
  return x;
}
template <class A> Target<A> from(Target<A> x, int64_t start) {
  if (x.data) x.data = element(x.type, x.data, start);
  return x;
}

// A strided row of any dtype from `start` on; of A = double, doubles alone.
template <class A> Source<A> row_at(Dtype type, const void* tensor, const RowLayout& rows, int64_t row, int64_t start) {
  return {type, element(type, tensor, row_offset(rows, row) + start)};
}

// Dropout of elements that begin at `position`, with the scale of those that are kept.
template <class A> void drop(const Stages& s, int64_t position, int64_t n, ChainLoop<A>& loop, MaskOf<A>* kept) {
  if (!s.threshold) return;
  draw_kept<A>(static_cast<uint64_t>(position), s.seed, s.threshold, n, kept);
  loop.kept.data = kept;
  loop.scale = static_cast<A>(s.threshold < 65536 ? 65536.0 / (65536 - s.threshold) : 0.0);
}

// out = dropout(pre_activation(x)) + addend of a chunk.
template <class A>
void before_norm(const Stages& s, int64_t position, int64_t n, const Source<A>& x, const Source<A>& addend, const Target<A>& out) {
  ChainLoop<A> loop;
  Chunk<MaskOf<A>> kept;
  loop.activation = s.pre_activation;
  loop.a = x;
  loop.addend = addend;
  loop.first = out;
  drop(s, position, n, loop, kept);
  run_values(loop, n);
}

// out = x, in another type.
template <class A> void convert(const Source<A>& x, const Target<A>& out, int64_t n) {
  ChainLoop<A> loop;
  loop.a = x;
  loop.first = out;
  run_values(loop, n);
}

// What is normalised, a row of it: h = residual + u, rounded to the residual's dtype and stored there, or u where there is no
// residual. Where it lies already, or in `room`.
template <class A> Source<A> make_h(const Forward& c, const ForwardStages& s, int64_t row, A* room) {
  const auto x = row_at<A>(c.x_type, c.x, c.x_rows, row, 0);
  if (!s.residual && !s.pre_activation && !s.threshold) return x;
  const int64_t first = row * c.cols;
  const Target<A> h = s.residual ? Target<A>{s.residual_type, element(s.residual_type, s.h, first)} : Target<A>{kDtypeOf<A>, room};
  const Source<A> residual = s.residual ? row_at<A>(s.residual_type, s.residual, s.residual_rows, row, 0) : Source<A>{};
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    before_norm(s, first + start, n, from(x, start), from(residual, start), from(h, start));
  });
  return {h.type, h.data};
}

template <class A, class X>
void finish_row(const Forward& c, const ForwardStages& s, int64_t row, const X* h) {
  A mean, rstd;
  statistics(c, &h, row, 1, &mean, &rstd);
  const auto *weight = static_cast<const A*>(c.weight), *bias = static_cast<const A*>(c.bias);
  char* y = element(c.y_type, c.y, row * c.cols);
  if (!s.activation)
    return with_acc<A>(c.y_type, [&](auto* type) {
      normalize(h, mean, rstd, weight, bias, c.cols, reinterpret_cast<decltype(type)>(y), c.streams);
    });
  Chunk<A> z;
  ChainLoop<A> activate;
  activate.activation = s.activation;
  activate.a.data = z;
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    normalize(h + start, mean, rstd, from(weight, start), from(bias, start), n, z.values);
    activate.first = Target<A>::streamed(c.y_type, element(c.y_type, y, start), c.streams);
    run_values(activate, n);
  });
}

template <class A> void forward_staged_rows(const Forward& c, const ForwardStages& s, int64_t begin, int64_t end) {
  const std::unique_ptr<A[]> buffer(new A[c.cols]);
  for (int64_t row = begin; row < end; ++row) {
    const Source<A> h = make_h(c, s, row, buffer.get());
    with_acc<A>(h.type, [&](auto* type) {
      using X = std::remove_pointer_t<decltype(type)>;
      finish_row<A>(c, s, row, static_cast<const X*>(h.data));
    });
  }
  if (c.streams) finish_streams();
}

// What was normalised, a row of it, as accumulators: where it lies, or in `room`.
template <class A> const A* load_h(const Backward& c, const BackwardStages& s, int64_t row, A* room) {
  const bool changes = !s.has_residual && (s.pre_activation || s.threshold);
  const auto x = row_at<A>(c.x_type, c.x, c.x_rows, row, 0);
  if (!changes && c.x_type == kDtypeOf<A>) return static_cast<const A*>(x.data);
  if (!changes) convert(x, {kDtypeOf<A>, room}, c.cols);
  else
    each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
      before_norm<A>(s, row * c.cols + start, n, row_at<A>(c.x_type, c.x, c.x_rows, row, start), {}, {kDtypeOf<A>, room + start});
    });
  return room;
}

// dz, the gradient of a row before the activation, whose argument is computed again: where dy lies, or in `room`.
template <class A>
const A* load_dz(const Backward& c, const BackwardStages& s, int64_t row, const A* h, A mean, A rstd, A* room) {
  const auto dy = row_at<A>(c.dy_type, c.dy, c.dy_rows, row, 0);
  if (!s.activation && c.dy_type == kDtypeOf<A>) return static_cast<const A*>(dy.data);
  const auto *weight = static_cast<const A*>(c.weight), *bias = static_cast<const A*>(s.bias);
  if (!s.activation) convert(dy, {kDtypeOf<A>, room}, c.cols);
  else
    each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
      Chunk<A> z;
      normalize(h + start, mean, rstd, from(weight, start), from(bias, start), n, z.values);
      ChainLoop<A> loop;
      loop.activation = s.activation;
      loop.a.data = z;
      loop.dy = row_at<A>(c.dy_type, c.dy, c.dy_rows, row, start);
      loop.first.data = room + start;
      run_gradients(loop, n);
    });
  return room;
}

// From the norm's gradient `g` with respect to h: dh is added, dresidual stored; back through dropout and pre-activation, dx.
template <class A> void store_gradients(const Backward& c, const BackwardStages& s, int64_t row, A* g) {
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    const int64_t position = row * c.cols + start;
    const bool changes = s.pre_activation || s.threshold;
    const auto dx = c.dx ? element(s.dx_type, c.dx, position) : nullptr;
    // d = g + dh, for dresidual, and for dx or what follows.
    ChainLoop<A> sum;
    sum.a.data = g + start;
    if (s.dh) sum.addend = row_at<A>(c.x_type, s.dh, s.dh_rows, row, start);
    if (!dx) sum.first = {};
    else if (changes) sum.first.data = g + start;
    else sum.first = Target<A>::streamed(s.dx_type, dx, c.streams);
    if (s.dresidual) sum.second = Target<A>::streamed(c.x_type, element(c.x_type, s.dresidual, position), c.streams);
    if (!sum.first.data) std::swap(sum.first, sum.second);
    if (sum.addend.data || sum.second.data || !dx || !changes) run_values(sum, n);
    if (!dx || !changes) return;
    ChainLoop<A> back;
    Chunk<MaskOf<A>> kept;
    back.activation = s.pre_activation;
    back.dy.data = g + start;
    back.a = s.pre_activation ? row_at<A>(s.dx_type, s.x, s.x_rows, row, start) : back.dy;
    back.first = Target<A>::streamed(s.dx_type, dx, c.streams);
    drop(s, position, n, back, kept);
    run_gradients(back, n);
  });
}

template <class A> void backward_staged_rows(const Backward& c, const BackwardStages& s, int64_t begin, int64_t end) {
  const bool wants_g = c.dx || s.dresidual;
  Backward in_buffers = c;
  in_buffers.streams = false;
  const std::unique_ptr<A[]> buffer(new A[4 * c.cols]);
  for (int64_t first = begin; first < end; first += 2) {
    const int count = static_cast<int>(std::min<int64_t>(2, end - first));
    Row<A, A> rows[2];
    for (int r = 0; r < count; ++r) {
      A *first_room = buffer.get() + 2 * r * c.cols, *second_room = first_room + c.cols;
      const A mean = saved_mean<A>(c, first + r), rstd = static_cast<const A*>(c.rstd)[first + r];
      const A* h = load_h(c, s, first + r, first_room);
      rows[r] = {h, load_dz(c, s, first + r, h, mean, rstd, second_room), wants_g ? second_room : nullptr, mean, rstd};
    }
    backward_together(in_buffers, rows, count);
    for (int r = 0; wants_g && r < count; ++r) store_gradients(c, s, first + r, rows[r].dx);
  }
  if (c.streams) finish_streams();
}

// ---- The table -------------------------------------------------------------------------------------------------------------

// `with_type` for the pairs that occur: fp64 with itself, the others with each other; bf16 with itself is interleaved.
template <class F> void with_types(Dtype first, Dtype second, F&& f) {
  if (interleaves(first, second)) return f(static_cast<Interleaved*>(nullptr), static_cast<Interleaved*>(nullptr));
  with_type(first, [&](auto* a) {
    with_type(second, [&](auto* b) {
      using X = std::remove_pointer_t<decltype(a)>;
      using Y = std::remove_pointer_t<decltype(b)>;
      constexpr bool kAgree = std::is_same_v<X, double> == std::is_same_v<Y, double>;
      if constexpr (kAgree && !interleaves(kDtypeOf<X>, kDtypeOf<Y>)) f(a, b);
    });
  });
}

}  // namespace

void prepare(const Parameter& p, int64_t begin, int64_t end) {
  with_type(p.type, [&](auto* type) { prepare_as<std::remove_pointer_t<decltype(type)>>(p, begin, end); });
}

void forward(const Forward& c, int64_t begin, int64_t end) {
  with_types(c.x_type, c.y_type, [&](auto* x, auto* y) {
    forward_rows<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(y)>>(c, begin, end);
  });
}

void backward(const Backward& c, int64_t begin, int64_t end) {
  with_types(c.x_type, c.dy_type, [&](auto* x, auto* dy) {
    backward_rows<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(dy)>>(c, begin, end);
  });
}

void backward_sums(const Backward& c, int64_t rows, int64_t begin, int64_t end, RowSums* sums) {
  with_types(c.x_type, c.dy_type, [&](auto* x, auto* dy) {
    sums_of_stretches<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(dy)>>(c, rows, begin, end, sums);
  });
}

void backward_dx(const Backward& c, int64_t rows, int64_t begin, int64_t end, const RowSums* sums) {
  with_types(c.x_type, c.dy_type, [&](auto* x, auto* dy) {
    dx_of_stretches<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(dy)>>(c, rows, begin, end, sums);
  });
}

void forward_staged(const Forward& c, const ForwardStages& s, int64_t begin, int64_t end) {
  if (c.x_type == Dtype::kDouble) forward_staged_rows<double>(c, s, begin, end);
  else forward_staged_rows<float>(c, s, begin, end);
}

void backward_staged(const Backward& c, const BackwardStages& s, int64_t begin, int64_t end) {
  if (c.x_type == Dtype::kDouble) backward_staged_rows<double>(c, s, begin, end);
  else backward_staged_rows<float>(c, s, begin, end);
}

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
