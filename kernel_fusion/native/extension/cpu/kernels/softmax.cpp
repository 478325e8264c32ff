// CPU softmax over rows, forward and backward, on chunks (cpu/chunk.h). Compiled once per instruction set.
//
// Forward: the logits of a row and their maximum, the exponentials and their sum, the quotients; in y itself, or in a buffer where
// that is of another type. Backward: dx = scale * (dy - sum(dy * y)) * y, in two sweeps. Sums are joined over chunks in double.
#include <limits>
#include <memory>

#include "cpu/chunk.h"
#include "cpu/kernels.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

using at::vec::Vectorized;

template <class A> inline constexpr A kNothing = -std::numeric_limits<A>::infinity();

template <class A> inline void mask_chunk(const Softmax& c, const char* mask, int64_t start, int64_t n, A* logits, A* room) {
  if (c.mask_kind == MaskKind::kAdd) {
    load_chunk<A>(c.mask_type, mask + start * c.mask_stride * size_of(c.mask_type), c.mask_stride, n, room);
    add_chunk<A>(logits, room, logits, n);
  } else if (c.mask_kind == MaskKind::kKeep) {
    const char* keep = mask + start * c.mask_stride;
    for (int64_t i = 0; i < n; ++i) logits[i] = keep[i * c.mask_stride] ? logits[i] : kNothing<A>;
  }
}

// The first `kept` logits of a row, in `room` or where they lie, with their maximum, which is NaN if one of them is. In `room` the
// padding is kNothing.
template <class A> std::pair<const A*, A> read_logits(const Softmax& c, int64_t row, int64_t kept, A* room) {
  using V = Vectorized<A>;
  const char* x = c.x + c.x_rows.offset(row) * size_of(c.type);
  const int64_t mask_element = c.mask_kind == MaskKind::kAdd ? size_of(c.mask_type) : 1;
  const char* mask = c.mask_kind == MaskKind::kNone ? nullptr : c.mask + c.mask_rows.offset(row) * mask_element;
  const bool there = is_chunk<A>(c.type, 1, kept) && !mask && c.scale == 1.0;
  const A* logits = there ? reinterpret_cast<const A*>(x) : room;
  Chunk<A> masks;
  V first(kNothing<A>), second(kNothing<A>);
  for (int64_t start = 0; start < kept; start += kChunk<A>) {
    const int64_t n = std::min(kChunk<A>, kept - start), stop = start + padded<A>(n);
    if (!there) {
      A* chunk = room + start;
      load_chunk<A>(c.type, x + start * size_of(c.type), 1, n, chunk);
      scale_chunk(chunk, c.scale, n);
      mask_chunk<A>(c, mask, start, n, chunk, masks);
      std::fill(chunk + n, room + stop, kNothing<A>);
    }
    int64_t i = start;
    for (; i + 2 * V::size() <= stop; i += 2 * V::size()) {
      first = at::vec::maximum(first, V::loadu(logits + i));
      second = at::vec::maximum(second, V::loadu(logits + i + V::size()));
    }
    if (i < stop) first = at::vec::maximum(first, V::loadu(logits + i));
  }
  A lanes[V::size()], largest = kNothing<A>;
  at::vec::maximum(first, second).store(lanes);
  for (const A lane : lanes) largest = lane > largest || lane != lane ? lane : largest;
  return {logits, largest};
}

// out = exp(in - largest), which may be in place; returns the sum.
template <class A> double exponentiate(const A* in, int64_t n, A largest, A* out) {
  using V = Vectorized<A>;
  const V top(largest);
  double total = 0;
  for (int64_t start = 0; start < n; start += kChunk<A>) {
    V sums(0);
    const int64_t stop = std::min(n, start + kChunk<A>);
    for (int64_t i = start; i < stop; i += V::size()) {
      const V e = Math<A>::exp(V::loadu(in + i) - top);
      e.store(out + i);
      sums = sums + e;
    }
    A lanes[V::size()];
    sums.store(lanes);
    for (const A lane : lanes) total += lane;
  }
  return total;
}

template <class A> void softmax_rows(const Softmax& c, int64_t begin, int64_t end) {
  const int64_t element = size_of(c.type);
  const bool in_place = is_chunk<A>(c.type, 1, c.cols);
  const std::unique_ptr<A[]> buffer(new A[padded<A>(c.cols)]);
  for (int64_t row = begin; row < end; ++row) {
    char* y = c.y + row * c.cols * element;
    A* result = in_place ? reinterpret_cast<A*>(y) : buffer.get();
    int64_t kept = c.causal_rows ? std::min(c.cols, row % c.causal_rows + 1) : c.cols;
    const auto [logits, largest] = read_logits(c, row, kept, result);
    if ((c.causal_rows || c.mask_kind != MaskKind::kNone) && largest == kNothing<A>) kept = 0;  // nothing is left
    const double total = exponentiate(logits, kept, largest, result);
    for (int64_t start = 0; start < kept; start += kChunk<A>) {
      const int64_t n = std::min(kChunk<A>, kept - start);
      scale_chunk(result + start, 1 / total, n);
      store_chunk<A>(c.type, result + start, n, y + start * element, 1);
    }
    std::memset(y + kept * element, 0, (c.cols - kept) * element);
  }
}

template <class A> double dot_chunk(const A* a, const A* b, int64_t n) {
  using V = Vectorized<A>;
  constexpr int64_t kStep = V::size();
  V first(0), second(0);
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    first = at::vec::fmadd(V::loadu(a + i), V::loadu(b + i), first);
    second = at::vec::fmadd(V::loadu(a + i + kStep), V::loadu(b + i + kStep), second);
  }
  for (; i < n; i += kStep) first = at::vec::fmadd(V::loadu(a + i), V::loadu(b + i), first);
  A lanes[kStep];
  (first + second).store(lanes);
  double total = 0;
  for (const A lane : lanes) total += lane;
  return total;
}

template <class A> void softmax_bwd_rows(const SoftmaxBackward& c, int64_t begin, int64_t end) {
  using V = Vectorized<A>;
  const int64_t element = size_of(c.type), dy_element = size_of(c.dy_type);
  Chunk<A> first, second, third;
  const auto read = [&](int64_t row, int64_t start, int64_t n) {
    const int64_t at = row * c.cols + start;
    return std::pair(read_chunk<A>(c.dy_type, c.dy + at * dy_element, 1, n, first),
                     read_chunk<A>(c.type, c.y + at * element, 1, n, second));
  };
  for (int64_t row = begin; row < end; ++row) {
    double dot = 0;
    for (int64_t start = 0; start < c.cols; start += kChunk<A>) {
      const int64_t n = std::min(kChunk<A>, c.cols - start), rest = padded<A>(n) - n;
      const auto [dy, y] = read(row, start, n);
      std::fill_n(first + n, rest, A(0));
      std::fill_n(second + n, rest, A(0));
      dot += dot_chunk<A>(dy, y, n);
    }
    const V dots(static_cast<A>(dot)), scales(static_cast<A>(c.scale));
    for (int64_t start = 0; start < c.cols; start += kChunk<A>) {
      const int64_t n = std::min(kChunk<A>, c.cols - start);
      const auto [dy, y] = read(row, start, n);
      char* out = c.dx + (row * c.cols + start) * element;
      A* dx = write_chunk<A>(c.type, out, 1, n, third);
      zip_chunk<A>(dy, y, dx, n, [&](auto d, auto p) { return (d - dots) * p * scales; });
      store_chunk<A>(c.type, dx, n, out, 1);
    }
  }
}

}  // namespace

void softmax(const Softmax& c, int64_t begin, int64_t end) {
  (c.type == Dtype::kDouble ? softmax_rows<double> : softmax_rows<float>)(c, begin, end);
}

void softmax_bwd(const SoftmaxBackward& c, int64_t begin, int64_t end) {
  (c.type == Dtype::kDouble ? softmax_bwd_rows<double> : softmax_bwd_rows<float>)(c, begin, end);
}

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
