// Log-probabilities of classes in rows of logits, and their backward. Compiled once per instruction set.
//
// A piece of a row leaves its largest logit, the sum of the exponentials of the distances to that, and sums of what else is
// wanted. The pieces are joined in double. Backward needs no sums, since forward kept those of the row: with the logarithm of
// a probability l = (z - largest) - log_sum and p = e^l, dz = p * (da - sum(dlogprob) + db * l) + dc * weight, plus
// dlogprob at the ids. An element of an id is computed once more, so that all of its terms are added before it is rounded.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/kernels.h"
#include "cpu/logits.h"
#include "cpu/rows.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

template <class A> const A* numbers(const char* p) { return reinterpret_cast<const A*>(p); }
template <class A> A* numbers(char* p) { return reinterpret_cast<A*>(p); }

// The numbers of a row that both directions use.
template <class A> struct LogitRow {
  const char *x, *mask;
  const int64_t* ids;
  A scale, cap;  // z = scale * x or, with a cap, cap * tanh(scale * x)
  bool ignored;

  LogitRow() = default;
  LogitRow(const LogitRows& c, int64_t index)
      : x(c.x + row_offset(c.x_rows, index) * size_of(c.type)),
        mask(c.mask ? c.mask + row_offset(c.mask_rows, index) : nullptr), ids(numbers<int64_t>(c.ids) + index * c.num_ids),
        ignored(*ids == c.ignore_index) {
    const double by = c.temperature ? numbers<A>(c.temperature)[index] : 1;
    scale = static_cast<A>(c.softcap != 0 ? c.scale / c.softcap : c.scale / by);
    cap = static_cast<A>(c.softcap / by);
  }

  bool keeps(const LogitRows& c, int64_t column) const { return mask[column * c.mask_stride]; }
  int64_t num_kept(const LogitRows& c, int64_t begin, int64_t end) const {
    int64_t kept = 0;
    for (int64_t i = begin; i < end; ++i) kept += keeps(c, i);
    return kept;
  }
};

// Logits of columns from `begin` on. They are computed into `room` if they are more than products.
template <class A> Logits<A> logits_of(const LogitRows& c, const LogitRow<A>& row, int64_t begin, int64_t n, A* room) {
  const Source<A> in{c.type, row.x + begin * size_of(c.type)};
  if (!row.mask && c.softcap == 0) return {in, row.scale};
  const Target<A> to{kDtypeOf<A>, room};
  const auto scale = both(row.scale), cap = both(row.cap);
  sweep<A>(n, [&](int64_t i, auto part) {
    const auto v = in.load(i, part) * scale;
    to.store(i, c.softcap == 0 ? v : Pair<A>{Math<A>::tanh(v.a), Math<A>::tanh(v.b)} * cap, part);
  });
  if (row.mask)
    for (int64_t i = 0; i < n; ++i)
      if (!row.keeps(c, begin + i)) room[i] = kNothing<A>;
  return {{kDtypeOf<A>, room}, A(1)};
}

template <class A> struct TokenLogprobRows {
  using Args = TokenLogprob;
  using Row = LogitRow<A>;
  static constexpr int64_t kTogether = 1, kPiece = 8192;
  static constexpr A kNan = std::numeric_limits<A>::quiet_NaN();
  const Args& c;

  Row row(int64_t index, char*) const { return {c, index}; }

  Args::Carry reduce(const Row& row, int64_t begin, int64_t end) const {
    const int64_t n = end - begin;
    if (row.ignored) return {kNothing<double>, 0, 0, 0, 0};
    A room[kPiece];
    const auto logits = logits_of(c, row, begin, n, room);
    A largest = largest_of(logits, n);
    const A top = largest == kNothing<A> ? 0 : largest;
    const double sum = exponentiate<false>(logits, n, top, room);
    if (sum != sum && first_of_value(logits, n, kNan) < n) largest = kNan;
    Args::Carry carry{largest, sum, 0, static_cast<double>(row.mask ? row.num_kept(c, begin, end) : n), begin};
    if (c.extra == Extra::kSum) weigh(logits, begin, n, top, carry);
    if (c.extra == Extra::kEntropy) carry.extra = sum_of_terms(logits, n, top);
    if (c.predicted) carry.best = begin + first_of_value(logits, n, largest);
    return carry;
  }

  void finish(const Row* row, int64_t, const Args::Carry* pieces, int64_t count, Args::Total*) const {
    const int64_t index = (row->ids - numbers<int64_t>(c.ids)) / c.num_ids;
    Args::Carry whole = pieces[0];
    for (int64_t i = 1; i < count; ++i)
      if (!std::isnan(whole.largest) && (pieces[i].largest > whole.largest || std::isnan(pieces[i].largest)))
        whole.largest = pieces[i].largest, whole.best = pieces[i].best;
    const double top = base(whole.largest);
    whole.sum = whole.extra = whole.weights = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Args::Carry& piece = pieces[i];
      const double below = base(piece.largest) - top, factor = std::exp(below);
      whole.weights += piece.weights;
      if (c.extra == Extra::kSum) whole.extra += piece.extra + piece.weights * below;
      if (piece.sum == 0) continue;  // nothing but -infinity
      whole.sum += piece.sum * factor;
      if (c.extra == Extra::kEntropy) whole.extra += (piece.extra + piece.sum * below) * factor;
    }
    store(*row, index, whole);
  }

 private:
  static double base(double largest) { return largest == kNothing<double> ? 0 : largest; }

  void store(const Row& row, int64_t index, const Args::Carry& whole) const {
    const bool dead = row.ignored || (row.mask && whole.weights == 0);  // nothing is left
    const double log_sum = dead ? 0 : std::log(whole.sum);
    numbers<A>(c.largest)[index] = row.ignored ? 0 : static_cast<A>(whole.largest);
    numbers<A>(c.log_sum)[index] = static_cast<A>(log_sum);
    if (c.predicted) numbers<int64_t>(c.predicted)[index] = row.ignored ? -1 : dead ? 0 : whole.best;
    if (c.extra != Extra::kNone) {
      const double value = c.extra == Extra::kSum ? whole.extra - whole.weights * log_sum : log_sum - whole.extra / whole.sum;
      numbers<A>(c.found)[index] = dead ? 0 : static_cast<A>(value);
    }
    for (int64_t k = 0; k < c.num_ids; ++k) {
      A z = 0;
      if (!row.ignored) {
        const auto logits = logits_of(c, row, row.ids[k], 1, &z);
        store_pair(&z, logits.in.load(0, Part{1}) * both(logits.scale), Part{1});
      }
      const bool left_out = row.mask && !row.keeps(c, row.ids[k]);
      const double logprob = row.ignored ? 0 : left_out ? kNothing<double> : (z - whole.largest) - log_sum;
      numbers<A>(c.logprob)[index * c.num_ids + k] = static_cast<A>(logprob);
    }
  }

  // Sums the weights, and weight * (logit - top).
  void weigh(const Logits<A>& logits, int64_t begin, int64_t n, A top, Args::Carry& carry) const {
    const Source<A> weight{kDtypeOf<A>, c.weight ? c.weight + begin * static_cast<int64_t>(sizeof(A)) : nullptr};
    const auto tops = both(top), scale = both(logits.scale);
    double weights = 0, sum = 0;
    for (int64_t start = 0; start < n; start += kChunk<A>) {
      const auto sums = sums_over<A, 2>(std::min(n - start, kChunk<A>), [&](int64_t i, auto& sums, auto part) {
        const auto w = first_of(weight.data ? weight.load(start + i, part) : both(A(1)), part);
        const auto d = first_of(logits.in.load(start + i, part) * scale - tops, part);
        sums[0] = sums[0] + w;
        sums[1] = fma(w, d, sums[1]);
      });
      weights += sums[0], sum += sums[1];
    }
    carry.weights = weights, carry.extra = sum;
  }

  // The sum of e^d * d for d = logit - top, where 0 * -infinity is 0.
  static double sum_of_terms(const Logits<A>& logits, int64_t n, A top) {
    const auto tops = both(top);
    const Vectorized<A> least(A(-1e4));
    double sum = 0;
    for (int64_t start = 0; start < n; start += kChunk<A>) {
      auto sums = both<A>(0);
      logits.each_pair(start, std::min(n, start + kChunk<A>), [&](int64_t, const Pair<A>& z) {
        const auto d = z - tops;
        const Pair<A> bounded{at::vec::clamp_min(d.a, least), at::vec::clamp_min(d.b, least)};
        sums = fma(Pair<A>{Math<A>::exp(bounded.a), Math<A>::exp(bounded.b)}, bounded, sums);
      });
      sum += total(sums);
    }
    return sum;
  }

  static int64_t first_of_value(const Logits<A>& logits, int64_t n, A value) {
    constexpr int64_t kStep = Pair<A>::kStep;
    const auto scale = both(logits.scale);
    for (int64_t i = 0; i < n; i += kStep) {
      A lanes[kStep];
      const int64_t count = std::min(kStep, n - i);
      const auto z = (count == kStep ? logits.in.load(i) : logits.in.load(i, Part{count})) * scale;
      store_pair(lanes, z);
      for (int64_t e = 0; e < count; ++e)
        if (lanes[e] == value || (std::isnan(value) && std::isnan(lanes[e]))) return i + e;
    }
    return n;
  }
};

// T is the type by which x and dx are read and written.
template <class T, class A> struct TokenLogprobGradients {
  using Args = TokenLogprobBackward;
  static constexpr int64_t kTogether = 1;
  struct Row : LogitRow<A> {
    int64_t index;
    A largest, log_sum, a, b, c;
    bool zero;
  };
  const Args& c;
  const int64_t element = size_of(c.type);

  Row row(int64_t index, char*) const {
    const auto number = [&](const char* p) { return p ? numbers<A>(p)[index] : A(0); };
    Row row{{c, index}, index, number(c.largest), number(c.log_sum), number(c.da), number(c.db), number(c.dc), false};
    for (int64_t k = 0; k < c.num_ids; ++k) row.a -= row.ignored ? A(0) : given(row, k);
    row.zero = row.ignored || (row.mask && row.largest == kNothing<A> && row.num_kept(c, 0, c.cols) == 0);
    return row;
  }

  static Args::Carry reduce(const Row&, int64_t, int64_t) { return {}; }
  static void finish(const Row*, int64_t, const Args::Carry*, int64_t, Args::Total*) {}

  void write(const Row& row, int64_t begin, int64_t end, Args::Carry, Args::Total) const {
    char* const dx = c.dx + (row.index * c.cols + begin) * element;
    if (row.zero) {
      std::memset(dx, 0, (end - begin) * element);
      return;
    }
    const bool plain = !row.mask && !c.db && !c.dc && c.softcap == 0;
    if (plain) write_plain(row, begin, end, dx);
    else write_chunks(row, begin, end, dx);
    if (c.streams) finish_streams();
    for (int64_t k = 0; k < c.num_ids; ++k)
      if (row.ids[k] >= begin && row.ids[k] < end) write_id(row, k, dx + (row.ids[k] - begin) * element);
    for (int64_t i = begin; row.mask && i < end; ++i)  // also beside NaN
      if (!row.keeps(c, i)) std::memset(dx + (i - begin) * element, 0, element);
  }

 private:
  A given(const Row& row, int64_t k) const {
    const bool left_out = row.mask && !row.keeps(c, row.ids[k]);
    return left_out ? A(0) : numbers<A>(c.dlogprob)[row.index * c.num_ids + k];
  }

  void write_plain(const Row& row, int64_t begin, int64_t end, char* to) const {
    const Source<A> x{c.type, row.x + begin * element};
    const auto dx = Target<A>::streamed(c.type, to, c.streams);
    const auto scale = both(row.scale), top = both(row.largest), log_sum = both(row.log_sum), a = both(row.a * row.scale);
    sweep<A>(end - begin, [&](int64_t i, auto part) {
      const auto l = x.template load<T>(i, part) * scale - top - log_sum;
      dx.template store<T>(i, Pair<A>{Math<A>::exp(l.a), Math<A>::exp(l.b)} * a, part);
    });
  }

  void write_chunks(const Row& row, int64_t begin, int64_t end, char* to) const {
    Chunk<A> room;
    const auto dx = Target<A>::streamed(c.type, to, c.streams);
    for (int64_t start = begin; start < end; start += kChunk<A>) {
      const int64_t n = std::min(kChunk<A>, end - start);
      gradients(row, start, n, room, A(0), [&](int64_t i, const Pair<A>& dz, const Pair<A>& slope, auto part) {
        dx.store(start - begin + i, dz * slope, part);
      });
    }
  }

  // Calls f(i, dz, dz/dx, part) for the n elements from `begin` on, whose log-probabilities have the gradient `given`. What
  // does not come with p is added first: of a single class it is exactly -a, so that dz is 0.
  template <class F> void gradients(const Row& row, int64_t begin, int64_t n, A* room, A given, F&& f) const {
    const auto logits = logits_of<A>(c, row, begin, n, room);
    const Source<A> weight{kDtypeOf<A>, c.weight ? c.weight + begin * static_cast<int64_t>(sizeof(A)) : nullptr};
    const auto scale = both(logits.scale), top = both(row.largest), log_sum = both(row.log_sum), one = both(A(1));
    const auto da = both(row.a), db = both(row.b), dc = both(row.c);
    const auto least = Vectorized<A>(A(-1e4));  // p is 0 there, and its product with the logarithm too
    sweep<A>(n, [&](int64_t i, auto part) {
      const auto z = logits.in.load(i, part) * scale;
      auto l = z - top - log_sum;
      l = {at::vec::clamp_min(l.a, least), at::vec::clamp_min(l.b, least)};
      auto own = both(given);
      if (c.dc) own = (weight.data ? weight.load(i, part) * dc : dc) + own;
      const auto dz = Pair<A>{Math<A>::exp(l.a), Math<A>::exp(l.b)} * fma(db, l, da) + own;
      auto slope = both(row.scale);
      if (c.softcap != 0) {
        const auto by = both(A(1) / row.cap);
        const auto t = z * by;
        const Vectorized<A> bottom(A(-1));  // of what is left out
        const Pair<A> bounded{at::vec::clamp_min(t.a, bottom), at::vec::clamp_min(t.b, bottom)};
        slope = (one - bounded * bounded) * both(row.scale * row.cap);
      }
      f(i, dz, slope, part);
    });
  }

  void write_id(const Row& row, int64_t k, char* to) const {
    A given_here = 0, room = 0;
    for (int64_t other = 0; other < c.num_ids; ++other)
      if (row.ids[other] == row.ids[k]) given_here += given(row, other);
    const Target<A> dx{c.type, to};
    gradients(row, row.ids[k], 1, &room, given_here,
              [&](int64_t i, const Pair<A>& dz, const Pair<A>& slope, auto part) { dx.store(i, dz * slope, part); });
  }
};

}  // namespace

void token_logprob(const TokenLogprob& c, const RowTask<TokenLogprob>& task) {
  if (c.type == Dtype::kDouble) run_rows(TokenLogprobRows<double>{c}, c, task);
  else run_rows(TokenLogprobRows<float>{c}, c, task);
}

void token_logprob_bwd(const TokenLogprobBackward& c, const RowTask<TokenLogprobBackward>& task) {
  with_type(c.type, [&]<class T>(T*) { run_rows(TokenLogprobGradients<Alike<T>, AccOf<T>>{c}, c, task); });
}

}  // namespace kf::cpu::CPU_CAPABILITY
