// The stages before and after a norm, computed chunk by chunk of a row.
#pragma once

#include <algorithm>

#include "cpu/activation_loops.h"
#include "cpu/chunk.h"
#include "cpu/results.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

template <class A, class F> void each_chunk(int64_t cols, F&& f) {
  for (int64_t start = 0; start < cols; start += kChunk<A>) f(start, std::min(kChunk<A>, cols - start));
}

// A Source or Target from element `start` of a row on. If it is absent, it stays absent.
template <template <class> class Typed, class A> Typed<A> from(Typed<A> x, int64_t start) {
  if (x.data) x.data = element(x.type, x.data, start);
  return x;
}

// Row `row` of a tensor with this layout. Its type is double if A is double, and any other type if A is float.
template <class A> Source<A> row_at(Dtype type, const void* tensor, const RowLayout& rows, int64_t row) {
  return {type, element(type, tensor, row_offset(rows, row))};
}

// Gives `loop` dropout's mask for n elements from `position` on, in `kept`, and the scale of kept elements.
template <class A> void drop(const Stages& s, int64_t position, int64_t n, ChainLoop<A>& loop, MaskOf<A>* kept) {
  if (!s.dropout) return;
  draw_kept<A>(static_cast<uint64_t>(position), s.seed, s.dropout.last(), n, kept);
  loop.kept.data = kept;
  loop.scale = static_cast<A>(s.dropout.scale());
}

// Computes out = gate * dropout(pre_activation(x)) + addend. An absent gate is 1.
template <class A>
void before_norm(const Stages& s, int64_t position, int64_t n, const Source<A>& x, const Source<A>& gate,
                 const Source<A>& addend, const Target<A>& out) {
  ChainLoop<A> loop;
  Chunk<MaskOf<A>> kept;
  Chunk<A> dropped;
  loop.activation = s.pre_activation;
  loop.a = x;
  loop.addend = addend;
  loop.first = out;
  if (gate.data) {
    loop.combine = Combine::kGate;
    loop.b = gate;
    if (s.dropout) {  // dropped before the product: 0 times an infinite gate is NaN
      before_norm<A>(s, position, n, x, {}, {}, {kDtypeOf<A>, dropped});
      loop.activation = 0;
      loop.a = {kDtypeOf<A>, dropped};
      return run_values(loop, n);
    }
  }
  drop(s, position, n, loop, kept);
  run_values(loop, n);
}

// The gate, whose activation is a factor, and whether that factor multiplies the norm's argument (first) or its result (last).
inline const StageRow& factor(const Stages& s) { return s.gate(); }
inline bool factor_is_first(const Stages& s) { return factor(s).data && s.gate_first; }
inline bool factor_is_last(const Stages& s) { return factor(s).data && !s.gate_first; }

template <class A>
ChainLoop<A> factor_loop(const Stages& s, int64_t row, int64_t start, const Source<A>& x, const Target<A>& first) {
  ChainLoop<A> loop;
  loop.combine = Combine::kGate;
  loop.activation = s.gate_activation;
  loop.a = from(row_at<A>(factor(s).type, factor(s).data, factor(s).rows, row), start);
  loop.b = x;
  loop.first = first;
  return loop;
}

// Computes y = x * factor for n columns of a row, from column `start` on.
template <class A>
KF_STAGE void apply_factor(const Stages& s, int64_t row, int64_t start, int64_t n, const Source<A>& x, const Target<A>& y) {
  run_values(factor_loop(s, row, start, x, y), n);
}

// The gradients of that product. Either target may be absent.
template <class A>
KF_STAGE void factor_gradients(const Stages& s, int64_t row, int64_t start, int64_t n, const Source<A>& x, const Source<A>& dy,
                               const Target<A>& dfactor, const Target<A>& dx) {
  ChainLoop<A> loop = factor_loop(s, row, start, x, dfactor);
  loop.dy = dy;
  loop.second = dx;
  run_gradients(loop, n);
}

}  // namespace
}  // namespace kf::cpu::CPU_CAPABILITY
