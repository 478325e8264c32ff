// CPU row norms forward, on at::vec. Compiled once per instruction set (-DCPU_CAPABILITY=...).
//
// This file decides which rows and columns are taken together and in what order; cpu/row_norm_forward.h has the arithmetic.
#include "cpu/row_norm_forward.h"

#include <memory>

#include "cpu/row_norm_stages.h"
#include "cpu/rows.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

// Whether a parameter has the values of its prepared form when it is read with the type of x.
template <class T> bool is_like(const Parameter& p) { return !p.data || (p.type == kDtypeOf<T> && p.offset == 0); }

// Calls f with a stretch of weight and bias. They are prepared, or left as they are if preparing them costs more than it
// saves for so few rows.
template <class T, class F> KF_INLINE void with_parameters(const Forward& c, int64_t rows, int64_t start, int64_t n, F&& f) {
  using A = AccOf<T>;
  if constexpr (sizeof(T) == 2) {
    constexpr int64_t kFew = std::is_same_v<T, c10::Half> ? 2 : 4;
    if (rows <= kFew && is_like<T>(c.weight) && is_like<T>(c.bias))
      return f(from(static_cast<const T*>(c.weight.data), start), from(static_cast<const T*>(c.bias.data), start));
  }
  A room[2][kStretch];
  f(stretch_of(c.weight, start, n, room[0]), stretch_of(c.bias, start, n, room[1]));
}

constexpr int64_t kShortRows = 16384;  // the bytes of short rows taken together stay in the L1 cache

// Computes the statistics of several rows, then their results. Long rows use a stretch of weight and bias together. The next
// rows of fp16 or bf16 are prefetched while results are written, because nothing else is read then.
template <class T> void forward_rows(const Forward& c, int64_t begin, int64_t end) {
  using A = AccOf<T>;
  const int64_t short_rows = std::clamp<int64_t>(kShortRows / (c.cols * sizeof(T)), 1, kMostRows);
  const int64_t together = are_long(c.cols) ? kLongRowsTogether : c.cols > kStretch ? 4 : short_rows;
  const bool fetches = sizeof(T) == 2 && c.streams && c.cols <= 16384;
  RowResults results(c.y_type, c.y, c.cols, c.streams);
  for (int64_t first = begin; first < end; first += together) {
    const int64_t count = std::min(together, end - first);
    const T* x[kMostRows];
    A mean[kMostRows], rstd[kMostRows];
    for (int64_t r = 0; r < count; ++r) x[r] = static_cast<const T*>(c.x) + row_offset(c.x_rows, first + r);
    statistics(c, x, first, count, mean, rstd);
    char* y = element(c.y_type, c.y, first * c.cols);
    for (int64_t start = 0; start < c.cols; start += kStretch) {
      const int64_t n = std::min(kStretch, c.cols - start);
      with_parameters<T>(c, end - begin, start, n, [&](auto* weight, auto* bias) {
        for (int64_t r = 0; r < count; ++r) {
          const int64_t row = first + r, next = row + together;
          const int64_t ahead = fetches && next < end ? row_offset(c.x_rows, next) - row_offset(c.x_rows, row) : 0;
          normalize(x[r] + start, mean[r], rstd[r], weight, bias, n,
                    results.open<Results<T>>(element(c.y_type, y, r * c.cols + start)), ahead);
          results.close(n);
        }
      });
    }
  }
}

// The policy of long rows whose pieces threads share: their results have the bits that `forward_rows` gives.
template <class T> struct LongRows {
  using Args = Forward;
  using A = AccOf<T>;
  static constexpr int64_t kTogether = 1;
  struct Row {
    const T* x;
    int64_t index;
  };
  const Forward& c;
  RowResults results{c.y_type, c.y, c.cols, c.streams};

  Row row(int64_t index, char*) const { return {static_cast<const T*>(c.x) + row_offset(c.x_rows, index), index}; }

  StretchMoments reduce(const Row& row, int64_t begin, int64_t end) const {
    const T* x = row.x + begin;
    return moments_of(x, end - begin, c.rms, c.rms ? 0 : center_of(x, end - begin));
  }

  void finish(const Row* row, int64_t, const StretchMoments* moments, int64_t, RowStatistics* total) const {
    *total = statistics_from(c, moments);
    if (c.mean) static_cast<A*>(c.mean)[row->index] = static_cast<A>(total->mean);
    if (c.rstd) static_cast<A*>(c.rstd)[row->index] = static_cast<A>(total->rstd);
  }

  void write(const Row& row, int64_t begin, int64_t end, const StretchMoments&, const RowStatistics& of) {
    const A mean = static_cast<A>(of.mean), rstd = static_cast<A>(of.rstd);
    with_parameters<T>(c, /*rows=*/1, begin, end - begin, [&](auto* weight, auto* bias) {
      normalize(row.x + begin, mean, rstd, weight, bias, end - begin,
                results.open<Results<T>>(element(c.y_type, c.y, row.index * c.cols + begin)));
    });
    results.close(end - begin);
  }
};

// The element of weight and bias at which those of a row's group begin.
inline int64_t column_of(const Forward& c, int64_t row) { return c.groups == 1 ? 0 : row % c.groups * c.cols; }

// The row to normalise. With a residual it is h = residual + gate * u, rounded to the residual's dtype and stored; without one
// it is u, or x * factor. It lies in memory already, or is computed in `room`.
template <class A> Source<A> make_h(const Forward& c, const ForwardStages& s, int64_t row, A* room) {
  const auto x = row_at<A>(c.x_type, c.x, c.x_rows, row);
  if (!s.residual && !s.pre_activation && !s.dropout && !factor_is_first(s)) return x;
  const int64_t first = row * c.cols;
  const Target<A> h =
      s.residual ? Target<A>{s.residual_type, element(s.residual_type, s.h, first)} : Target<A>{kDtypeOf<A>, room};
  const Source<A> gate = from(Source<A>{s.residual_gate.type, s.residual_gate.data}, column_of(c, row));
  const Source<A> residual = s.residual ? row_at<A>(s.residual_type, s.residual, s.residual_rows, row) : Source<A>{};
  const bool fetches = !c.weight.as_is(kDtypeOf<A>);  // prefetch a row's own weight and bias, which are read next
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    for (const Parameter* p : {&c.weight, &c.bias})
      if (fetches && p->data) fetch(element(p->type, p->data, column_of(c, row) + start), n * size_of(p->type));
    if (factor_is_first(s)) apply_factor(s, row, start, n, from(x, start), from(h, start));
    else before_norm(s, first + start, n, from(x, start), from(gate, start), from(residual, start), from(h, start));
  });
  return {h.type, h.data};
}

template <class A, class T>
void finish_row(const Forward& c, const ForwardStages& s, int64_t row, const T* h, A mean, A rstd, RowResults& results) {
  const int64_t column = column_of(c, row);
  Chunk<A> weights, biases;
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    const auto y = results.open<AnyResults<A>>(element(c.y_type, c.y, row * c.cols + start));
    const A* weight = stretch_of<A>(c.weight, column + start, n, weights);
    const A* bias = stretch_of<A>(c.bias, column + start, n, biases);
    Chunk<A> z;
    const auto out = s.activation || factor_is_last(s) ? AnyResults<A>::at(kDtypeOf<A>, z) : y;
    if (s.rounds()) normalize_rounded(s, h + start, mean, rstd, weight, bias, n, out);
    else normalize(h + start, mean, rstd, weight, bias, n, out);
    if (s.activation) {
      ChainLoop<A> activate;
      activate.activation = s.activation;
      activate.to_bf16 = c.y_type == Dtype::kBFloat16;
      activate.a.data = z;
      activate.first = y.target;
      run_values(activate, n);
    }
    if (factor_is_last(s)) apply_factor(s, row, start, n, {kDtypeOf<A>, z}, y.target);
    results.close(n);
  });
}

// Computes the statistics of several rows, whose h have type T, then their results. The statistics read h in the order in
// which a norm without stages reads it, so the norm of h alone has the same bits.
template <class A, class T>
void finish_rows(const Forward& c, const ForwardStages& s, int64_t first, int64_t count, const Source<A>* h,
                 RowResults& results) {
  const Alike<T>* rows[kMostRows];
  A mean[kMostRows], rstd[kMostRows];
  for (int64_t r = 0; r < count; ++r) rows[r] = static_cast<const Alike<T>*>(h[r].data);
  statistics(c, rows, first, count, mean, rstd);
  for (int64_t r = 0; r < count; ++r) finish_row(c, s, first + r, static_cast<const T*>(h[r].data), mean[r], rstd[r], results);
}

template <class A> void forward_staged_rows(const Forward& c, const ForwardStages& s, int64_t begin, int64_t end) {
  const int64_t together = std::clamp<int64_t>(kShortRows / (c.cols * sizeof(A)), 1, kMostRows);
  const std::unique_ptr<A[]> buffer(new A[together * c.cols]);
  RowResults results(c.y_type, c.y, c.cols, c.streams);
  for (int64_t first = begin; first < end; first += together) {
    const int64_t count = std::min(together, end - first);
    Source<A> h[kMostRows];
    for (int64_t r = 0; r < count; ++r) h[r] = make_h(c, s, first + r, buffer.get() + r * c.cols);
    with_type_of<A>(h[0].type, [&]<class T>(T*) { finish_rows<A, T>(c, s, first, count, h, results); });
  }
}

}  // namespace

void prepare(const Parameter& p, int64_t n, void* out) {
  if (p.type == Dtype::kDouble) prepare_stretch(p, 0, n, static_cast<double*>(out));
  else prepare_stretch(p, 0, n, static_cast<float*>(out));
}

void forward(const Forward& c, const RowTask<Forward>& task) {
  with_type(c.x_type, [&]<class T>(T*) {
    if (task.step == RowStep::kRows) forward_rows<Alike<T>>(c, task.begin, task.end);
    else run_rows(LongRows<Alike<T>>{c}, c, task);
  });
}

void forward_staged(const Forward& c, const ForwardStages& s, int64_t begin, int64_t end) {
  if (c.x_type == Dtype::kDouble) forward_staged_rows<double>(c, s, begin, end);
  else forward_staged_rows<float>(c, s, begin, end);
}

}  // namespace kf::cpu::CPU_CAPABILITY
