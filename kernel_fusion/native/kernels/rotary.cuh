// The rotary embedding of the heads of query and key: pairs of columns, i and i + half or 2 i and 2 i + 1, turn by the angles
// of their token, and other columns are copied.
//
//   y1 = x1 cos[i] - x2 sin[i], y2 = x2 cos[i] + x1 sin[i]
//
// A block has a token. A thread has kVec pairs, or kVec other columns, of a head, and goes on to other heads. The columns of a
// warp are those of few heads, so it finds its angles in L1. Bytes for each element: x in, y out. kBackward rotates dy the
// other way.
#pragma once

#include "shared/rotary_args.h"
#include "vectors.cuh"

namespace kf {

template <class S> struct RotaryToken {
  using A = typename S::Acc;
  using X = typename S::X;
  static constexpr int kVec = S::kVec, kPaired = S::kHalf / kVec, kUnits = kPaired + (S::kCols - 2 * S::kHalf) / kVec;

  const RotaryArgs& args;
  i64 example, token, angles;
  bool known = true;  // whether its position is a row of the tables

  __device__ explicit RotaryToken(const RotaryArgs& args)
      : RotaryToken(args, blockIdx.x / args.tokens, blockIdx.x % args.tokens) {}
  __device__ RotaryToken(const RotaryArgs& args, unsigned of_example, unsigned of_token)
      : args(args), example(of_example), token(of_token) {
    i64 row = token;
    if constexpr (S::kPositions != 0) {
      const i64 at = example * args.position_stride[0] + token * args.position_stride[1];
      if constexpr (S::kPositions == 4) row = static_cast<const int*>(args.positions)[at];
      else row = static_cast<const i64*>(args.positions)[at];
      known = row >= 0 && row < args.table_rows;
    }
    angles = example * args.table_stride[0] + (known ? row : 0) * args.table_stride[1];
  }

  __device__ void read_angles(const void* table, int pair, A (&v)[kVec]) const {
    widen_pack(load<S::kAlignAngles, kVec>(static_cast<const typename S::Angle*>(table) + angles + pair), v);
    if constexpr (S::kPositions != 0) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] = known ? v[e] : widen<A>(__uint_as_float(0x7fc00000u));
    }
  }

  static __device__ A rounded(A v) {
    if constexpr (S::kRounds) return widen<A>(narrow<X>(v));
    else return v;
  }
  // a * b + c * d, with each product rounded if the kernel rounds them.
  static __device__ A turned(A a, A b, A c, A d) {
    if constexpr (S::kRounds) return rounded(rounded(product(a, b)) + rounded(product(c, d)));
    else return fused(a, b, product(c, d));
  }

  // The pairs from `pair` on, in the order of memory: kVec first columns before kVec second ones, or alternating.
  __device__ void turn(const X* x, X* y, int pair) const {
    A cos[kVec], sin[kVec], a[kVec], b[kVec];
    read_angles(args.cos, pair, cos);
    read_angles(args.sin, pair, sin);
    const int first = S::kInterleaved ? 2 * pair : pair, second = S::kInterleaved ? first + kVec : first + S::kHalf;
    widen_pack(load<S::kAlign, kVec>(x + first), a);
    widen_pack(load<S::kAlign, kVec>(x + second), b);
    A out[2 * kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const int at = S::kInterleaved ? 2 * e : e, to = S::kInterleaved ? at + 1 : kVec + e;
      const A one = at < kVec ? a[at % kVec] : b[at % kVec], other = to < kVec ? a[to % kVec] : b[to % kVec];
      const A s = S::kBackward ? -sin[e] : sin[e];
      out[at] = turned(one, cos[e], other, -s);
      out[to] = turned(other, cos[e], one, s);
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      a[e] = out[e];
      b[e] = out[kVec + e];
    }
    store<S::kAlignOut>(y + first, narrow_pack<X>(a));
    store<S::kAlignOut>(y + second, narrow_pack<X>(b));
  }

  __device__ void serve(unsigned item) const {
    const unsigned of_query = args.heads[0], number = item / kUnits;
    const int unit = static_cast<int>(item % kUnits);
    const bool is_key = number >= of_query;
    const RotaryHeads& heads = args.of[is_key];
    const i64 head = is_key ? number - of_query : number;
    const X* x =
        static_cast<const X*>(heads.x) + example * heads.x_stride[0] + token * heads.x_stride[1] + head * heads.x_stride[2];
    X* y = static_cast<X*>(heads.y) + example * heads.y_stride[0] + token * heads.y_stride[1] + head * heads.y_stride[2];
    if (kUnits == kPaired || unit < kPaired) return turn(x, y, unit * kVec);
    const int col = 2 * S::kHalf + (unit - kPaired) * kVec;
    store<S::kAlignOut>(y + col, load<S::kAlign, kVec>(x + col));
  }
};

template <class S> __device__ void rotary(const RotaryArgs& args) {
  wait_for_previous_kernel();
  using Token = RotaryToken<S>;
  const Token token(args);
  const unsigned items = (args.heads[0] + args.heads[1]) * Token::kUnits;
  for (unsigned item = threadIdx.x; item < items; item += S::kThreads) token.serve(item);
}

}  // namespace kf
