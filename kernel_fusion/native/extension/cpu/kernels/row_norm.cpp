// CPU row norm, forward and backward, on at::vec. Compiled once per instruction set (-DCPU_CAPABILITY=...).
//
// A row is read in chunks of kStatisticsChunk elements that stay in L1. Forward: one pass for the statistics (per chunk its mean
// and the squared deviations from it, joined over chunks in double by Chan's formula, so mean/std = 1e4 and long rows
// lose nothing), one pass for the result. Backward: one pass for the two sums and the weight gradients, one for dx.
// The order of every sum depends on the row length alone. With stages a row is first brought, chunk by chunk, to the accumulator
// type in a buffer, unless it lies in memory like that, and the same code finds it there.
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

template <class A, class F> void each_chunk(int64_t cols, F&& f) {
  for (int64_t start = 0; start < cols; start += kChunk<A>) f(start, std::min(kChunk<A>, cols - start));
}

// The address of an element.
inline const char* element(Dtype dtype, const void* tensor, int64_t index) {
  return static_cast<const char*>(tensor) + index * size_of(dtype);
}
inline char* element(Dtype dtype, void* tensor, int64_t index) { return static_cast<char*>(tensor) + index * size_of(dtype); }

// A chunk of a strided row of any dtype, as accumulators.
template <class A> void load_row(Dtype type, const void* tensor, const RowLayout& rows, int64_t row, int64_t start, int64_t n, A* out) {
  load_chunk<A>(type, element(type, tensor, row_offset(rows, row) + start), 1, n, out);
}

// The same where it lies if it can be read there, else in `room`.
template <class A>
const A* read_row(Dtype type, const void* tensor, const RowLayout& rows, int64_t row, int64_t start, int64_t n, A* room) {
  return read_chunk<A>(type, element(type, tensor, row_offset(rows, row) + start), 1, n, room);
}

// Dropout of elements that begin at `position`, with the scale of those that are kept.
template <class A> void drop(const Stages& s, int64_t position, int64_t n, A* x) {
  if (!s.threshold) return;
  dropout_chunk<A>(x, n, static_cast<uint64_t>(position), s.seed, s.threshold);
  scale_chunk<A>(x, s.threshold < 65536 ? 65536.0 / (65536 - s.threshold) : 0.0, n);
}

// u = dropout(pre_activation(x)) of a chunk: x itself where there is nothing to do, else in `room`, where x may lie already.
template <class A> const A* before_norm(const Stages& s, int64_t position, int64_t n, const A* x, A* room) {
  if (!s.pre_activation && !s.threshold) return x;
  if (s.pre_activation) activate_chunk<A>(s.pre_activation, x, room, n);
  else if (x != room) std::memcpy(room, x, n * sizeof(A));
  drop(s, position, n, room);
  return room;
}

// What is normalised, a chunk of it: h = residual + u, rounded to the residual's dtype and stored there; u where there is no
// residual. Where it lies already, or in `room`.
template <class A>
const A* make_h(const Forward& c, const ForwardStages& s, int64_t row, int64_t start, int64_t n, A* room) {
  const int64_t position = row * c.cols + start;
  const A* u = before_norm(s, position, n, read_row(c.x_type, c.x, c.x_rows, row, start, n, room), room);
  if (!s.residual) return u;
  Chunk<A> residual;
  const A* other = read_row<A>(s.residual_type, s.residual, s.residual_rows, row, start, n, residual);
  void* stored = element(s.residual_type, s.h, position);
  A* h = write_chunk<A>(s.residual_type, stored, 1, n, room);
  add_chunk<A>(u, other, h, n);
  store_chunk<A>(s.residual_type, h, n, stored, 1);
  return read_chunk<A>(s.residual_type, stored, 1, n, room);
}

// Whether the chunks that make_h gives are one row in memory: of x, or of the stored h. Else they are collected in a buffer.
template <class A> bool lies_in_memory(const Forward& c, const ForwardStages& s) {
  if (!is_chunk<A>(s.residual ? s.residual_type : c.x_type, 1, c.cols)) return false;
  return s.residual || (!s.pre_activation && !s.threshold);
}

template <class A> void forward_staged_rows(const Forward& c, const ForwardStages& s, int64_t begin, int64_t end) {
  const auto *weight = static_cast<const A*>(c.weight), *bias = static_cast<const A*>(c.bias);
  const bool in_memory = lies_in_memory<A>(c, s);
  const std::unique_ptr<A[]> buffer(new A[padded<A>(c.cols)]());
  for (int64_t row = begin; row < end; ++row) {
    const A* h = nullptr;
    each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
      A* room = buffer.get() + start;
      const A* chunk = make_h(c, s, row, start, n, room);
      if (!in_memory && chunk != room) std::memcpy(room, chunk, n * sizeof(A));
      if (start == 0) h = in_memory ? chunk : room;
    });
    const auto [mean, rstd] = statistics(c, h, row);
    each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
      char* out = element(c.y_type, c.y, row * c.cols + start);
      A* y = write_chunk<A>(c.y_type, out, 1, n, buffer.get() + start);
      normalize(h + start, mean, rstd, weight ? weight + start : nullptr, bias ? bias + start : nullptr, n, y);
      if (s.activation) activate_chunk<A>(s.activation, y, y, n);
      store_chunk<A>(c.y_type, y, n, out, 1);
    });
  }
}

// What was normalised, a row of it, as accumulators: where it lies, or in `room`.
template <class A> const A* load_h(const Backward& c, const BackwardStages& s, int64_t row, A* room) {
  const bool changes = !s.has_residual && (s.pre_activation || s.threshold);
  if (!changes && is_chunk<A>(c.x_type, 1, c.cols)) return static_cast<const A*>(c.x) + row_offset(c.x_rows, row);
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    load_row(c.x_type, c.x, c.x_rows, row, start, n, room + start);
    if (changes) before_norm<A>(s, row * c.cols + start, n, room + start, room + start);
  });
  return room;
}

// dz, the gradient of a row before the activation, whose argument is computed again: where dy lies, or in `room`.
template <class A>
const A* load_dz(const Backward& c, const BackwardStages& s, int64_t row, const A* h, A mean, A rstd, A* room) {
  if (!s.activation && is_chunk<A>(c.dy_type, 1, c.cols)) return static_cast<const A*>(c.dy) + row_offset(c.dy_rows, row);
  const auto *weight = static_cast<const A*>(c.weight), *bias = static_cast<const A*>(s.bias);
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    load_row(c.dy_type, c.dy, c.dy_rows, row, start, n, room + start);
    if (!s.activation) return;
    Chunk<A> z;
    normalize(h + start, mean, rstd, weight ? weight + start : nullptr, bias ? bias + start : nullptr, n, z.values);
    multiply_slope<A>(s.activation, room + start, z, room + start, n);
  });
  return room;
}

// From the norm's gradient `g` with respect to h: dh is added, dresidual stored; back through dropout and pre-activation, dx.
template <class A> void store_gradients(const Backward& c, const BackwardStages& s, int64_t row, A* g) {
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    const int64_t position = row * c.cols + start;
    A* d = g + start;
    Chunk<A> other;
    if (s.dh) {
      load_row<A>(c.x_type, s.dh, s.dh_rows, row, start, n, other);
      add_chunk<A>(d, other, d, n);
    }
    if (s.dresidual) store_chunk<A>(c.x_type, d, n, element(c.x_type, s.dresidual, position), 1);
    if (!c.dx) return;
    drop(s, position, n, d);
    if (s.pre_activation) {
      load_row<A>(s.dx_type, s.x, s.x_rows, row, start, n, other);
      multiply_slope<A>(s.pre_activation, d, other, d, n);
    }
    store_chunk<A>(s.dx_type, d, n, element(s.dx_type, c.dx, position), 1);
  });
}

template <class A, size_t kRows>
void backward_staged_together(const Backward& c, const BackwardStages& s, int64_t first, A* buffer) {
  const bool wants_g = c.dx || s.dresidual;
  std::array<Row<A, A>, kRows> rows;
  for (int64_t i = 0; i < static_cast<int64_t>(kRows); ++i) {
    A *first_room = buffer + 2 * i * padded<A>(c.cols), *second_room = first_room + padded<A>(c.cols);
    const A mean = saved_mean<A>(c, first + i), rstd = static_cast<const A*>(c.rstd)[first + i];
    const A* h = load_h(c, s, first + i, first_room);
    rows[i] = {h, load_dz(c, s, first + i, h, mean, rstd, second_room), wants_g ? second_room : nullptr, mean, rstd};
  }
  backward_together(c, rows);
  if (!wants_g) return;
  for (size_t i = 0; i < kRows; ++i) store_gradients(c, s, first + i, rows[i].dx);
}

template <class A> void backward_staged_rows(const Backward& c, const BackwardStages& s, int64_t begin, int64_t end) {
  const auto buffer = std::make_unique<A[]>(4 * padded<A>(c.cols));
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
