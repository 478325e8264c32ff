// CPU softmax over rows, forward and backward. Compiled once per instruction set.
//
// Forward sweeps over a row three times: for the largest logit, for the exponentials and their sum, and for the quotients. The
// exponentials lie in y or, if y has another type, in a buffer. Backward computes dx = scale * (dy - sum(dy * y)) * y in two
// sweeps. The sums of chunks are joined in double.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "cpu/activation_loops.h"
#include "cpu/chunk.h"
#include "cpu/kernels.h"
#include "cpu/sums.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

template <class A> inline constexpr A kNothing = -std::numeric_limits<A>::infinity();

// Writes the masked logits of a chunk to `logits`.
template <class A>
void masked_chunk(const Softmax& c, const char* x, const char* mask, int64_t start, int64_t n, A* logits, A* room) {
  load_chunk<A>(c.type, x + start * size_of(c.type), 1, n, logits);
  const A scale = static_cast<A>(c.scale);
  if (c.mask_type != Dtype::kBool) {
    load_chunk<A>(c.mask_type, mask + start * c.mask_stride * size_of(c.mask_type), c.mask_stride, n, room);
    for (int64_t i = 0; i < n; ++i) logits[i] = logits[i] * scale + room[i];
  } else {
    const char* keep = mask + start * c.mask_stride;
    for (int64_t i = 0; i < n; ++i) logits[i] = keep[i * c.mask_stride] ? logits[i] * scale : kNothing<A>;
  }
}

// A row's logits: the elements of `in` times `scale`.
template <class A> struct Logits {
  Source<A> in;
  A scale;

  // Calls f(i, pair) for the pairs of [begin, end). The last pair is filled up with kNothing.
  template <class F> KF_INLINE void each_pair(int64_t begin, int64_t end, F&& f) const {
    constexpr int64_t kStep = Pair<A>::kStep;
    const auto factor = both(scale);
    int64_t i = begin;
    for (; i + kStep <= end; i += kStep) f(i, in.load(i) * factor);
    if (i < end) f(i, then_nothing(in.load(i, Part{end - i}) * factor, end - i));
  }

  [[gnu::noinline]] static Pair<A> then_nothing(const Pair<A>& x, int64_t count) {
    A lanes[Pair<A>::kStep];
    store_pair(lanes, x);
    std::fill(lanes + count, std::end(lanes), kNothing<A>);
    return load_pair(lanes);
  }
};

// The first `kept` logits of a row: where they lie or, if there is a mask, in `room`.
template <class A> Logits<A> read_logits(const Softmax& c, int64_t row, int64_t kept, A* room) {
  const char* x = c.x + row_offset(c.x_rows, row) * size_of(c.type);
  if (c.mask_type == Dtype::kAbsent) return {{c.type, x}, static_cast<A>(c.scale)};
  const char* mask = c.mask + row_offset(c.mask_rows, row) * (c.mask_type == Dtype::kBool ? 1 : size_of(c.mask_type));
  Chunk<A> masks;
  for (int64_t start = 0; start < kept; start += kChunk<A>)
    masked_chunk<A>(c, x, mask, start, std::min(kChunk<A>, kept - start), room + start, masks);
  return {{kDtypeOf<A>, room}, A(1)};
}

// The largest logit, or NaN if there is one.
template <class A> A largest_of(const Logits<A>& logits, int64_t n) {
  auto largest = both(kNothing<A>);
  logits.each_pair(
      0, n, [&](int64_t, const Pair<A>& x) { largest = {at::vec::maximum(largest.a, x.a), at::vec::maximum(largest.b, x.b)}; });
  A lanes[Pair<A>::kStep], result = kNothing<A>;
  store_pair(lanes, largest);
  for (const A lane : lanes) result = lane > result || lane != lane ? lane : result;
  return result;
}

// Writes exp(logits - largest) to `out`, rounded up to whole pairs, and returns the sum.
template <class A> double exponentiate(const Logits<A>& logits, int64_t n, A largest, A* out) {
  const auto top = both(largest);
  double sum = 0;
  for (int64_t start = 0; start < n; start += kChunk<A>) {
    auto sums = both<A>(0);
    logits.each_pair(start, std::min(n, start + kChunk<A>), [&](int64_t i, const Pair<A>& x) {
      const auto d = x - top;
      const Pair<A> e{Math<A>::exp(d.a), Math<A>::exp(d.b)};
      store_pair(out + i, e);
      sums = sums + e;
    });
    sum += total(sums);
  }
  return sum;
}

template <class A> void softmax_rows(const Softmax& c, int64_t begin, int64_t end) {
  const int64_t element = size_of(c.type);
  const bool in_place = c.type == kDtypeOf<A> && c.cols % Pair<A>::kStep == 0;
  const std::unique_ptr<A[]> buffer(new A[whole_pairs<A>(c.cols)]);
  ChainLoop<A> quotients;
  for (int64_t row = begin; row < end; ++row) {
    char* y = c.y + row * c.cols * element;
    A* exponentials = in_place ? reinterpret_cast<A*>(y) : buffer.get();
    int64_t kept = c.causal_rows ? std::min(c.cols, row % c.causal_rows + 1) : c.cols;
    const auto logits = read_logits(c, row, kept, exponentials);
    const A largest = largest_of(logits, kept);
    if ((c.causal_rows || c.mask_type != Dtype::kAbsent) && largest == kNothing<A>) kept = 0;  // the row is fully masked
    const double sum = exponentiate(logits, kept, largest, exponentials);
    quotients.scale = static_cast<A>(1 / sum);
    quotients.a.data = exponentials;
    quotients.first = {c.type, y};
    run_values(quotients, kept);
    std::memset(y + kept * element, 0, (c.cols - kept) * element);
    if (sum != sum && c.mask_type == Dtype::kBool) {  // all results are NaN, except those that the mask leaves out
      const char* keep = c.mask + row_offset(c.mask_rows, row);
      for (int64_t i = 0; i < kept; ++i)
        if (!keep[i * c.mask_stride]) std::memset(y + i * element, 0, element);
    }
  }
}

template <class T, class A> double dot(const Source<A>& dy, const Source<A>& y, int64_t begin, int64_t end) {
  const auto [sum] = sums_over<A, 1>(end - begin, [&](int64_t i, auto& sums, auto part) {
    sums[0] = fma(dy.template load<T>(begin + i, part), y.template load<T>(begin + i, part), sums[0]);
  });
  return sum;
}

// Sets dx to 0 where y is 0.
template <class A> void zero_where_left_out(const SoftmaxBackward& c, const char* y, char* dx) {
  const int64_t element = size_of(c.type);
  Chunk<A> values;
  for (int64_t start = 0; start < c.cols; start += kChunk<A>) {
    const int64_t n = std::min(kChunk<A>, c.cols - start);
    load_chunk<A>(c.type, y + start * element, 1, n, values);
    for (int64_t i = 0; i < n; ++i)
      if (values[i] == 0) std::memset(dx + (start + i) * element, 0, element);
  }
}

// Backward of rows [begin, end). T is the type of dy and y, or AnyType if they have two types.
template <class T, class A> void softmax_bwd_rows(const SoftmaxBackward& c, int64_t begin, int64_t end) {
  constexpr int64_t kStep = Pair<A>::kStep;
  const int64_t element = size_of(c.type), dy_element = size_of(c.dy_type);
  for (int64_t row = begin; row < end; ++row) {
    const Source<A> dy{c.dy_type, c.dy + row * c.cols * dy_element}, y{c.type, c.y + row * c.cols * element};
    const auto dx = Target<A>::streamed(c.type, c.dx + row * c.cols * element, c.streams);
    double sum = 0;
    for (int64_t start = 0; start < c.cols; start += kChunk<A>)
      sum += dot<T>(dy, y, start, std::min(c.cols, start + kChunk<A>));
    const auto sums = both(static_cast<A>(sum)), scales = both(static_cast<A>(c.scale));
    const auto gradient = [&](const Pair<A>& d, const Pair<A>& p) { return (d - sums) * p * scales; };
    sweep<A>(c.cols, [&](int64_t i, auto part) {
      if (c.streams)  // fetch the next row from memory
        for (int64_t line = 0; line < kStep; line += 64 / element) {
          __builtin_prefetch(static_cast<const char*>(dy.data) + (i + line + c.cols) * dy_element);
          __builtin_prefetch(static_cast<const char*>(y.data) + (i + line + c.cols) * element);
        }
      dx.template store<T>(i, gradient(dy.template load<T>(i, part), y.template load<T>(i, part)), part);
    });
    constexpr A kHarmless = std::numeric_limits<A>::max() * std::numeric_limits<A>::epsilon() / 4;
    if (c.leaves_out && !(std::fabs(sum) < kHarmless)) {  // otherwise d - sums is finite, and its product with 0 is 0
      if (c.streams) finish_streams();
      zero_where_left_out<A>(c, static_cast<const char*>(y.data), c.dx + row * c.cols * element);
    }
  }
  if (c.streams) finish_streams();
}

}  // namespace

void softmax(const Softmax& c, int64_t begin, int64_t end) {
  (c.type == Dtype::kDouble ? softmax_rows<double> : softmax_rows<float>)(c, begin, end);
}

void softmax_bwd(const SoftmaxBackward& c, int64_t begin, int64_t end) {
  if (c.dy_type != c.type) return softmax_bwd_rows<AnyType, float>(c, begin, end);  // never of double with others
  with_type(c.type, [&]<class T>(T*) { softmax_bwd_rows<Alike<T>, AccOf<T>>(c, begin, end); });
}

}  // namespace kf::cpu::CPU_CAPABILITY
