// CPU softmax over rows, forward and backward, on chunks (cpu/chunk.h). Compiled once per instruction set.
//
// Forward keeps the logits of a row in one buffer of the compute type: read, maximum, exponentials and their sum, write.
// Backward: dx = scale * (dy - sum(dy * y)) * y, in two sweeps. Sums are joined over chunks in double.
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

// Reads the first `kept` logits of a row; returns their maximum, which is NaN if one of them is. The padding is kNothing.
template <class A> A read_logits(const Softmax& c, int64_t row, int64_t kept, A* logits) {
  using V = Vectorized<A>;
  const char* x = c.x + c.x_rows.offset(row) * size_of(c.type);
  const int64_t mask_element = c.mask_kind == MaskKind::kAdd ? size_of(c.mask_type) : 1;
  const char* mask = c.mask_kind == MaskKind::kNone ? nullptr : c.mask + c.mask_rows.offset(row) * mask_element;
  Chunk<A> room;
  V largest(kNothing<A>);
  for (int64_t start = 0; start < kept; start += kChunk<A>) {
    const int64_t n = std::min(kChunk<A>, kept - start);
    A* chunk = logits + start;
    load_chunk<A>(c.type, x + start * size_of(c.type), 1, n, chunk);
    scale_chunk(chunk, c.scale, n);
    mask_chunk<A>(c, mask, start, n, chunk, room);
    for (int64_t i = n; i < padded<A>(n); ++i) chunk[i] = kNothing<A>;
    for (int64_t i = 0; i < n; i += V::size()) largest = at::vec::maximum(largest, V::loadu(chunk + i));
  }
  A lanes[V::size()], result = kNothing<A>;
  largest.store(lanes);
  for (const A lane : lanes) result = lane > result || lane != lane ? lane : result;
  return result;
}

// values = exp(values - largest); returns their sum.
template <class A> double exponentiate(A* values, int64_t n, A largest) {
  using V = Vectorized<A>;
  double total = 0;
  for (int64_t start = 0; start < n; start += kChunk<A>) {
    V sums(0);
    const int64_t stop = std::min(n, start + kChunk<A>);
    for (int64_t i = start; i < stop; i += V::size()) {
      const V e = (V::loadu(values + i) - V(largest)).exp();
      e.store(values + i);
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
  const std::unique_ptr<A[]> logits(new A[padded<A>(c.cols)]);
  for (int64_t row = begin; row < end; ++row) {
    char* y = c.y + row * c.cols * element;
    int64_t kept = c.causal_rows ? std::min(c.cols, row % c.causal_rows + 1) : c.cols;
    const A largest = read_logits(c, row, kept, logits.get());
    if ((c.causal_rows || c.mask_kind != MaskKind::kNone) && largest == kNothing<A>) kept = 0;  // nothing is left
    const double total = exponentiate(logits.get(), kept, largest);
    for (int64_t start = 0; start < kept; start += kChunk<A>) {
      const int64_t n = std::min(kChunk<A>, kept - start);
      scale_chunk(logits.get() + start, 1 / total, n);
      store_chunk<A>(c.type, logits.get() + start, n, y + start * element, 1);
    }
    std::memset(y + kept * element, 0, (c.cols - kept) * element);
  }
}

template <class A> double dot_chunk(const A* a, const A* b, int64_t n) {
  using V = Vectorized<A>;
  V sums(0);
  for (int64_t i = 0; i < n; i += V::size()) sums = at::vec::fmadd(V::loadu(a + i), V::loadu(b + i), sums);
  A lanes[V::size()];
  sums.store(lanes);
  double total = 0;
  for (const A lane : lanes) total += lane;
  return total;
}

template <class A> void softmax_bwd_rows(const SoftmaxBackward& c, int64_t begin, int64_t end) {
  using V = Vectorized<A>;
  const int64_t element = size_of(c.type), dy_element = size_of(c.dy_type);
  Chunk<A> dy, y;
  const auto load = [&](int64_t row, int64_t start, int64_t n) {
    load_chunk<A>(c.dy_type, c.dy + (row * c.cols + start) * dy_element, 1, n, dy);
    load_chunk<A>(c.type, c.y + (row * c.cols + start) * element, 1, n, y);
  };
  for (int64_t row = begin; row < end; ++row) {
    double dot = 0;
    for (int64_t start = 0; start < c.cols; start += kChunk<A>) {
      const int64_t n = std::min(kChunk<A>, c.cols - start);
      load(row, start, n);
      for (int64_t i = n; i < padded<A>(n); ++i) dy[i] = y[i] = 0;
      dot += dot_chunk<A>(dy, y, n);
    }
    const V dots(static_cast<A>(dot)), scales(static_cast<A>(c.scale));
    for (int64_t start = 0; start < c.cols; start += kChunk<A>) {
      const int64_t n = std::min(kChunk<A>, c.cols - start);
      if (c.cols > kChunk<A>) load(row, start, n);  // else the only chunk is still there
      zip_chunk<A>(dy, y, dy, n, [&](auto d, auto p) { return (d - dots) * p * scales; });
      store_chunk<A>(c.type, dy, n, c.dx + (row * c.cols + start) * element, 1);
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
