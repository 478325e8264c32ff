// CPU row norm, forward and backward, on at::vec. Compiled once per instruction set (-DCPU_CAPABILITY=...).
//
// Who takes which rows and columns, and in what order; the arithmetic is in cpu/row_norm.h.
// Each direction is a unit of its own (KF_FORWARD, KF_BACKWARD; native/build.py), lest one take too long.
#include "cpu/row_norm.h"

#include "cpu/parameters.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

// Whether the rows that come next are fetched while others are written, when no row is read. Of fp16 in memory, 32768 rows of 768
// take 0.30 ns per element instead of 0.51, and 4096 of 4096 0.24 instead of 0.31. fp32 loses as often as it gains, as does what is
// in the L3 cache (Xeon, 1 thread).
template <class X> bool fetches_next(const Forward& c) { return sizeof(X) == 2 && c.streams && c.cols <= 16384; }

// Whether a parameter can be read like x, which widens it to the values that preparing it gives.
template <class X> bool is_like(const Parameter& p) { return !p.data || (p.type == kDtypeOf<X> && p.offset == 0); }

// Calls f with a stretch of weight and bias: prepared, or as they are given where it is for so few rows that preparing takes longer than
// it saves. A row of 65536 fp16 takes 16 us where 18 with stretches prepared, of bf16 15 where 26, four of 16384 bf16 15 where 17, but of
// fp16 15.3 where 14.9 (Xeon, 1 thread).
template <class X, class F> KF_INLINE void with_parameters(const Forward& c, int64_t rows, int64_t start, int64_t n, F&& f) {
  using A = AccOf<X>;
  if constexpr (sizeof(X) == 2) {
    constexpr int64_t kFew = std::is_same_v<X, c10::Half> ? 2 : 4;
    if (rows <= kFew && is_like<X>(c.weight) && is_like<X>(c.bias))
      return f(from(static_cast<const X*>(c.weight.data), start), from(static_cast<const X*>(c.bias.data), start));
  }
  A room[2][kStretch];
  f(stretch_of(c.weight, start, n, room[0]), stretch_of(c.bias, start, n, room[1]));
}

// The statistics of several rows, and then their results. Short rows, which are found in the L1 cache, have all of 16 KB. Long ones
// pass by a stretch of weight and bias together: one by one, rows of 16384 fp32 take 0.40 ns per element, four 0.35, and of 16 bits
// eight a thirtieth less than four (Xeon, 1 thread).
template <class X, class Y> void forward_rows(const Forward& c, int64_t begin, int64_t end) {
  using A = AccOf<X>;
  constexpr int64_t kBytes = 16384;
  const int64_t short_rows = std::clamp<int64_t>(kBytes / (c.cols * sizeof(X)), 1, kMostRows);
  const int64_t together = are_long(c.cols) ? kLongRowsTogether : c.cols > kStretch ? 4 : short_rows;
  const bool fetches = fetches_next<X>(c);
  RowResults<Y> results(c.y, c.cols, c.streams);
  for (int64_t first = begin; first < end; first += together) {
    const int64_t count = std::min(together, end - first);
    const X* x[kMostRows];
    A mean[kMostRows], rstd[kMostRows];
    for (int64_t r = 0; r < count; ++r) x[r] = static_cast<const X*>(c.x) + row_offset(c.x_rows, first + r);
    statistics(c, x, first, count, mean, rstd);
    Y* y = static_cast<Y*>(c.y) + first * c.cols;
    for (int64_t start = 0; start < c.cols; start += kStretch) {
      const int64_t n = std::min(kStretch, c.cols - start);
      with_parameters<X>(c, end - begin, start, n, [&](auto* weight, auto* bias) {
        for (int64_t r = 0; r < count; ++r) {
          const int64_t row = first + r, next = row + together;
          const int64_t ahead = fetches && next < end ? row_offset(c.x_rows, next) - row_offset(c.x_rows, row) : 0;
          normalize(x[r] + start, mean[r], rstd[r], weight, bias, n, results.open(y + r * c.cols + start), ahead);
          results.close(n);
        }
      });
    }
  }
}

// f(piece, its row, its x, its first column, its columns).
template <class X, class F> void each_piece(const Forward& c, int64_t begin, int64_t end, F&& f) {
  const int64_t stretches = stretches_of(c.cols);
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / stretches, start = piece % stretches * kStretch;
    f(piece, row, static_cast<const X*>(c.x) + row_offset(c.x_rows, row) + start, start, std::min(kStretch, c.cols - start));
  }
}

template <class X> void moments_of_pieces(const Forward& c, int64_t begin, int64_t end, StretchMoments* moments) {
  each_piece<X>(c, begin, end, [&](int64_t piece, int64_t, const X* x, int64_t, int64_t n) {
    moments[piece] = moments_of(x, n, c.rms, c.rms ? 0 : center_of(x, n));
  });
}

template <class A>
void statistics_of_rows(const Forward& c, int64_t begin, int64_t end, const StretchMoments* moments, RowStatistics* statistics) {
  for (int64_t row = begin; row < end; ++row) {
    statistics[row] = statistics_from(c, moments + row * stretches_of(c.cols));
    if (c.mean) static_cast<A*>(c.mean)[row] = static_cast<A>(statistics[row].mean);
    if (c.rstd) static_cast<A*>(c.rstd)[row] = static_cast<A>(statistics[row].rstd);
  }
}

template <class X, class Y> void forward_pieces(const Forward& c, int64_t begin, int64_t end, const RowStatistics* statistics) {
  using A = AccOf<X>;
  RowResults<Y> results(c.y, c.cols, c.streams);
  each_piece<X>(c, begin, end, [&](int64_t, int64_t row, const X* x, int64_t start, int64_t n) {
    const A mean = static_cast<A>(statistics[row].mean), rstd = static_cast<A>(statistics[row].rstd);
    with_parameters<X>(c, /*rows=*/1, start, n, [&](auto* weight, auto* bias) {
      normalize(x, mean, rstd, weight, bias, n, results.open(static_cast<Y*>(c.y) + row * c.cols + start));
    });
    results.close(n);
  });
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

// What was added up, from the order of `Interleaved`.
template <class X> void restore_sums(const Backward& c) {
  if constexpr (std::is_same_v<X, Interleaved>)
    for (void* sum : {c.dweight, c.dbias})
      if (sum) restore(static_cast<float*>(sum), c.cols);
}

template <class X, class DY> void backward_rows(const Backward& c, int64_t begin, int64_t end) {
  const int together = rows_together<X>(c);
  Row<X, DY> rows[8];
  RowResults<X> results(c.dx, c.cols, c.streams);
  ColumnSums<AccOf<X>> sums(c);
  for (int64_t first = begin; first < end; first += together) {
    const int count = static_cast<int>(std::min<int64_t>(together, end - first));
    for (int r = 0; r < count; ++r) {
      const int64_t row = first + r, next = row + together;
      rows[r] = row_of<X, DY>(c, row, next < end ? next : row);
    }
    backward_together(c, rows, count, sums.begin_anew(first - begin), results);
  }
  sums.finish();
  restore_sums<X>(c);
}

// n elements of dweight or dbias, which begin at `start`.
template <class A> void store_gradient(const A* sum, int64_t start, int64_t n, Dtype type, void* out) {
  if (!out) return;
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    if constexpr (std::is_same_v<AccOf<T>, A>) narrow(sum, n, static_cast<T*>(out) + start);
  });
}

// Each strip prepares its weight and rounds its dweight and dbias, as all of them at once would write and read them in other caches:
// 8 x 131072 fp16 takes 0.51 ns per element instead of 0.69 (Xeon, 1 thread).
template <class X, class DY> void sums_of_strips(const BackwardByColumns& c, int64_t begin, int64_t end, RowSums* sums) {
  using A = AccOf<X>;
  const int64_t width = strip_width(c.cols);
  A room[3][kStretch];
  Backward strip = c;
  strip.dweight = c.dweight ? room[1] : nullptr;
  strip.dbias = c.dbias ? room[2] : nullptr;
  for (int64_t s = begin; s < end; ++s) {
    const int64_t start = s * width;
    strip.cols = std::min(width, c.cols - start);
    strip.weight = stretch_of(c.parameter, start, strip.cols, room[0]);
    Row<X, DY> rows[kFewRows];
    for (int64_t r = 0; r < c.rows; ++r) {
      rows[r] = row_of<X, DY>(c, r, r, start);
      if (s + 1 < end) rows[r].next_x = rows[r].next_dy = width;
    }
    add_stretch<false>(strip, rows, c.rows, true, 0, strip.cols);
    restore_sums<X>(strip);
    store_gradient(room[1], start, strip.cols, c.dweight_type, c.dweight);
    store_gradient(room[2], start, strip.cols, c.dbias_type, c.dbias);
    for (int64_t r = 0; r < c.rows; ++r) sums[s * c.rows + r] = {rows[r].sum_g, rows[r].sum_gx};
  }
}

template <class X, class DY> void dx_of_strips(const BackwardByColumns& c, int64_t begin, int64_t end, const RowSums* sums) {
  const int64_t width = strip_width(c.cols);
  AccOf<X> room[kStretch];
  Backward strip = c;
  RowResults<X> results(c.dx, c.cols, c.streams);
  for (int64_t s = begin; s < end; ++s) {
    const int64_t start = s * width, n = std::min(width, c.cols - start);
    strip.weight = stretch_of(c.parameter, start, n, room);
    for (int64_t r = 0; r < c.rows; ++r) {
      auto row = row_of<X, DY>(c, r, r, start);
      row.sum_g = sums[r].g;
      row.sum_gx = sums[r].gx;
      write_dx(strip, row, 0, n, results.open(row.dx));
      results.close(n);
    }
  }
}

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

#ifdef KF_FORWARD
void forward(const Forward& c, int64_t begin, int64_t end) {
  with_types(c.x_type, c.y_type, [&](auto* x, auto* y) {
    forward_rows<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(y)>>(c, begin, end);
  });
}

void forward_moments(const Forward& c, int64_t begin, int64_t end, StretchMoments* moments) {
  with_types(c.x_type, c.y_type, [&](auto* x, auto*) { moments_of_pieces<std::remove_pointer_t<decltype(x)>>(c, begin, end, moments); });
}

void forward_statistics(const Forward& c, int64_t begin, int64_t end, const StretchMoments* moments, RowStatistics* statistics) {
  if (c.x_type == Dtype::kDouble) statistics_of_rows<double>(c, begin, end, moments, statistics);
  else statistics_of_rows<float>(c, begin, end, moments, statistics);
}

void forward_stretches(const Forward& c, int64_t begin, int64_t end, const RowStatistics* statistics) {
  with_types(c.x_type, c.y_type, [&](auto* x, auto* y) {
    forward_pieces<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(y)>>(c, begin, end, statistics);
  });
}
#endif

#ifdef KF_BACKWARD
void backward(const Backward& c, int64_t begin, int64_t end) {
  with_types(c.x_type, c.dy_type, [&](auto* x, auto* dy) {
    backward_rows<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(dy)>>(c, begin, end);
  });
}

void backward_sums(const BackwardByColumns& c, int64_t begin, int64_t end, RowSums* sums) {
  with_types(c.x_type, c.dy_type, [&](auto* x, auto* dy) {
    sums_of_strips<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(dy)>>(c, begin, end, sums);
  });
}

void backward_dx(const BackwardByColumns& c, int64_t begin, int64_t end, const RowSums* sums) {
  with_types(c.x_type, c.dy_type, [&](auto* x, auto* dy) {
    dx_of_strips<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(dy)>>(c, begin, end, sums);
  });
}
#endif

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
