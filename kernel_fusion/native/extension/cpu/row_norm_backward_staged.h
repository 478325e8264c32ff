// The arithmetic of backward row norms that have stages, or whose tensors have two types.
//
// If the row that was normalised, or the gradient before the activation or the factor, must be computed again, it is put into
// a buffer of the accumulator type. The loops of the norm without stages then read that buffer.
#pragma once

#include <memory>

#include "cpu/row_norm_backward.h"
#include "cpu/row_norm_forward.h"
#include "cpu/row_norm_stages.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

inline bool is_relu(int activation) { return static_cast<Activation>(activation) == Activation::relu; }

// How a call reads h and dz: in place; in place through a relu; or from buffers of the accumulator type, if they must be
// computed again or no loop knows the two types.
struct Reading {
  bool has_u, makes_h, makes_dz;
  Relus relus;
  Dtype x;  // the type in which the loops read h
  explicit Reading(const Backward& c, const BackwardStages& s) {
    const Dtype acc = c.x_type == Dtype::kDouble ? Dtype::kDouble : Dtype::kFloat;
    has_u = !s.has_residual && (s.pre_activation || s.dropout || factor_is_first(s));  // forward kept x instead of h
    // z is computed again from h, which must not pass through a relu on the way. The same holds if z is rounded or gated.
    const bool through_relu = is_relu(s.activation) && (c.dy_type == acc || c.dy_type == c.x_type) && !s.rounds();
    const bool remakes_z = factor_is_last(s) || (s.activation && !through_relu);
    relus.x = has_u && is_relu(s.pre_activation) && !s.dropout && !remakes_z && !s.rounds();
    makes_h = has_u && !relus.x;
    x = makes_h ? acc : c.x_type;
    makes_dz = remakes_z || !(c.dy_type == acc || (c.dy_type == c.x_type && !makes_h));
    relus.z = is_relu(s.activation) && !makes_dz;
  }
};

// Computes h of a row again, in `room`, and prefetches dy, which is read next.
template <class A> const A* make_h(const Backward& c, const BackwardStages& s, int64_t row, A* room) {
  const auto x = row_at<A>(c.x_type, c.x, c.x_rows, row), dy = row_at<A>(c.dy_type, c.dy, c.dy_rows, row);
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    fetch(from(dy, start).data, n * size_of(c.dy_type));
    const Target<A> h{kDtypeOf<A>, room + start};
    if (factor_is_first(s)) apply_factor(s, row, start, n, from(x, start), h);
    else before_norm<A>(s, row * c.cols + start, n, from(x, start), {}, {}, h);
  });
  return room;
}

// The target of a result from element `position` on, or an absent target if the result is not wanted.
template <class A> Target<A> open_at(RowResults& results, Dtype type, void* result, int64_t position) {
  if (!result) return {};
  return results.open<AnyResults<A>>(element(type, result, position)).target;
}

// Computes dz of a row in `room`: the gradient of the norm's result before an activation or factor. Their argument z is
// computed again. The gradient of the factor goes to `dfactors`.
template <class X, class DY>
const AccOf<X>* make_dz(const Backward& c, const BackwardStages& s, const Row<X, DY>& row, int64_t index, AccOf<X>* room,
                        RowResults& dfactors) {
  using A = AccOf<X>;
  const auto dy = row_at<A>(c.dy_type, c.dy, c.dy_rows, index);
  const auto *weight = static_cast<const A*>(c.weight), *bias = row.bias;
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    const Target<A> dz{kDtypeOf<A>, room + start};
    if (!s.activation && !factor_is_last(s)) return load_chunk(dy.type, from(dy, start).data, 1, n, room + start);
    Chunk<A> z;
    if (s.rounds())
      normalize_rounded(s, row.x + start, row.mean, row.rstd, from(weight, start), from(bias, start), n,
                        AnyResults<A>::at(kDtypeOf<A>, z));
    else
      normalize(row.x + start, row.mean, row.rstd, from(weight, start), from(bias, start), n, Results<A>::at(kDtypeOf<A>, z));
    if (factor_is_last(s)) {
      const auto dfactor = open_at<A>(dfactors, factor(s).type, s.dresidual, index * c.cols + start);
      factor_gradients(s, index, start, n, {kDtypeOf<A>, z}, from(dy, start), dfactor, dz);
      return dfactors.close(n);
    }
    ChainLoop<A> loop;
    loop.activation = s.activation;
    loop.a = {kDtypeOf<A>, z};
    loop.dy = from(dy, start);
    loop.first = dz;
    run_gradients(loop, n);
  });
  return room;
}

// Adds a row's part of dweight to a sum, or begins the sum, for norms that round the normalised value.
template <class X, class DY>
void add_dweight(const Backward& c, const BackwardStages& s, const Row<X, DY>& row, bool first, AccOf<X>* sum) {
  using A = AccOf<X>;
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    Chunk<A> rounded;
    normalize_rounded(s, row.x + start, row.mean, row.rstd, nullptr, nullptr, n, AnyResults<A>::at(kDtypeOf<A>, rounded));
    A* const dweight = sum + start;
    sweep<A>(n, [&](int64_t i, auto part) {
      const auto old = first ? both<A>(0) : load_pair(dweight + i, part);
      store_pair(dweight + i, fma(load_pair(row.dy + start + i, part), load_pair(rounded + i, part), old), part);
    });
  });
}

// Adds g * u to dgate (or begins the sum), if dgate is wanted; then multiplies g by the gate.
template <class A> KF_STAGE void through_gate(const A* gate, const A* u, int64_t n, bool first, A* dgate, A* g) {
  sweep<A>(n, [&](int64_t i, auto part) {
    const auto v = load_pair(g + i, part);
    if (dgate) store_pair(dgate + i, fma(v, load_pair(u + i, part), first ? both<A>(0) : load_pair(dgate + i, part)), part);
    store_pair(g + i, v * load_pair(gate + i, part), part);
  });
}

// Receives the gradient of h, and stores it as dresidual and, after dropout and relu, as dx.
template <class T> struct Gradients {
  using A = AccOf<T>;
  Results<T> dresidual, dx;  // without data if not wanted
  A* chunk = nullptr;        // receives the gradient instead of dx, if further steps follow
  const MaskOf<A>* kept = nullptr;
  A scale = 1;
  const T* relu = nullptr;  // the argument of relu, or null

  template <class P> KF_INLINE void put(int64_t i, Pair<A> g, P part) const {
    if (dresidual.target.data) dresidual.put(i, g, part);
    if (chunk) return store_pair(chunk + i, g, part);
    if (!dx.target.data) return;
    if (kept) g = (g * both(scale)) & load_pair(reinterpret_cast<const A*>(kept) + i, part);
    if (relu) g = times_slope<act::relu>(g, load_pair(relu + i, part));
    dx.put(i, g, part);
  }
};

// Computes and stores the gradients of the factor and of x from that of their product.
template <class A>
KF_STAGE void store_factor_gradients(const Backward& c, const BackwardStages& s, int64_t row, int64_t start, int64_t n,
                                     const Source<A>& gradient, RowResults& dfactors, RowResults& dxs) {
  const int64_t position = row * c.cols + start;
  const auto x = from(row_at<A>(s.dx_type, s.x, s.x_rows, row), start);
  const auto dfactor = open_at<A>(dfactors, factor(s).type, s.dresidual, position);
  factor_gradients(s, row, start, n, x, gradient, dfactor, open_at<A>(dxs, s.dx_type, c.dx, position));
  dfactors.close(n);
  dxs.close(n);
}

// The second pass over a row: dresidual, dx, dgate and the gradient of a factor before the norm, as far as they are wanted.
template <class X, class DY>
void store_gradients(const Backward& c, const BackwardStages& s, const Passes& passes, Relus relus, int64_t index,
                     const Row<X, DY>& row, bool first, RowResults& dresiduals, RowResults& dxs) {
  using A = AccOf<X>;
  const bool gated = std::is_same_v<X, A> && factor_is_first(s);
  const A* const gate = static_cast<const A*>(s.residual_gate);
  const bool through_relu = !s.pre_activation || (is_relu(s.pre_activation) && !s.dropout);
  const bool directly = !gated && !gate && s.dx_type == kDtypeOf<X> && through_relu;
  X* const dresidual = factor(s).data ? nullptr : static_cast<X*>(s.dresidual);
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    const int64_t position = index * c.cols + start;
    ChainLoop<A> back;
    Chunk<MaskOf<A>> kept;
    Chunk<A> chunk, u;
    drop(s, position, n, back, kept);
    back.activation = s.pre_activation;
    back.dy.data = chunk;
    const Source<A> x = s.pre_activation || c.dgate ? from(row_at<A>(s.dx_type, s.x, s.x_rows, index), start) : back.dy;
    back.a = s.pre_activation ? x : back.dy;
    Gradients<X> gradients;
    if (dresidual) gradients.dresidual = dresiduals.open<Results<X>>(dresidual + position);
    if (c.dx && directly) {
      gradients.dx = dxs.open<Results<X>>(static_cast<X*>(c.dx) + position);
      gradients.scale = back.scale;
      if (s.dropout) gradients.kept = kept;
      if (s.pre_activation) gradients.relu = static_cast<const X*>(back.a.data);
    } else if (c.dx || gated || c.dgate) {
      gradients.chunk = chunk;
    }
    write_dx(c, passes, relus, row, weight_of<X>(c), start, start + n, gradients);
    if (dresidual) dresiduals.close(n);
    if (gated) return store_factor_gradients(c, s, index, start, n, back.dy, dresiduals, dxs);
    A* const dgate = c.dgate ? static_cast<A*>(c.dgate) + start : nullptr;
    if (dgate) before_norm<A>(s, position, n, x, {}, {}, {kDtypeOf<A>, u});
    if (gate && gradients.chunk) through_gate<A>(gate + start, u, n, first, dgate, chunk);
    if (!c.dx) return;
    if (!directly) {
      back.first = open_at<A>(dxs, s.dx_type, c.dx, position);
      run_gradients(back, n);
    }
    dxs.close(n);
  });
}

// Points the parameters and their sums at the group whose elements begin at `column`.
template <class A>
void go_to_group(Backward& c, BackwardStages& s, const Backward& all, const BackwardStages& all_stages, int64_t column) {
  c.weight = from(static_cast<const A*>(all.weight), column);
  if (c.dweight) c.dweight = static_cast<A*>(all.dweight) + column;
  if (c.dbias) c.dbias = static_cast<A*>(all.dbias) + column;
  if (c.dgate) c.dgate = static_cast<A*>(all.dgate) + column;
  s.residual_gate = from(static_cast<const A*>(all_stages.residual_gate), column);
}

// Computes h and dz of a row again, if `reading` says so, in `room`, which moves on by as much as they take.
template <class X, class DY>
void complete(const Backward& c, const BackwardStages& s, const Reading& reading, int64_t index, Row<X, DY>& row,
              AccOf<X>*& room, RowResults& dfactors) {
  using A = AccOf<X>;
  if constexpr (std::is_same_v<X, A>)
    if (reading.makes_h) {
      row.x = make_h(c, s, index, room);
      row.next_x = 0;
      room += c.cols;
    }
  if constexpr (std::is_same_v<DY, A>)
    if (reading.makes_dz) {
      row.dy = make_dz(c, s, row, index, room, dfactors);
      row.next_dy = 0;
      room += c.cols;
    }
}

// Both passes over samples [begin, end), each of `groups` rows. X and DY are the types in which the loops read h and dz.
template <class X, class DY>
void backward_staged_rows(const Backward& c, const BackwardStages& s, const Reading& reading, int64_t begin, int64_t end) {
  using A = AccOf<X>;
  const Passes passes(c, c.cols, sizeof(X));
  const bool completes = reading.makes_h || reading.makes_dz;
  const int together = completes ? 2 : passes.together;
  const int64_t groups = c.groups;
  const std::unique_ptr<A[]> buffer(new A[(reading.makes_h + reading.makes_dz) * together * c.cols]);
  Row<X, DY> rows[Passes::kMostRowsTogether];
  RowResults dresiduals(factor(s).data ? factor(s).type : c.x_type, s.dresidual, c.cols, c.streams);
  RowResults dxs(s.dx_type, c.dx, c.cols, c.streams);
  const bool adds_dweight = s.rounds() && c.dweight, is_stored = c.dx || c.dgate || (s.dresidual && !factor_is_last(s));
  ColumnSums<A> sums(c);
  Backward of_group = c;
  BackwardStages stages_of_group = s;
  if (adds_dweight) of_group.dweight = nullptr;
  for (int64_t first = begin; first < end; first += together) {
    const int count = static_cast<int>(std::min<int64_t>(together, end - first));
    const bool anew = sums.begin_anew(first - begin);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t index = first * groups + group, column = group * c.cols;
      if (groups > 1) go_to_group<A>(of_group, stages_of_group, c, s, column);
      A* room = buffer.get();
      for (int r = 0; r < count; ++r) {
        const int64_t row = index + r * groups;
        rows[r] = row_of<X, DY>(c, row, first + r + together < end ? row + together * groups : row);
        rows[r].bias = from(static_cast<const A*>(s.bias), column);
        if (completes) complete(of_group, s, reading, row, rows[r], room, dresiduals);
      }
      add_together(of_group, passes, reading.relus, rows, count, anew);
      for (int r = 0; adds_dweight && r < count; ++r)
        add_dweight(of_group, s, rows[r], anew && r == 0, static_cast<A*>(c.dweight) + column);
      for (int r = 0; is_stored && r < count; ++r)
        store_gradients(of_group, stages_of_group, passes, reading.relus, index + r * groups, rows[r], anew && r == 0,
                        dresiduals, dxs);
    }
  }
  sums.finish();
}

// Chooses the loops by the type of dz. X is the type in which they read h.
template <class X>
void backward_staged_as(const Backward& c, const BackwardStages& s, const Reading& reading, int64_t begin, int64_t end) {
  if constexpr (sizeof(X) == 2)
    if (!reading.makes_dz && c.dy_type == c.x_type) return backward_staged_rows<X, X>(c, s, reading, begin, end);
  backward_staged_rows<X, AccOf<X>>(c, s, reading, begin, end);
}

}  // namespace

// The kernel for fp16 and fp64. It stands in a file of its own, because it takes half of the compile time.
RowNormBackwardStaged backward_staged_fp16_fp64;

}  // namespace kf::cpu::CPU_CAPABILITY
