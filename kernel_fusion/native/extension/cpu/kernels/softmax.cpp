// CPU softmax over rows, forward and backward. Compiled once per instruction set.
//
// A piece of a row leaves its largest logit, and the exponentials of the distances to that, with their sum. The exponentials
// lie in y or, if y has another type, in the row's room. Backward computes dx = scale * (dy - sum(dy * y)) * y. The sums of
// chunks and pieces are joined in double.
//
// For the logarithm, y = (logit - largest) - log(sum), which reads the logits again, and dx = scale * (dy - sum(dy) * exp(y)).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "cpu/activation_loops.h"
#include "cpu/chunk.h"
#include "cpu/kernels.h"
#include "cpu/logits.h"
#include "cpu/rows.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

// Writes the masked logits of a chunk to `logits`.
template <class A>
void masked_chunk(const Softmax& c, const char* x, const char* mask, int64_t start, int64_t n, A* logits, A* room) {
  load_chunk<A>(c.spec.x, x + start * size_of(c.spec.x), 1, n, logits);
  const A scale = static_cast<A>(c.scale);
  if (c.spec.mask != Dtype::kBool) {
    load_chunk<A>(c.spec.mask, mask + start * c.mask_stride * size_of(c.spec.mask), c.mask_stride, n, room);
    for (int64_t i = 0; i < n; ++i) logits[i] = logits[i] * scale + room[i];
  } else {
    const char* keep = mask + start * c.mask_stride;
    for (int64_t i = 0; i < n; ++i) logits[i] = keep[i * c.mask_stride] ? logits[i] * scale : kNothing<A>;
  }
}

// The policy of softmax. The exponentials lie in y or, if y has another type, in the row's room.
template <class A> struct SoftmaxRows {
  using Args = Softmax;
  static constexpr int64_t kTogether = 1;
  struct Row {
    const char *x, *mask;
    char* y;
    A* exponentials;
    int64_t kept;  // columns from here on are left out
  };
  const Softmax& c;
  const int64_t element = size_of(c.spec.x);
  ChainLoop<A> quotients{};

  Row row(int64_t index, char* room) const {
    const int64_t mask_element = c.spec.mask == Dtype::kBool ? 1 : size_of(c.spec.mask);
    char* y = c.y + index * c.cols * element;
    return {c.x + row_offset(c.x_rows, index) * element, c.mask + row_offset(c.mask_rows, index) * mask_element, y,
            reinterpret_cast<A*>(c.in_place ? y : room), c.causal_rows ? std::min(c.cols, index % c.causal_rows + 1) : c.cols};
  }

  Softmax::Carry reduce(const Row& row, int64_t begin, int64_t end) const {
    const int64_t n = std::min(end, row.kept) - begin;
    if (n <= 0) return {kNothing<double>, 0};
    const auto logits = read_logits(row, begin, n);
    const A largest = largest_of(logits, n), top = largest == kNothing<A> ? 0 : largest;
    if (c.spec.log) return {largest, exponentiate<false>(logits, n, top, row.exponentials)};
    return {largest, exponentiate<true>(logits, n, top, row.exponentials + begin)};
  }

  void finish(const Row*, int64_t, const Softmax::Carry* pieces, int64_t count, Softmax::Total* result) const {
    Softmax::Total total = pieces[0];
    for (int64_t i = 1; i < count; ++i) {
      const Softmax::Carry& piece = pieces[i];
      if (piece.sum == 0) continue;  // nothing but -infinity
      if (piece.largest > total.largest)
        total = {piece.largest, total.sum * std::exp(total.largest - piece.largest) + piece.sum};
      else total.sum += piece.sum * std::exp(piece.largest - total.largest);
    }
    *result = total;
  }

  void write(const Row& row, int64_t begin, int64_t end, const Softmax::Carry& piece, const Softmax::Total& total) {
    const bool fully_masked = total.sum == 0 && (c.causal_rows || c.spec.mask != Dtype::kAbsent);
    const int64_t n = fully_masked ? 0 : std::clamp<int64_t>(row.kept - begin, 0, end - begin);
    char* const y = row.y + begin * element;
    if (c.spec.log) {
      write_logarithms(logits_at(row, begin), n, total, y);
    } else {
      quotients.scale = factor(piece, total);
      quotients.a.data = row.exponentials + begin;
      quotients.first = {c.spec.x, y};
      run_values(quotients, n);
    }
    leave_out(y + n * element, end - begin - n);
    if (total.sum != total.sum && c.spec.mask == Dtype::kBool) {  // all are NaN, except those that the mask leaves out
      const char* keep = row.mask + begin * c.mask_stride;
      for (int64_t i = 0; i < n; ++i)
        if (!keep[i * c.mask_stride]) leave_out(y + i * element, 1);
    }
  }

 private:
  // Writes n results of elements that are left out: zeros, or their logarithms.
  void leave_out(char* y, int64_t n) const {
    if (!c.spec.log) std::memset(y, 0, n * element);
    else with_type_of<A>(c.spec.x, [&]<class T>(T*) { std::fill_n(reinterpret_cast<T*>(y), n, static_cast<T>(kNothing<A>)); });
  }

  void write_logarithms(const Logits<A>& logits, int64_t n, const Softmax::Total& total, char* y) const {
    const double largest = total.largest == kNothing<double> ? 0 : total.largest;
    const auto top = both(static_cast<A>(largest)), log_sum = both(static_cast<A>(std::log(total.sum))),
               scale = both(logits.scale);
    const Target<A> to{c.spec.x, y};
    sweep<A>(n, [&](int64_t i, auto part) { to.store(i, logits.in.load(i, part) * scale - top - log_sum, part); });
  }

  // The logits of a row from column `begin` on: where they lie or, if there is a mask, where their exponentials will lie.
  Logits<A> logits_at(const Row& row, int64_t begin) const {
    if (c.spec.mask == Dtype::kAbsent) return {{c.spec.x, row.x + begin * element}, static_cast<A>(c.scale)};
    return {{kDtypeOf<A>, row.exponentials + begin}, A(1)};
  }

  // The same, of which the first n are computed if there is a mask.
  Logits<A> read_logits(const Row& row, int64_t begin, int64_t n) const {
    if (c.spec.mask == Dtype::kAbsent) return logits_at(row, begin);
    Chunk<A> masks;
    for (int64_t start = 0; start < n; start += kChunk<A>)
      masked_chunk<A>(c, row.x, row.mask, begin + start, std::min(kChunk<A>, n - start), row.exponentials + begin + start,
                      masks);
    return logits_at(row, begin);
  }

  // The factor that makes results of a piece's exponentials. A subnormal one would be slow, and leaves nothing but zeros.
  static A factor(const Softmax::Carry& piece, const Softmax::Total& total) {
    const A factor = static_cast<A>((piece.largest == total.largest ? 1 : std::exp(piece.largest - total.largest)) / total.sum);
    return factor < std::numeric_limits<A>::min() ? 0 : factor;
  }
};

// Values of y that mark elements that are left out; NaN, which equals nothing, if there are none.
template <class A> A left_out(const SoftmaxBwdSpec& spec) {
  return !spec.leaves_out ? std::numeric_limits<A>::quiet_NaN() : spec.log ? kNothing<A> : A(0);
}

// dy where y is not `nothing`, else 0.
template <class A> KF_INLINE Pair<A> kept(const Pair<A>& dy, const Pair<A>& y, const Vectorized<A>& nothing) {
  const Vectorized<A> zero(0);
  return {Math<A>::where_eq(y.a, nothing, zero, dy.a), Math<A>::where_eq(y.b, nothing, zero, dy.b)};
}

template <class T, class A> double dot(const Source<A>& dy, const Source<A>& y, int64_t begin, int64_t end) {
  const auto [sum] = sums_over<A, 1>(end - begin, [&](int64_t i, auto& sums, auto part) {
    sums[0] = fma(dy.template load<T>(begin + i, part), y.template load<T>(begin + i, part), sums[0]);
  });
  return sum;
}

// Sets columns [begin, end) of dx to 0 where y marks an element that is left out.
template <class A>
[[gnu::noinline, gnu::cold]] void zero_where_left_out(const SoftmaxBackward& c, const char* y, char* dx, int64_t begin,
                                                      int64_t end) {
  const int64_t element = size_of(c.spec.y);
  Chunk<A> values;
  for (int64_t start = begin; start < end; start += kChunk<A>) {
    const int64_t n = std::min(kChunk<A>, end - start);
    load_chunk<A>(c.spec.y, y + start * element, 1, n, values);
    for (int64_t i = 0; i < n; ++i)
      if (values[i] == left_out<A>(c.spec)) std::memset(dx + (start + i) * element, 0, element);
  }
}

// The policy of backward. T is the type of dy and y, or AnyType if they have two types. With `kLog`, y is the logarithm.
template <class T, class A, bool kLog> struct SoftmaxGradients {
  using Args = SoftmaxBackward;
  static constexpr int64_t kTogether = 1;
  struct Row {
    Source<A> dy, y;
    char* dx;
  };
  const Args& c;
  const int64_t element = size_of(c.spec.y), dy_element = size_of(c.spec.dy);

  Row row(int64_t index, char*) const {
    const int64_t first = index * c.cols;
    return {{c.spec.dy, c.dy + first * dy_element}, {c.spec.y, c.y + first * element}, c.dx + first * element};
  }

  double reduce(const Row& row, int64_t begin, int64_t end) const {
    double sum = 0;
    for (int64_t start = begin; start < end; start += kChunk<A>) {
      const int64_t stop = std::min(end, start + kChunk<A>);
      sum += kLog ? sum_of_kept(row, start, stop) : dot<T>(row.dy, row.y, start, stop);
    }
    return sum;
  }

  void finish(const Row*, int64_t, const double* pieces, int64_t count, double* total) const {
    *total = pieces[0];
    for (int64_t i = 1; i < count; ++i) *total += pieces[i];
  }

  void write(const Row& row, int64_t begin, int64_t end, double, double sum) const {
    constexpr int64_t kStep = Pair<A>::kStep;
    const char *dy_bytes = static_cast<const char*>(row.dy.data), *y_bytes = static_cast<const char*>(row.y.data);
    const Source<A> dy{c.spec.dy, dy_bytes + begin * dy_element}, y{c.spec.y, y_bytes + begin * element};
    const auto dx = Target<A>::streamed(c.spec.y, row.dx + begin * element, c.streams);
    const bool streams = c.streams;  // a copy, as are the sources, because the compiler cannot know that no store changes it
    const int64_t cols = c.cols;
    const auto sums = both(static_cast<A>(sum)), scales = both(static_cast<A>(c.scale));
    const Vectorized<A> nothing(left_out<A>(c.spec));
    const auto gradient = [&](const Pair<A>& d, const Pair<A>& p) {
      if constexpr (kLog) return (kept(d, p, nothing) - Pair<A>{Math<A>::exp(p.a), Math<A>::exp(p.b)} * sums) * scales;
      else return (d - sums) * p * scales;
    };
    sweep<A>(end - begin, [&](int64_t i, auto part) {
      if (streams)  // fetch the next row from memory
        for (int64_t line = 0; line < kStep; line += 64 / element) {
          __builtin_prefetch(static_cast<const char*>(dy.data) + (i + line + cols) * dy_element);
          __builtin_prefetch(static_cast<const char*>(y.data) + (i + line + cols) * element);
        }
      dx.template store<T>(i, gradient(dy.template load<T>(i, part), y.template load<T>(i, part)), part);
    });
    constexpr A kHarmless = std::numeric_limits<A>::max() * std::numeric_limits<A>::epsilon() / 4;
    // Otherwise all factors are finite, and their product with 0 is 0.
    if (c.spec.leaves_out && !(std::fabs(sum) + std::fabs(sum * c.scale) < kHarmless)) {
      if (c.streams) finish_streams();
      zero_where_left_out<A>(c, y_bytes, row.dx, begin, end);
    }
  }

 private:
  double sum_of_kept(const Row& row, int64_t begin, int64_t end) const {
    const Vectorized<A> nothing(left_out<A>(c.spec));
    const auto [sum] = sums_over<A, 1>(end - begin, [&](int64_t i, auto& sums, auto part) {
      sums[0] = sums[0] + kept(row.dy.template load<T>(begin + i, part), row.y.template load<T>(begin + i, part), nothing);
    });
    return sum;
  }
};

template <class T, class A> void softmax_bwd_rows(const SoftmaxBackward& c, const RowTask<SoftmaxBackward>& task) {
  if (c.spec.log) run_rows(SoftmaxGradients<T, A, true>{c}, c, task);
  else run_rows(SoftmaxGradients<T, A, false>{c}, c, task);
  if (c.streams) finish_streams();
}

}  // namespace

void softmax(const Softmax& c, const RowTask<Softmax>& task) {
  if (c.spec.x == Dtype::kDouble) run_rows(SoftmaxRows<double>{c}, c, task);
  else run_rows(SoftmaxRows<float>{c}, c, task);
}

void softmax_bwd(const SoftmaxBackward& c, const RowTask<SoftmaxBackward>& task) {
  if (c.spec.dy != c.spec.y) return softmax_bwd_rows<AnyType, float>(c, task);  // never of double with others
  with_type(c.spec.y, [&]<class T>(T*) { softmax_bwd_rows<Alike<T>, AccOf<T>>(c, task); });
}

}  // namespace kf::cpu::CPU_CAPABILITY
