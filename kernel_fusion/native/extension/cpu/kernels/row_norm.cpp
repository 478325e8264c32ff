// CPU row norm, forward and backward, on at::vec. Compiled once per instruction set (-DCPU_CAPABILITY=...).
//
// A row is read in chunks of kStatisticsChunk elements that stay in L1. Forward: one pass for the statistics (per chunk its mean
// and the squared deviations from it, joined over chunks in double by Chan's formula, so mean/std = 1e4 and long rows
// lose nothing), one pass for the result. Backward: one pass for the two sums and the weight gradients, one for dx.
// The order of every sum depends on the row length alone. With stages (cpu/chains.h) a row is first brought, chunk by chunk, to the
// accumulator type in a buffer, unless it lies in memory like that, and the same code finds it there.
#include "cpu/chains.h"
#include "cpu/chunk.h"
#include "cpu/kernels.h"
#include "cpu/pairs.h"

#include <algorithm>
#include <array>
#include <memory>

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kStatisticsChunk = 2048;

// Sum of f over [0, n). f takes a Pair or an element, loaded from x. Two chains hide the latency of the additions.
template <class T, class F> inline AccOf<T> sum_of(const T* x, int64_t n, F&& f) {
  using A = AccOf<T>;
  constexpr int64_t kStep = Pair<A>::kStep;
  Cascade<A> first, second;
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    first.next(i);
    second.next(i);
    first.block = f(load_pair(x + i), first.block);
    second.block = f(load_pair(x + i + kStep), second.block);
  }
  if (i + kStep <= n) {
    first.block = f(load_pair(x + i), first.block);
    i += kStep;
  }
  A rest = 0;
  for (; i < n; ++i) rest = f(load_one(x + i), rest);
  return total(first) + total(second) + rest;
}

// Sums of x - center and of its square over [0, n).
template <class T> inline std::pair<double, double> sums_around(const T* x, int64_t n, AccOf<T> center) {
  using A = AccOf<T>;
  const auto centers = both(center);
  Cascade<A> sums, squares;
  A sum = 0, square = 0;
  sweep<A>(
      n,
      [&](int64_t i) {
        const auto d = load_pair(x + i) - centers;
        sums.next(i);
        squares.next(i);
        sums.block = sums.block + d;
        squares.block = fma(d, d, squares.block);
      },
      [&](int64_t i) {
        const A d = load_one(x + i) - center;
        sum += d;
        square = fma(d, d, square);
      });
  return {total(sums) + sum, total(squares) + square};
}

struct Moments {
  double mean, variance;
};

template <class T> Moments moments(const T* x, int64_t n, bool rms) {
  using A = AccOf<T>;
  double base = 0, mean = 0, squares = 0;  // the mean counts from base, so that joining chunks rounds small numbers
  for (int64_t start = 0; start < n; start += kStatisticsChunk) {
    const int64_t count = std::min(kStatisticsChunk, n - start);
    if (rms) {
      squares += sum_of(x + start, count, [](auto v, auto acc) { return fma(v, v, acc); });
      continue;
    }
    const A center = sum_of(x + start, count, [](auto v, auto acc) { return acc + v; }) / static_cast<A>(count);
    // The rounded center leaves a small rest, which corrects both moments: without it mean / std = 1e4 loses digits.
    const auto [rest, deviations] = sums_around(x + start, count, center);
    if (start == 0) base = center;
    const double local = (center - base) + rest / static_cast<double>(count);
    // Chan: join (start elements, mean, squares) and (count elements, local, deviations).
    const double shift = local - mean, joined = static_cast<double>(start + count);
    mean += shift * static_cast<double>(count) / joined;
    squares += deviations - rest * rest / static_cast<double>(count) +
               shift * shift * static_cast<double>(start) * static_cast<double>(count) / joined;
  }
  return {base + mean, squares / static_cast<double>(n)};
}

// mean (0 for RMSNorm) and rstd of a row, stored where they are wanted.
template <class T> std::pair<AccOf<T>, AccOf<T>> statistics(const Forward& c, const T* x, int64_t row) {
  using A = AccOf<T>;
  const Moments m = moments(x, c.cols, c.rms);
  const A mean = static_cast<A>(m.mean), rstd = static_cast<A>(1 / std::sqrt(m.variance + c.eps));
  if (c.mean) static_cast<A*>(c.mean)[row] = mean;
  if (c.rstd) static_cast<A*>(c.rstd)[row] = rstd;
  return {mean, rstd};
}

// y = (x - mean) * rstd * weight + bias over [0, n); y may be x.
template <class X, class Y>
inline void normalize(const X* x, AccOf<X> mean, AccOf<X> rstd, const AccOf<X>* weight, const AccOf<X>* bias, int64_t n, Y* y) {
  using A = AccOf<X>;
  const auto means = both(mean), rstds = both(rstd);
  const auto write = [&](auto&& scale_shift) {
    sweep<A>(
        n, [&](int64_t i) { store_pair(y + i, scale_shift((load_pair(x + i) - means) * rstds, i)); },
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

template <class X, class Y> void forward_rows(const Forward& c, int64_t begin, int64_t end) {
  using A = AccOf<X>;
  for (int64_t row = begin; row < end; ++row) {
    const X* x = static_cast<const X*>(c.x) + row_offset(c.x_rows, row);
    const auto [mean, rstd] = statistics(c, x, row);
    normalize(x, mean, rstd, static_cast<const A*>(c.weight), static_cast<const A*>(c.bias), c.cols,
              static_cast<Y*>(c.y) + row * c.cols);
  }
}

template <class A> A saved_mean(const Backward& c, int64_t row) { return c.rms ? A(0) : static_cast<const A*>(c.mean)[row]; }

// What backward reads and writes of one row. dx, null where it is not wanted, may be dy.
template <class X, class DY> struct Row {
  const X* x;
  const DY* dy;
  X* dx;
  AccOf<X> mean, rstd;
};

// kRows rows together: they share the loads of weight and of dweight and dbias, to which they are added one by one.
template <class X, class DY, size_t kRows>
void backward_together(const Backward& c, const std::array<Row<X, DY>, kRows>& rows) {
  using A = AccOf<X>;
  using P = Pair<A>;
  const auto* weight = static_cast<const A*>(c.weight);
  auto* dweight = static_cast<A*>(c.dweight);
  auto* dbias = static_cast<A*>(c.dbias);
  const X* x[kRows];
  const DY* dy[kRows];
  A mean[kRows], rstd[kRows];
  double sum_g[kRows] = {}, sum_gx[kRows] = {};
  for (int r = 0; r < kRows; ++r) {
    x[r] = rows[r].x;
    dy[r] = rows[r].dy;
    mean[r] = rows[r].mean;
    rstd[r] = rows[r].rstd;
  }
  for (int64_t start = 0; start < c.cols; start += kStatisticsChunk) {
    const int64_t stop = std::min(start + kStatisticsChunk, c.cols);
    Cascade<A> gs[kRows], gxs[kRows];
    A g_rest[kRows] = {}, gx_rest[kRows] = {};
    int64_t i = start;
    for (; i + P::kStep <= stop; i += P::kStep) {
      const P w = weight ? load_pair(weight + i) : both<A>(1);
      P dw = dweight ? load_pair(dweight + i) : both<A>(0), db = dbias ? load_pair(dbias + i) : both<A>(0);
      for (int r = 0; r < kRows; ++r) {
        const P d = load_pair(dy[r] + i), xhat = (load_pair(x[r] + i) - both(mean[r])) * both(rstd[r]), g = d * w;
        dw = fma(d, xhat, dw);
        db = db + d;
        gs[r].next(i);
        gxs[r].next(i);
        gs[r].block = gs[r].block + g;
        gxs[r].block = fma(g, xhat, gxs[r].block);
      }
      if (dweight) store_pair(dweight + i, dw);
      if (dbias) store_pair(dbias + i, db);
    }
    for (; i < stop; ++i) {
      A dw = dweight ? dweight[i] : A(0), db = dbias ? dbias[i] : A(0);
      for (int r = 0; r < kRows; ++r) {
        const A d = load_one(dy[r] + i), xhat = (load_one(x[r] + i) - mean[r]) * rstd[r], g = weight ? d * weight[i] : d;
        dw = fma(d, xhat, dw);
        db += d;
        g_rest[r] += g;
        gx_rest[r] += g * xhat;
      }
      if (dweight) dweight[i] = dw;
      if (dbias) dbias[i] = db;
    }
    for (int r = 0; r < kRows; ++r) {
      sum_g[r] += total(gs[r]) + g_rest[r];
      sum_gx[r] += total(gxs[r]) + gx_rest[r];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    X* dx = rows[r].dx;
    if (!dx) continue;
    const A mean_g = c.rms ? A(0) : static_cast<A>(sum_g[r] / c.cols), mean_gx = static_cast<A>(sum_gx[r] / c.cols);
    const P means = both(mean[r]), rstds = both(rstd[r]), mean_gs = both(mean_g), mean_gxs = both(mean_gx);
    sweep<A>(
        c.cols,
        [&](int64_t i) {
          const P xhat = (load_pair(x[r] + i) - means) * rstds;
          const P g = weight ? load_pair(dy[r] + i) * load_pair(weight + i) : load_pair(dy[r] + i);
          store_pair(dx + i, (g - mean_gs - xhat * mean_gxs) * rstds);
        },
        [&](int64_t i) {
          const A xhat = (load_one(x[r] + i) - mean[r]) * rstd[r];
          const A g = weight ? load_one(dy[r] + i) * weight[i] : load_one(dy[r] + i);
          dx[i] = static_cast<X>((g - mean_g - xhat * mean_gx) * rstd[r]);
        });
  }
}

template <class X, class DY> void backward_rows(const Backward& c, int64_t begin, int64_t end) {
  const auto row_of = [&](int64_t row) {
    return Row<X, DY>{static_cast<const X*>(c.x) + row_offset(c.x_rows, row),
                         static_cast<const DY*>(c.dy) + row_offset(c.dy_rows, row),
                         c.dx ? static_cast<X*>(c.dx) + row * c.cols : nullptr, saved_mean<AccOf<X>>(c, row),
                         static_cast<const AccOf<X>*>(c.rstd)[row]};
  };
  int64_t row = begin;
  for (; row + 2 <= end; row += 2) backward_together(c, std::array{row_of(row), row_of(row + 1)});
  if (row < end) backward_together(c, std::array{row_of(row)});
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

// What is normalised, a row of it, as accumulators: h = residual + u, rounded to the residual's dtype, or u where there is no
// residual. Where it lies already, or in `room`.
template <class A> const A* make_h(const Forward& c, const ForwardStages& s, int64_t row, A* room) {
  const auto x = row_at<A>(c.x_type, c.x, c.x_rows, row, 0);
  if (!s.residual && !s.pre_activation && !s.threshold && c.x_type == kDtypeOf<A>) return static_cast<const A*>(x.data);
  const bool stored_as_it_is = s.residual && s.residual_type == kDtypeOf<A>;
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    const int64_t position = row * c.cols + start;
    const auto chunk = row_at<A>(c.x_type, c.x, c.x_rows, row, start);
    if (!s.residual) return before_norm(s, position, n, chunk, {}, {kDtypeOf<A>, room + start});
    const Target<A> h{s.residual_type, element(s.residual_type, s.h, position)};
    before_norm(s, position, n, chunk, row_at<A>(s.residual_type, s.residual, s.residual_rows, row, start), h);
    if (!stored_as_it_is) convert<A>({h.type, h.data}, {kDtypeOf<A>, room + start}, n);
  });
  return stored_as_it_is ? static_cast<const A*>(s.h) + row * c.cols : room;
}

template <class A> const A* from(const void* p, int64_t start) { return p ? static_cast<const A*>(p) + start : nullptr; }

template <class A> void forward_staged_rows(const Forward& c, const ForwardStages& s, int64_t begin, int64_t end) {
  const std::unique_ptr<A[]> buffer(new A[c.cols]);
  ChainLoop<A> activate;
  activate.activation = s.activation;
  for (int64_t row = begin; row < end; ++row) {
    const A* h = make_h(c, s, row, buffer.get());
    const auto [mean, rstd] = statistics(c, h, row);
    each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
      char* y = element(c.y_type, c.y, row * c.cols + start);
      const auto normalize_to = [&](auto* out) {
        normalize(h + start, mean, rstd, from<A>(c.weight, start), from<A>(c.bias, start), n, out);
      };
      if (!s.activation) return with_acc<A>(c.y_type, [&](auto* type) { normalize_to(reinterpret_cast<decltype(type)>(y)); });
      Chunk<A> z;
      normalize_to(z.values);
      activate.a.data = z;
      activate.first = {c.y_type, y};
      run_values(activate, n);
    });
  }
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
  if (!s.activation) convert(dy, {kDtypeOf<A>, room}, c.cols);
  else
    each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
      Chunk<A> z;
      normalize(h + start, mean, rstd, from<A>(c.weight, start), from<A>(s.bias, start), n, z.values);
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
    else sum.first = {s.dx_type, dx};
    if (s.dresidual) sum.second = {c.x_type, element(c.x_type, s.dresidual, position)};
    if (!sum.first.data) std::swap(sum.first, sum.second);
    if (sum.addend.data || sum.second.data || !dx || !changes) run_values(sum, n);
    if (!dx || !changes) return;
    ChainLoop<A> back;
    Chunk<MaskOf<A>> kept;
    back.activation = s.pre_activation;
    back.dy.data = g + start;
    back.a = s.pre_activation ? row_at<A>(s.dx_type, s.x, s.x_rows, row, start) : back.dy;
    back.first = {s.dx_type, dx};
    drop(s, position, n, back, kept);
    run_gradients(back, n);
  });
}

template <class A, size_t kRows>
void backward_staged_together(const Backward& c, const BackwardStages& s, int64_t first, A* buffer) {
  const bool wants_g = c.dx || s.dresidual;
  std::array<Row<A, A>, kRows> rows;
  for (int64_t i = 0; i < static_cast<int64_t>(kRows); ++i) {
    A *first_room = buffer + 2 * i * c.cols, *second_room = first_room + c.cols;
    const A mean = saved_mean<A>(c, first + i), rstd = static_cast<const A*>(c.rstd)[first + i];
    const A* h = load_h(c, s, first + i, first_room);
    rows[i] = {h, load_dz(c, s, first + i, h, mean, rstd, second_room), wants_g ? second_room : nullptr, mean, rstd};
  }
  backward_together(c, rows);
  if (!wants_g) return;
  for (size_t i = 0; i < kRows; ++i) store_gradients(c, s, first + i, rows[i].dx);
}

template <class A> void backward_staged_rows(const Backward& c, const BackwardStages& s, int64_t begin, int64_t end) {
  const std::unique_ptr<A[]> buffer(new A[4 * c.cols]);
  int64_t row = begin;
  for (; row + 2 <= end; row += 2) backward_staged_together<A, 2>(c, s, row, buffer.get());
  if (row < end) backward_staged_together<A, 1>(c, s, row, buffer.get());
}

// ---- The table -------------------------------------------------------------------------------------------------------------

// `with_type` for the pairs that occur: fp64 with itself, the others with each other.
template <class F> void with_types(Dtype first, Dtype second, F&& f) {
  with_type(first, [&](auto* a) {
    with_type(second, [&](auto* b) {
      using X = std::remove_pointer_t<decltype(a)>;
      using Y = std::remove_pointer_t<decltype(b)>;
      if constexpr (std::is_same_v<X, double> == std::is_same_v<Y, double>) f(a, b);
    });
  });
}

}  // namespace

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
