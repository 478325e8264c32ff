// CPU row norm with stages around it, forward and backward. Compiled once per instruction set (-DCPU_CAPABILITY=...).
//
// A row is first brought, chunk by chunk (cpu/activation_loops.h), to the accumulator type in a buffer, unless it lies in memory like that,
// and the code of the bare norm finds it there.
// Each direction is a unit of its own (KF_FORWARD, KF_BACKWARD; native/build.py), lest one take too long.
#include <memory>

#include "cpu/activation_loops.h"
#include "cpu/chunk.h"
#include "cpu/row_norm.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

// `with_type` for the types that go with accumulators A.
template <class A, class F> void with_acc(Dtype dtype, F&& f) {
  with_type(dtype, [&](auto* type) {
    if constexpr (std::is_same_v<AccOf<std::remove_pointer_t<decltype(type)>>, A>) f(type);
  });
}

template <class A, class F> void each_chunk(int64_t cols, F&& f) {
  for (int64_t start = 0; start < cols; start += kChunk<A>) f(start, std::min(kChunk<A>, cols - start));
}

// What begins `start` elements later; of what is absent, nothing.
template <class A> Source<A> from(Source<A> x, int64_t start) {
  if (x.data) x.data = element(x.type, x.data, start);
  return x;
}
template <class A> Target<A> from(Target<A> x, int64_t start) {
  if (x.data) x.data = element(x.type, x.data, start);
  return x;
}

// A strided row of any dtype from `start` on; of A = double, doubles alone.
template <class A> Source<A> row_at(Dtype type, const void* tensor, const RowLayout& rows, int64_t row, int64_t start) {
  return {type, element(type, tensor, row_offset(rows, row) + start)};
}

// Dropout of elements that begin at `position`, with the scale of those that are kept.
template <class A> void drop(const Stages& s, int64_t position, int64_t n, ChainLoop<A>& loop, MaskOf<A>* kept) {
  if (!s.dropout) return;
  draw_kept<A>(static_cast<uint64_t>(position), s.seed, s.dropout.last(), n, kept);
  loop.kept.data = kept;
  loop.scale = static_cast<A>(s.dropout.scale());
}

// out = dropout(pre_activation(x)) + addend of a chunk.
template <class A>
void before_norm(const Stages& s, int64_t position, int64_t n, const Source<A>& x, const Source<A>& addend, const Target<A>& out) {
  ChainLoop<A> loop;
  Chunk<MaskOf<A>> kept;
  loop.activation = s.pre_activation;
  loop.a = x;
  loop.addend = addend;
  loop.first = out;
  drop(s, position, n, loop, kept);
  run_values(loop, n);
}

// What is normalised, a row of it: h = residual + u, rounded to the residual's dtype and stored there, or u where there is no
// residual. Where it lies already, or in `room`.
template <class A> Source<A> make_h(const Forward& c, const ForwardStages& s, int64_t row, A* room) {
  const auto x = row_at<A>(c.x_type, c.x, c.x_rows, row, 0);
  if (!s.residual && !s.pre_activation && !s.dropout) return x;
  const int64_t first = row * c.cols;
  const Target<A> h = s.residual ? Target<A>{s.residual_type, element(s.residual_type, s.h, first)} : Target<A>{kDtypeOf<A>, room};
  const Source<A> residual = s.residual ? row_at<A>(s.residual_type, s.residual, s.residual_rows, row, 0) : Source<A>{};
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    before_norm(s, first + start, n, from(x, start), from(residual, start), from(h, start));
  });
  return {h.type, h.data};
}

template <class A, class X>
void finish_row(const Forward& c, const ForwardStages& s, int64_t row, const X* h) {
  A mean, rstd;
  statistics(c, &h, row, 1, &mean, &rstd);
  const auto *weight = static_cast<const A*>(c.weight.data), *bias = static_cast<const A*>(c.bias.data);
  char* y = element(c.y_type, c.y, row * c.cols);
  if (!s.activation)
    return with_acc<A>(c.y_type, [&](auto* type) {
      normalize(h, mean, rstd, weight, bias, c.cols, Results(reinterpret_cast<decltype(type)>(y), c.streams));
    });
  Chunk<A> z;
  ChainLoop<A> activate;
  activate.activation = s.activation;
  activate.to_bf16 = c.y_type == Dtype::kBFloat16;
  activate.a.data = z;
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    normalize(h + start, mean, rstd, from(weight, start), from(bias, start), n, Results(z.values));
    activate.first = Target<A>::streamed(c.y_type, element(c.y_type, y, start), c.streams);
    run_values(activate, n);
  });
}

template <class A> void forward_staged_rows(const Forward& c, const ForwardStages& s, int64_t begin, int64_t end) {
  const std::unique_ptr<A[]> buffer(new A[c.cols]);
  for (int64_t row = begin; row < end; ++row) {
    const Source<A> h = make_h(c, s, row, buffer.get());
    with_acc<A>(h.type, [&](auto* type) {
      using X = std::remove_pointer_t<decltype(type)>;
      finish_row<A>(c, s, row, static_cast<const X*>(h.data));
    });
  }
  if (c.streams) finish_streams();
}

template <class F, class A> KF_INLINE Vectorized<A> times_slope(const Vectorized<A>& g, const Vectorized<A>& z) {
  return act::times_slope<F, Math<A>>(g, z);
}

// Elements T of x, of which the norm takes F.
template <class F, class T> struct Activated {
  T value;
};
template <class X> inline constexpr bool kActivated = false;
template <class F, class T> inline constexpr bool kActivated<Activated<F, T>> = true;
template <class F, class T> KF_INLINE auto load_pair(const Activated<F, T>* p) { return value_of<F>(load_pair(&p->value)); }
template <class F, class T> KF_INLINE auto load_pair(const Activated<F, T>* p, Part part) {
  return value_of<F>(load_pair(&p->value, part));
}

// dx from the gradient of what such a row is for the norm.
template <class F, class T> struct BeforeActivated {
  Results<T> dx;
  const T* x;
  template <class P> KF_INLINE void put(int64_t i, const Pair<AccOf<T>>& g, P part) const {
    dx.put(i, times_slope<F>(g, load_pair(x + i, part)), part);
  }
};

// Elements T of dy, which arrives behind F.
template <class F, class T> struct Behind {
  using Activation = F;
  T value;
  template <class V> static KF_INLINE V dz(const V& dy, const V& z) { return times_slope<F>(dy, z); }
};
template <class F, class T> KF_INLINE auto load_pair(const Behind<F, T>* p) { return load_pair(&p->value); }
template <class F, class T> KF_INLINE auto load_pair(const Behind<F, T>* p, Part part) { return load_pair(&p->value, part); }

// Whether backward makes h, what was normalised, again: it was kept nowhere.
inline bool makes_h(const BackwardStages& s) { return !s.has_residual && (s.pre_activation || s.dropout); }

// h of a row, from the input. dy, which is read next, is fetched meanwhile: gelu, then norm of 4096 x 768 bf16 takes 2.9 ms instead
// of 3.3 (EPYC with AVX-512, 1 thread).
template <class A> const A* make_h(const Backward& c, const BackwardStages& s, int64_t row, A* room) {
  const auto x = row_at<A>(c.x_type, c.x, c.x_rows, row, 0);
  const auto dy = row_at<A>(c.dy_type, c.dy, c.dy_rows, row, 0);
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    fetch(from(dy, start).data, n * size_of(c.dy_type));
    before_norm<A>(s, row * c.cols + start, n, from(x, start), {}, {kDtypeOf<A>, room + start});
  });
  return room;
}

// dz, the gradient of a row before the activation, whose argument is computed again.
template <class X, class A>
const A* make_dz(const Backward& c, const BackwardStages& s, const Row<X, A>& row, const Source<A>& dy, A* room) {
  const auto *weight = static_cast<const A*>(c.weight), *bias = static_cast<const A*>(s.bias);
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    Chunk<A> z;
    normalize(row.x + start, row.mean, row.rstd, from(weight, start), from(bias, start), n, Results(z.values));
    ChainLoop<A> loop;
    loop.activation = s.activation;
    loop.a.data = z;
    loop.dy = from(dy, start);
    loop.first.data = room + start;
    run_gradients(loop, n);
  });
  return room;
}

// dx from the gradient of what dropout leaves.
template <class T> struct BeforeDropout {
  using A = AccOf<T>;
  Results<T> dx;
  const MaskOf<A>* kept;
  A scale;
  template <class P> KF_INLINE void put(int64_t i, const Pair<A>& g, P part) const {
    dx.put(i, (g * both(scale)) & load_pair(reinterpret_cast<const A*>(kept) + i, part), part);
  }
};

// The gradient with respect to h, which is dresidual; back through dropout and pre-activation, dx.
template <class X, class DY>
void store_gradients(const Backward& c, const BackwardStages& s, int64_t index, const Row<X, DY>& row) {
  using A = AccOf<X>;
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    const int64_t position = index * c.cols + start;
    const auto dresidual = [&] { return Results<X>(static_cast<X*>(s.dresidual) + position, c.streams); };
    const auto write = [&](const auto& result) {
      if (s.dresidual) write_dx(c, row, start, start + n, result, dresidual());
      else write_dx(c, row, start, start + n, result);
    };
    if (!c.dx) return write_dx(c, row, start, start + n, dresidual());
    ChainLoop<A> back;
    Chunk<MaskOf<A>> kept;
    drop(s, position, n, back, kept);
    if (s.dropout && !s.pre_activation && s.dx_type == c.x_type)
      return write(BeforeDropout<X>{Results<X>(static_cast<X*>(c.dx) + position, c.streams), kept, back.scale});
    Chunk<A> dh;
    write(Results<A>(dh));
    back.activation = s.pre_activation;
    back.dy.data = dh;
    back.a = s.pre_activation ? row_at<A>(s.dx_type, s.x, s.x_rows, index, start) : back.dy;
    back.first = Target<A>::streamed(s.dx_type, element(s.dx_type, c.dx, position), c.streams);
    run_gradients(back, n);
  });
}

template <class F, class T, class DY>
void store_gradients(const Backward& c, const BackwardStages&, int64_t index, const Row<Activated<F, T>, DY>& row) {
  const Results<T> dx(static_cast<T*>(c.dx) + index * c.cols, c.streams);
  write_dx(c, row, 0, c.cols, BeforeActivated<F, T>{dx, &row.x->value});
}

// The kernel of the bare norm, on rows as they lie in memory, X and DY, but h or dz where they have to be made again: these take
// buffers. It writes dx itself where nothing comes before it. 2048 x 2048 bf16 with residual and dropout takes 2.4 ms; with all in
// buffers it took 4.9 (EPYC with AVX-512, 1 thread).
template <class X, class DY> void backward_staged_rows(const Backward& c, const BackwardStages& s, int64_t begin, int64_t end) {
  using A = AccOf<X>;
  const bool h = makes_h(s) && !kActivated<X>, dz = s.activation && !kBehind<DY>;
  const bool writes_dx = !s.pre_activation && !s.dropout && !s.dresidual && s.dx_type == c.x_type;
  Backward norm = c;
  if (!writes_dx) norm.dx = nullptr;
  const int together = h || dz ? 2 : rows_together<X>(c);  // with half the buffers, one row at a time took as long
  const auto* bias = static_cast<const A*>(s.bias);
  const std::unique_ptr<A[]> buffer(new A[(h + dz) * together * c.cols]);
  Row<X, DY> rows[8];
  RowResults<X> results(norm.dx, c.cols, c.streams);
  ColumnSums<A> sums(c);
  for (int64_t first = begin; first < end; first += together) {
    const int count = static_cast<int>(std::min<int64_t>(together, end - first));
    A* room = buffer.get();
    for (int r = 0; r < count; ++r) {
      const int64_t index = first + r, next = index + together;
      auto& row = rows[r] = row_of<X, DY>(norm, index, next < end ? next : index);
      if constexpr (std::is_same_v<X, A>)
        if (h) {
          row.x = make_h(c, s, index, room);
          row.next_x = 0;
          room += c.cols;
        }
      if constexpr (std::is_same_v<DY, A>)
        if (dz) {
          row.dy = make_dz(c, s, row, row_at<A>(c.dy_type, c.dy, c.dy_rows, index, 0), room);
          row.next_dy = 0;
          room += c.cols;
        }
      if (kBehind<DY>) row.bias = bias;
    }
    const bool anew = sums.begin_anew(first - begin);
    if constexpr (kActivated<X>) add_together(norm, rows, count, anew);
    else backward_together(norm, rows, count, anew, results);
    for (int r = 0; !writes_dx && (c.dx || s.dresidual) && r < count; ++r) store_gradients(c, s, first + r, rows[r]);
  }
  sums.finish();
  if (c.streams) finish_streams();
}

}  // namespace

#ifdef KF_FORWARD
void forward_staged(const Forward& c, const ForwardStages& s, int64_t begin, int64_t end) {
  if (c.x_type == Dtype::kDouble) forward_staged_rows<double>(c, s, begin, end);
  else forward_staged_rows<float>(c, s, begin, end);
}
#endif

#ifdef KF_BACKWARD
void backward_staged(const Backward& c, const BackwardStages& s, int64_t begin, int64_t end) {
  const auto is_relu = [](int activation) { return static_cast<Activation>(activation) == Activation::relu; };
  const Dtype made = c.x_type == Dtype::kDouble ? Dtype::kDouble : Dtype::kFloat;
  // relu, as rows are read: 2048 x 2048 bf16 takes 1.5 ms with it before the norm and 1.8 behind it, in buffers 3.8 and 2.9 (EPYC
  // with AVX-512, 1 thread). With AVX2, behind it, bf16 of 700 x 3000 takes 1.4 instead of 1.2: there are not registers enough.
  const bool on_load = c.x_type == c.dy_type && made == Dtype::kFloat;
  if (on_load && makes_h(s) && is_relu(s.pre_activation) && !s.dropout && !s.activation)
    return with_acc<float>(c.x_type, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      backward_staged_rows<Activated<act::relu, T>, T>(c, s, begin, end);
    });
  if (on_load && !makes_h(s) && is_relu(s.activation) && (kHasRoom || c.x_type != Dtype::kBFloat16))
    return with_acc<float>(c.x_type, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      backward_staged_rows<T, Behind<act::relu, T>>(c, s, begin, end);
    });
  with_type(makes_h(s) ? made : c.x_type, [&](auto* h) {
    using X = std::remove_pointer_t<decltype(h)>;
    with_acc<AccOf<X>>(s.activation ? made : c.dy_type, [&](auto* dz) {
      backward_staged_rows<X, std::remove_pointer_t<decltype(dz)>>(c, s, begin, end);
    });
  });
}
#endif

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
