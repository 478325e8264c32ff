// CPU row norms backward for rows that share no weight, bias or gate, whose gradients therefore are no sums over rows. All
// tensors have one type.
// Compiled once per instruction set (-DCPU_CAPABILITY=...).
#include "cpu/chunk.h"
#include "cpu/row_norm_backward.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

template <class T> const T* row_of_pitch(const void* first, int64_t pitch, int64_t row) {
  return first ? reinterpret_cast<const T*>(static_cast<const char*>(first) + row * pitch) : nullptr;
}

// A weight as the caller gave it. An absent weight is 1.
template <class T> struct GivenWeight {
  using A = AccOf<T>;
  const T* data;
  A offset;

  GivenWeight from(int64_t start) const { return {cpu::CPU_CAPABILITY::from(data, start), offset}; }
  template <class P> KF_INLINE Pair<A> load(int64_t i, P part) const {
    return data ? load_pair(data + i, part) + both(offset) : both<A>(1);
  }
};

// The weight of each column of one row, and the gradients of weight and bias, which this row alone determines.
template <class T> struct OwnColumns {
  using A = AccOf<T>;
  GivenWeight<T> weight;
  Results<T> dweight, dbias;  // without data if not wanted

  template <class P> KF_INLINE Pair<A> load_dweight(int64_t, P) const { return both<A>(0); }
  template <class P> KF_INLINE Pair<A> load_dbias(int64_t, P) const { return both<A>(0); }
  template <class P> KF_INLINE void store(int64_t i, const Pair<A>& dw, const Pair<A>& db, P part) const {
    if (dweight.target.data) dweight.put(i, dw, part);
    if (dbias.target.data) dbias.put(i, db, part);
  }
};

// Receives the gradient at h = residual + gate * u, and stores those of residual, gate and u.
template <class T> struct GatedResults {
  Results<T> dresidual, dgate, dx;  // without data if not wanted
  const T *gate, *u;

  template <class P> KF_INLINE void put(int64_t i, const Pair<AccOf<T>>& g, P part) const {
    if (dresidual.target.data) dresidual.put(i, g, part);
    if (dgate.target.data) dgate.put(i, g * load_pair(u + i, part), part);
    if (dx.target.data) dx.put(i, g * load_pair(gate + i, part), part);
  }
};

template <class T> struct Rows {
  T* first;  // the result of row 0, or null if it is not wanted
  RowResults results;

  Rows(const Backward& c, void* first) : first(static_cast<T*>(first)), results(kDtypeOf<T>, first, c.cols, c.streams) {}
  Results<T> open(int64_t position) { return first ? results.open<Results<T>>(first + position) : Results<T>{}; }
  void close(int64_t n) {
    if (first) results.close(n);
  }
};

template <class T> class OwnRows {
  using A = AccOf<T>;

 public:
  OwnRows(const Backward& c, const OwnParameters& own)
      : c(c), own(own), passes(c, c.cols, sizeof(T)), dxs(c, c.dx), dresiduals(c, own.dresidual), dgates(c, own.dgate),
        dweights(c, own.dweight), dbiases(c, own.dbias) {}

  void run(int64_t index, int64_t next) {
    Row<T, T> row = row_of<T, T>(c, index, next);
    const GivenWeight<T> weight{row_of_pitch<T>(own.weight, own.weight_pitch, index), static_cast<A>(own.offset)};
    const bool is_stored = c.dx || own.dresidual || own.dgate;
    if constexpr (sizeof(T) == 2 && kHasRoom)  // as in `backward_together`
      if (is_stored && passes.together * c.cols <= kKept) {
        alignas(64) A room[2 * (kKept + Pair<A>::kStep)];
        row.kept = room;
        add<true>(row, weight, index);
        return store(index, 0, c.cols, [&](auto results) KF_INLINE_LAMBDA { write_kept_dx(c, row, results); });
      }
    add<false>(row, weight, index);
    for (int64_t start = 0; is_stored && start < c.cols; start += kStretch) {
      const int64_t stop = std::min(start + kStretch, c.cols);
      store(index, start, stop,
            [&](auto results)
                KF_INLINE_LAMBDA { write_dx(c, passes, NoRelus{}, row, weight, start, stop, results); });
    }
  }

 private:
  // The first pass over a row: its sums, and the gradients of its weight and bias.
  template <bool keeps> void add(Row<T, T>& row, const GivenWeight<T>& weight, int64_t index) {
    Backward strip = c;
    const int64_t width = strip_width(c.cols);
    for (int64_t start = 0; start < c.cols; start += width) {
      strip.cols = std::min(width, c.cols - start);
      Row<T, T> part = row;
      part.x += start;
      part.dy += start;
      part.dh = from(part.dh, start);
      const int64_t position = index * c.cols + start;
      const OwnColumns<T> columns{weight.from(start), dweights.open(position), dbiases.open(position)};
      add_columns<keeps>(strip, passes, NoRelus{}, &part, columns, 0, strip.cols, std::index_sequence<0>());
      dweights.close(strip.cols);
      dbiases.close(strip.cols);
      row.sum_g = part.sum_g;
      row.sum_gx = part.sum_gx;
    }
  }

  // The second pass over columns [start, stop). `write` computes the gradient at h and stores it to the results that it gets.
  template <class F> KF_INLINE void store(int64_t index, int64_t start, int64_t stop, F&& write) {
    const int64_t position = index * c.cols + start, n = stop - start;
    if (own.gate) {
      const T* u = own.u ? static_cast<const T*>(own.u) + row_offset(own.u_rows, index) + start : nullptr;
      write(GatedResults<T>{dresiduals.open(position), dgates.open(position), dxs.open(position),
                            row_of_pitch<T>(own.gate, own.gate_pitch, index) + start, u});
      dresiduals.close(n);
      dgates.close(n);
    } else {
      write(dxs.open(position));
    }
    dxs.close(n);
  }

  const Backward& c;
  const OwnParameters& own;
  const Passes passes;
  Rows<T> dxs, dresiduals, dgates, dweights, dbiases;
};

}  // namespace

void backward_own(const Backward& c, const OwnParameters& own, int64_t begin, int64_t end) {
  with_type(c.x_type, [&]<class T>(T*) {
    OwnRows<Alike<T>> rows(c, own);
    for (int64_t row = begin; row < end; ++row) rows.run(row, std::min(row + 1, end - 1));
  });
}

}  // namespace kf::cpu::CPU_CAPABILITY
