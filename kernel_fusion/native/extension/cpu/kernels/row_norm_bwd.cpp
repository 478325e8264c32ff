// CPU row norms backward, on at::vec, without stages and with tensors of one type. Compiled once per instruction set
// (-DCPU_CAPABILITY=...).
//
// This file decides which rows and columns are taken together and in what order; cpu/row_norm_backward.h has the arithmetic.
#include "cpu/row_norm_backward.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

// Moves a sum of gradients from the order of `Interleaved` to that of the columns.
inline void restore(float* sum, int64_t cols) {
  constexpr int64_t kStep = Pair<float>::kStep;
  for (int64_t i = 0; i + kStep <= cols; i += kStep) {
    const auto v = load_pair(sum + i);
    const auto [first, second] = at::vec::interleave2(v.a, v.b);
    store_pair(sum + i, {first, second});
  }
}

// Does so for both sums, if the rows were read in that order.
template <class T> void restore_sums(const Backward& c) {
  if constexpr (std::is_same_v<T, Interleaved>)
    for (void* sum : {c.dweight, c.dbias})
      if (sum && c.restores) restore(static_cast<float*>(sum), c.cols);
}

template <class T> void backward_rows(const Backward& c, int64_t begin, int64_t end) {
  const Passes passes(c, c.cols, sizeof(T));
  Row<T, T> rows[Passes::kMostRowsTogether];
  RowResults results(c.x_type, c.dx, c.cols, c.streams);
  ColumnSums<AccOf<T>> sums(c);
  for (int64_t first = begin; first < end; first += passes.together) {
    const int count = static_cast<int>(std::min<int64_t>(passes.together, end - first));
    for (int r = 0; r < count; ++r) {
      const int64_t row = first + r, next = row + passes.together;
      rows[r] = row_of<T, T>(c, row, next < end ? next : row);
    }
    backward_together(c, passes, rows, count, sums.begin_anew(first - begin), results);
  }
  sums.finish();
  restore_sums<T>(c);
}

// Stores n elements of dweight or dbias, from column `start` on, if the gradient is wanted.
template <class A> void store_gradient(const A* sum, int64_t start, int64_t n, Dtype type, void* out) {
  if (out) with_type_of<A>(type, [&]<class T>(T*) { convert(sum, n, static_cast<T*>(out) + start); });
}

// The first pass over strips of columns. Each strip prepares its weight and rounds its dweight and dbias by itself, because
// those of all columns would leave the cache in between.
template <class T> void sums_of_strips(const BackwardByColumns& c, int64_t begin, int64_t end, RowSums* sums) {
  using A = AccOf<T>;
  const int64_t width = strip_width(c.cols);
  A room[3][kStretch];
  Backward strip = c;
  const Passes passes(c, width, sizeof(T));
  strip.dweight = c.dweight ? room[1] : nullptr;
  strip.dbias = c.dbias ? room[2] : nullptr;
  for (int64_t s = begin; s < end; ++s) {
    const int64_t start = s * width;
    strip.cols = std::min(width, c.cols - start);
    strip.weight = stretch_of(c.parameter, start, strip.cols, room[0]);
    Row<T, T> rows[kFewRows];
    for (int64_t r = 0; r < c.rows; ++r) {
      rows[r] = row_of<T, T>(c, r, r, start);
      if (s + 1 < end) rows[r].next_x = rows[r].next_dy = width;
    }
    add_stretch<false>(strip, passes, NoRelus{}, rows, c.rows, true, 0, strip.cols);
    restore_sums<T>(strip);
    store_gradient(room[1], start, strip.cols, c.dweight_type, c.dweight);
    store_gradient(room[2], start, strip.cols, c.dbias_type, c.dbias);
    for (int64_t r = 0; r < c.rows; ++r) sums[s * c.rows + r] = {rows[r].sum_g, rows[r].sum_gx};
  }
}

template <class T> void dx_of_strips(const BackwardByColumns& c, int64_t begin, int64_t end, const RowSums* sums) {
  const int64_t width = strip_width(c.cols);
  AccOf<T> room[kStretch];
  Backward strip = c;
  const Passes passes(c, width, sizeof(T));
  RowResults results(c.x_type, c.dx, c.cols, c.streams);
  for (int64_t s = begin; s < end; ++s) {
    const int64_t start = s * width, n = std::min(width, c.cols - start);
    strip.weight = stretch_of(c.parameter, start, n, room);
    for (int64_t r = 0; r < c.rows; ++r) {
      auto row = row_of<T, T>(c, r, r, start);
      row.sum_g = sums[r].g;
      row.sum_gx = sums[r].gx;
      write_dx(strip, passes, NoRelus{}, row, weight_of<T>(strip), 0, n, results.open<Results<T>>(row.dx));
      results.close(n);
    }
  }
}

}  // namespace

void round_row(Dtype acc, const void* row, int64_t n, Dtype type, void* out, bool interleaved) {
  if (interleaved) {
    const auto* in = static_cast<const float*>(row);
    const auto results = Results<Interleaved>::at(type, out);
    return sweep<float>(n, [&](int64_t i, auto part) { results.put(i, load_pair(in + i, part), part); });
  }
  if (acc == Dtype::kDouble) store_gradient(static_cast<const double*>(row), 0, n, type, out);
  else store_gradient(static_cast<const float*>(row), 0, n, type, out);
}

void backward(const Backward& c, int64_t begin, int64_t end) {
  with_type(c.x_type, [&]<class T>(T*) { backward_rows<Alike<T>>(c, begin, end); });
}

void backward_sums(const BackwardByColumns& c, int64_t begin, int64_t end, RowSums* sums) {
  with_type(c.x_type, [&]<class T>(T*) { sums_of_strips<Alike<T>>(c, begin, end, sums); });
}

void backward_dx(const BackwardByColumns& c, int64_t begin, int64_t end, const RowSums* sums) {
  with_type(c.x_type, [&]<class T>(T*) { dx_of_strips<Alike<T>>(c, begin, end, sums); });
}

}  // namespace kf::cpu::CPU_CAPABILITY
