// CPU rotary embedding of heads, or of the RMSNorm of each head, forward and backward. Compiled once per instruction set.
//
// Forward: y = rotate(x), or with a norm y = rotate(x * rstd * w) by way of a row of the accumulator type. Backward: g is dy
// rotated by the negative angles. Without a norm, dx = g. With a norm, n = x * rstd, dx = rstd * (g w - n mean(g w n)) and
// dweight += g * n, where one sweep finds rstd and the mean. A token's heads share cosines and sines that are converted once.
#include <algorithm>
#include <cmath>
#include <memory>

#include "cpu/chunk.h"
#include "cpu/kernels.h"
#include "cpu/sums.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

// v rounded to T, if T has fewer digits.
template <class T> KF_INLINE Pair<AccOf<T>> rounded(const Pair<AccOf<T>>& v) {
  if constexpr (std::is_same_v<T, AccOf<T>>) {
    return v;
  } else {
    const auto [a, b] = at::vec::convert_to_float<T>(at::vec::convert_from_float<T>(v.a, v.b));
    return {a, b};
  }
}

// Rows of the accumulator type that belong to one thread.
template <class T> struct Room {
  using A = AccOf<T>;
  std::unique_ptr<A[]> all;
  A *cos, *sin, *row, *dweight;

  explicit Room(int64_t cols) {
    const int64_t each = whole_pairs<A>(cols);
    all.reset(new A[4 * each]());
    cos = all.get();
    sin = cos + each;
    row = sin + each;
    dweight = row + each;
  }

  // Reads cos and `sign` * sin of a token.
  void read_angles(const Rotary& c, int64_t example, int64_t token, A sign) {
    const int64_t number = c.positions ? c.positions[example * c.position_example + token] : token;
    const int64_t start = (example * c.table_example + number * c.half) * size_of(c.table_type);
    load_chunk<A>(c.table_type, c.cos + start, 1, c.half, cos);
    load_chunk<A>(c.table_type, c.sin + start, 1, c.half, sin);
    if (sign < 0)
      for (int64_t i = 0; i < c.half; ++i) sin[i] = -sin[i];
  }
};

// Computes y = x with its pairs of columns rotated. Each of X and Y is T or the accumulator type.
template <class T, bool kRounds, class X, class Y>
void turn(const Rotary& c, const X* x, Y* y, const AccOf<T>* cos, const AccOf<T>* sin) {
  using A = AccOf<T>;
  using V = Vectorized<A>;
  const auto round = [](const Pair<A>& v) { return kRounds ? rounded<T>(v) : v; };
  const auto first = [&](const Pair<A>& x1, const Pair<A>& x2, const Pair<A>& co, const Pair<A>& si) {
    return round(round(x1 * co) - round(x2 * si));
  };
  const auto second = [&](const Pair<A>& x1, const Pair<A>& x2, const Pair<A>& co, const Pair<A>& si) {
    return round(round(x2 * co) + round(x1 * si));
  };
  const int64_t half = c.half;
  if (!c.interleaved) {
    sweep<A>(half, [&](int64_t i, auto part) {
      const auto x1 = load_pair(x + i, part), x2 = load_pair(x + half + i, part);
      const auto co = load_pair(cos + i), si = load_pair(sin + i);
      store_pair(y + i, first(x1, x2, co, si), part);
      store_pair(y + half + i, second(x1, x2, co, si), part);
    });
  } else {
    const auto zero = V(0);
    sweep<A>(2 * half, [&](int64_t i, auto part) {
      const auto pairs = load_pair(x + i, part);
      const auto [x1, x2] = at::vec::deinterleave2(pairs.a, pairs.b);
      const Pair<A> co{V::loadu(cos + i / 2), zero}, si{V::loadu(sin + i / 2), zero};
      const Pair<A> y1 = first({x1, zero}, {x2, zero}, co, si), y2 = second({x1, zero}, {x2, zero}, co, si);
      const auto [a, b] = at::vec::interleave2(y1.a, y2.a);
      store_pair(y + i, Pair<A>{a, b}, part);
    });
  }
  const int64_t rest = 2 * half;
  sweep<A>(c.cols - rest, [&](int64_t i, auto part) { store_pair(y + rest + i, load_pair(x + rest + i, part), part); });
}

// Writes n * weight to `out`, where n is the normalised head.
template <class T> void normalize(const Rotary& c, const RotaryHeads& h, const T* x, AccOf<T>* out) {
  using A = AccOf<T>;
  const auto [squares] = sums_over<A, 1>(c.cols, [&](int64_t i, auto& sums, auto part) {
    const auto v = load_pair(x + i, part);
    sums[0] = fma(v, v, sums[0]);
  });
  const auto rstd = both(static_cast<A>(1 / std::sqrt(squares / static_cast<double>(c.cols) + c.eps)));
  const auto* weight = static_cast<const A*>(h.weight);
  sweep<A>(c.cols, [&](int64_t i, auto part) {
    auto n = load_pair(x + i, part) * rstd;
    if (c.rounds_normalized) n = rounded<T>(n);
    if (weight) n = n * load_pair(weight + i, part);
    if (weight && h.rounds_product) n = rounded<T>(n);
    store_pair(out + i, n, part);
  });
}

template <class T> void rotary_heads(const Rotary& c, const RotaryHeads& h, int64_t example, int64_t token, Room<T>& room) {
  const T* x = reinterpret_cast<const T*>(h.x) + h.x_rows.offset(example, token);
  T* y = reinterpret_cast<T*>(h.result) + h.result_rows.offset(example, token);
  for (int64_t head = 0; head < h.count; ++head, x += h.x_rows.head, y += h.result_rows.head) {
    const auto turn_from = [&](const auto* from) {
      if (h.rounds_rotation) turn<T, true>(c, from, y, room.cos, room.sin);
      else turn<T, false>(c, from, y, room.cos, room.sin);
    };
    if (c.has_norm) {
      normalize(c, h, x, room.row);
      turn_from(room.row);
    } else {
      turn_from(x);
    }
  }
}

// Backward through the norm of one head, whose g is in room.row: writes dx if it is not null, and adds to room.dweight.
template <class T>
void norm_backward(const Rotary& c, const RotaryHeads& h, const T* x, T* dx, bool wants_dweight, Room<T>& room) {
  using A = AccOf<T>;
  const A* g = room.row;
  const auto* weight = static_cast<const A*>(h.weight);
  const auto gw_at = [&](int64_t i, auto part) {
    const auto v = load_pair(g + i, part);
    return weight ? v * load_pair(weight + i, part) : v;
  };
  const auto [squares, dot] = sums_over<A, 2>(c.cols, [&](int64_t i, auto& sums, auto part) {
    const auto v = load_pair(x + i, part);
    sums[0] = fma(v, v, sums[0]);
    sums[1] = fma(v, gw_at(i, part), sums[1]);
  });
  const double exact = 1 / std::sqrt(squares / static_cast<double>(c.cols) + c.eps);
  const auto rstd = both(static_cast<A>(exact)), mean = both(static_cast<A>(dot * exact / static_cast<double>(c.cols)));
  sweep<A>(c.cols, [&](int64_t i, auto part) {
    const auto n = load_pair(x + i, part) * rstd;
    if (dx) store_pair(dx + i, (gw_at(i, part) - n * mean) * rstd, part);
    if (wants_dweight) {
      const auto factor = c.rounds_normalized ? rounded<T>(n) : n;
      store_pair(room.dweight + i, fma(load_pair(g + i, part), factor, load_pair(room.dweight + i, part)), part);
    }
  });
}

// Adds the sums so far of dweight to the totals in double, and sets them to zero.
template <class A> void flush(A* dweight, int64_t cols, double* totals) {
  for (int64_t i = 0; i < cols; ++i) totals[i] += static_cast<double>(dweight[i]);
  std::fill_n(dweight, cols, A(0));
}

template <class T>
void rotary_heads_bwd(const Rotary& c, const RotaryHeads& h, int64_t example, int64_t token, double* dweight, Room<T>& room) {
  const T* dy = reinterpret_cast<const T*>(h.dy) + h.dy_rows.offset(example, token);
  const T* x = reinterpret_cast<const T*>(h.x);
  if (x) x += h.x_rows.offset(example, token);
  T* dx = reinterpret_cast<T*>(h.result);
  if (dx) dx += h.result_rows.offset(example, token);
  for (int64_t head = 0; head < h.count; ++head, dy += h.dy_rows.head) {
    if (!c.has_norm) {
      if (dx) turn<T, false>(c, dy, dx + head * h.result_rows.head, room.cos, room.sin);
      continue;
    }
    turn<T, false>(c, dy, room.row, room.cos, room.sin);
    norm_backward(c, h, x + head * h.x_rows.head, dx ? dx + head * h.result_rows.head : nullptr, dweight != nullptr, room);
    if (dweight && (head + 1) % kRowsSummed == 0) flush(room.dweight, c.cols, dweight);
  }
  if (dweight) flush(room.dweight, c.cols, dweight);
}

}  // namespace

void rotary(const Rotary& c, int64_t begin, int64_t end) {
  with_type(c.type, [&]<class T>(T*) {
    Room<T> room(c.cols);
    for (int64_t i = begin; i < end; ++i) {
      room.read_angles(c, i / c.tokens, i % c.tokens, 1);
      for (const auto& heads : c.of) rotary_heads<T>(c, heads, i / c.tokens, i % c.tokens, room);
    }
  });
}

void rotary_bwd(const Rotary& c, int64_t begin, int64_t end, double* const (&dweights)[2]) {
  with_type(c.type, [&]<class T>(T*) {
    Room<T> room(c.cols);
    for (int64_t i = begin; i < end; ++i) {
      room.read_angles(c, i / c.tokens, i % c.tokens, -1);
      for (int which = 0; which < 2; ++which)
        rotary_heads_bwd<T>(c, c.of[which], i / c.tokens, i % c.tokens, dweights[which], room);
    }
  });
}

}  // namespace kf::cpu::CPU_CAPABILITY
