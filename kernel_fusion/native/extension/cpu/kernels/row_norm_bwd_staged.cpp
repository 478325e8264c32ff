// CPU row norms backward with stages around them, or of rows of two types. Compiled once per instruction set
// (-DCPU_CAPABILITY=...).
//
// Buffers hold what was normalised, and the gradient before the activation, where these were not kept and are made again. The
// loops of the bare norm find them there.
#include <memory>

#include "cpu/row_norm_backward.h"
#include "cpu/row_norm_forward.h"
#include "cpu/row_norm_stages.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

bool is_relu(int activation) { return static_cast<Activation>(activation) == Activation::relu; }

// How a call finds h and dz. They are read as they lie in memory, through relu if nothing else stands between. Buffers of the
// accumulator type hold them if they have to be made again, or if no loop knows the two types together.
struct Reading {
  bool has_u, makes_h, makes_dz;
  Relus relus;
  explicit Reading(const Backward& c, const BackwardStages& s) {
    const Dtype acc = c.x_type == Dtype::kDouble ? Dtype::kDouble : Dtype::kFloat;
    has_u = !s.has_residual && (s.pre_activation || s.dropout);  // what was normalised was kept nowhere
    // z is computed again from what was normalised, without relu on the way; and so is what is rounded.
    const bool through_relu = is_relu(s.activation) && (c.dy_type == acc || c.dy_type == c.x_type) && !s.rounds();
    const bool remakes_z = s.activation && !through_relu;
    relus.x = has_u && is_relu(s.pre_activation) && !s.dropout && !remakes_z && !s.rounds();
    makes_h = has_u && !relus.x;
    makes_dz = remakes_z || !(c.dy_type == acc || (c.dy_type == c.x_type && !makes_h));
    relus.z = is_relu(s.activation) && !makes_dz;
  }
};

// Makes h of a row again, in `room`, and fetches dy meanwhile, which is read next.
template <class A> const A* make_h(const Backward& c, const BackwardStages& s, int64_t row, A* room) {
  const auto x = row_at<A>(c.x_type, c.x, c.x_rows, row), dy = row_at<A>(c.dy_type, c.dy, c.dy_rows, row);
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    fetch(from(dy, start).data, n * size_of(c.dy_type));
    before_norm<A>(s, row * c.cols + start, n, from(x, start), {}, {kDtypeOf<A>, room + start});
  });
  return room;
}

// Makes dz of a row, in `room`. If an activation follows the norm, its argument is computed again.
template <class X, class DY>
const AccOf<X>* make_dz(const Backward& c, const BackwardStages& s, const Row<X, DY>& row, int64_t index, AccOf<X>* room) {
  using A = AccOf<X>;
  const auto dy = row_at<A>(c.dy_type, c.dy, c.dy_rows, index);
  const auto *weight = static_cast<const A*>(c.weight), *bias = static_cast<const A*>(s.bias);
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    Chunk<A> z;
    ChainLoop<A> loop;
    loop.activation = s.activation;
    loop.a = loop.dy = from(dy, start);
    loop.first.data = room + start;
    if (s.activation) {
      if (s.rounds())
        normalize_rounded(s, row.x + start, row.mean, row.rstd, from(weight, start), from(bias, start), n,
                          AnyResults<A>::at(kDtypeOf<A>, z));
      else
        normalize(row.x + start, row.mean, row.rstd, from(weight, start), from(bias, start), n, Results<A>::at(kDtypeOf<A>, z));
      loop.a = {kDtypeOf<A>, z};
    }
    run_gradients(loop, n);
  });
  return room;
}

// Adds to dweight what a row has, of which the normalised values are rounded; dweight begins with the `first`.
template <class X, class DY> void add_dweight(const Backward& c, const BackwardStages& s, const Row<X, DY>& row, bool first) {
  using A = AccOf<X>;
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    Chunk<A> rounded;
    normalize_rounded(s, row.x + start, row.mean, row.rstd, nullptr, nullptr, n, AnyResults<A>::at(kDtypeOf<A>, rounded));
    A* const dweight = static_cast<A*>(c.dweight) + start;
    sweep<A>(n, [&](int64_t i, auto part) {
      const auto sum = first ? both<A>(0) : load_pair(dweight + i, part);
      store_pair(dweight + i, fma(load_pair(row.dy + start + i, part), load_pair(rounded + i, part), sum), part);
    });
  });
}

// Takes the gradient with respect to h. It is dresidual, and, back through what dropout and relu let pass, dx.
template <class T> struct Gradients {
  using A = AccOf<T>;
  Results<T> dresidual, dx;  // without data: not wanted
  A* chunk = nullptr;        // takes the gradient instead of dx
  const MaskOf<A>* kept = nullptr;
  A scale = 1;
  const T* relu = nullptr;  // its argument

  template <class P> KF_INLINE void put(int64_t i, Pair<A> g, P part) const {
    if (dresidual.target.data) dresidual.put(i, g, part);
    if (chunk) return store_pair(chunk + i, g, part);
    if (!dx.target.data) return;
    if (kept) g = (g * both(scale)) & load_pair(reinterpret_cast<const A*>(kept) + i, part);
    if (relu) g = times_slope<act::relu>(g, load_pair(relu + i, part));
    dx.put(i, g, part);
  }
};

template <class X, class DY>
void store_gradients(const Backward& c, const BackwardStages& s, const Passes& passes, Relus relus, int64_t index,
                     const Row<X, DY>& row, RowResults& dresiduals, RowResults& dxs) {
  using A = AccOf<X>;
  const bool directly = s.dx_type == kDtypeOf<X> && (!s.pre_activation || (is_relu(s.pre_activation) && !s.dropout));
  each_chunk<A>(c.cols, [&](int64_t start, int64_t n) {
    const int64_t position = index * c.cols + start;
    ChainLoop<A> back;
    Chunk<MaskOf<A>> kept;
    Chunk<A> chunk;
    drop(s, position, n, back, kept);
    back.activation = s.pre_activation;
    back.dy.data = chunk;
    back.a = s.pre_activation ? from(row_at<A>(s.dx_type, s.x, s.x_rows, index), start) : back.dy;
    Gradients<X> gradients;
    if (s.dresidual) gradients.dresidual = dresiduals.open<Results<X>>(static_cast<X*>(s.dresidual) + position);
    if (c.dx && directly) {
      gradients.dx = dxs.open<Results<X>>(static_cast<X*>(c.dx) + position);
      gradients.scale = back.scale;
      if (s.dropout) gradients.kept = kept;
      if (s.pre_activation) gradients.relu = static_cast<const X*>(back.a.data);
    } else if (c.dx) {
      gradients.chunk = chunk;
    }
    write_dx(c, passes, relus, row, start, start + n, gradients);
    if (s.dresidual) dresiduals.close(n);
    if (!c.dx) return;
    if (!directly) {
      back.first = dxs.open<AnyResults<A>>(element(s.dx_type, c.dx, position)).target;
      run_gradients(back, n);
    }
    dxs.close(n);
  });
}

// X and DY: the types of the rows that the loops read.
template <class X, class DY>
void backward_staged_rows(const Backward& c, const BackwardStages& s, const Reading& reading, int64_t begin, int64_t end) {
  using A = AccOf<X>;
  const Passes passes(c, c.cols, sizeof(X));
  const int together = reading.makes_h || reading.makes_dz ? 2 : passes.together;
  const std::unique_ptr<A[]> buffer(new A[(reading.makes_h + reading.makes_dz) * together * c.cols]);
  Row<X, DY> rows[Passes::kMostRowsTogether];
  RowResults dresiduals(c.x_type, s.dresidual, c.cols, c.streams), dxs(s.dx_type, c.dx, c.cols, c.streams);
  ColumnSums<A> sums(c);
  const bool adds_dweight = s.rounds() && c.dweight;
  Backward loops = c;
  if (adds_dweight) loops.dweight = nullptr;
  for (int64_t first = begin; first < end; first += together) {
    const int count = static_cast<int>(std::min<int64_t>(together, end - first));
    A* room = buffer.get();
    for (int r = 0; r < count; ++r) {
      const int64_t index = first + r, next = index + together;
      auto& row = rows[r] = row_of<X, DY>(c, index, next < end ? next : index);
      row.bias = static_cast<const A*>(s.bias);
      if constexpr (std::is_same_v<X, A>)
        if (reading.makes_h) {
          row.x = make_h(c, s, index, room);
          row.next_x = 0;
          room += c.cols;
        }
      if constexpr (std::is_same_v<DY, A>)
        if (reading.makes_dz) {
          row.dy = make_dz(c, s, row, index, room);
          row.next_dy = 0;
          room += c.cols;
        }
    }
    const bool anew = sums.begin_anew(first - begin);
    add_together(loops, passes, reading.relus, rows, count, anew);
    for (int r = 0; adds_dweight && r < count; ++r) add_dweight(c, s, rows[r], anew && r == 0);
    for (int r = 0; (c.dx || s.dresidual) && r < count; ++r)
      store_gradients(c, s, passes, reading.relus, first + r, rows[r], dresiduals, dxs);
  }
  sums.finish();
}

}  // namespace

void backward_staged(const Backward& c, const BackwardStages& s, int64_t begin, int64_t end) {
  const Reading reading(c, s);
  const auto run = [&]<class X, class DY>(X, DY) { backward_staged_rows<X, DY>(c, s, reading, begin, end); };
  if (c.x_type == Dtype::kDouble) return run(double(), double());
  with_type_of<float>(reading.makes_h ? Dtype::kFloat : c.x_type, [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    if (reading.makes_dz || c.dy_type == Dtype::kFloat) run(X(), float());
    else run(X(), X());
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
