// The rotary embedding of the heads of query and key after their RMSNorm: with n = x * rstd * (weight_offset + weight),
//
//   y1 = n1 cos[i] - n2 sin[i], y2 = n2 cos[i] + n1 sin[i], and the other columns of n as they are
//
// kLanes neighbours have a head, so that shuffles add its squares. Each has kHeld units of two vectors: kVec pairs that turn,
// or kVec columns from either half of the others. The grid is persistent: its first blocks take heads of the query, the others
// heads of the key, so that a thread keeps one weight. All heads of all tokens are rows; a block's warps walk through them
// apart, each loading its next row before it computes one. Bytes per element: x in, y out. kRounds rounds as "hf" does.
#pragma once

#include "rotary.cuh"
#include "tree.cuh"

namespace kf {

template <class S> struct HeadLane {
  using A = typename S::Acc;
  static constexpr int kVec = S::kVec, kWidth = 2 * kVec;
  static constexpr int kUnits = (S::kCols + 1) / 2 / kVec, kPaired = S::kHalf / kVec, kOthers = (S::kCols + 1) / 2 - S::kHalf;
  static constexpr int kLanes = kUnits < 32 ? power_of_two(kUnits) : 32, kHeld = (kUnits + kLanes - 1) / kLanes;
  static constexpr int kWarpHeads = 32 / kLanes, kBlockHeads = S::kThreads / kLanes;

  static constexpr bool kAllExist = kUnits == kLanes * kHeld, kAllTurn = kAllExist && kUnits == kPaired;

  template <class T> using Packs = Pack<T, kVec>[kHeld][2];
  using Values = A[kHeld][kWidth];

  int lane = static_cast<int>(threadIdx.x) % kLanes;

  __device__ bool exists(int i) const { return kAllExist || lane + i * kLanes < kUnits; }
  __device__ bool turns(int i) const { return kAllTurn || lane + i * kLanes < kPaired; }
  __device__ int first(int i) const {
    const int unit = lane + i * kLanes;
    return turns(i) ? unit * (S::kInterleaved ? kWidth : kVec) : 2 * S::kHalf + (unit - kPaired) * kVec;
  }
  __device__ int second(int i) const { return first(i) + (!turns(i) ? kOthers : S::kInterleaved ? kVec : S::kHalf); }
  // An odd number of columns leaves a lone one.
  __device__ bool has_second(int i) const { return exists(i) && (S::kCols % 2 == 0 || second(i) < S::kCols); }

  template <int kAlign, class T> __device__ void read(const T* row, Packs<T>& v) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      read_if<kAlign, kAllExist>(exists(i), row + first(i), v[i][0]);
      read_if<kAlign, kAllExist && S::kCols % 2 == 0>(has_second(i), row + second(i), v[i][1]);
    }
  }

  // The vector, or zeros if it is not there.
  template <int kAlign, bool kSure, class T> __device__ static void read_if(bool there, const T* p, Pack<T, kVec>& v) {
    if constexpr (kSure) {
      v = load<kAlign, kVec>(p);
    } else {
      v = {};
      if (there) v = load<kAlign, kVec>(p);
      keep_packed(v);
    }
  }

  // f(unit, element, column)
  template <class F> __device__ void each_column(F&& f) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        if (exists(i)) f(i, e, first(i) + e);
        if (has_second(i)) f(i, kVec + e, second(i) + e);
      }
  }

  template <int kAlign, class T> __device__ void write(T* row, const Values& v) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      A a[kVec], b[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        a[e] = v[i][e];
        b[e] = v[i][kVec + e];
      }
      if (exists(i)) store<kAlign>(row + first(i), narrow_pack<T>(a));
      if (has_second(i)) store<kAlign>(row + second(i), narrow_pack<T>(b));
    }
  }
};

template <class A, class T, int kVec> __device__ void widen_unit(const Pack<T, kVec> (&packs)[2], A (&v)[2 * kVec]) {
  A a[kVec], b[kVec];
  widen_pack(packs[0], a);
  widen_pack(packs[1], b);
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    v[e] = a[e];
    v[kVec + e] = b[e];
  }
}

// Rounds two values by one instruction, in fp16 and bf16.
template <bool kRounds, class X, class A, int kCount> __device__ void round_all(A (&v)[kCount]) {
  if constexpr (kRounds) widen_pack(narrow_pack<X>(v), v);
}

// Copies words. The compiler copies a struct by its elements, so takes words apart, for which it waits for their loads.
template <class T, int kVec> __device__ void copy_pack(const Pack<T, kVec>& from, Pack<T, kVec>& to) {
  if constexpr (sizeof from % 4 == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof from / 4); ++i)
      reinterpret_cast<unsigned*>(&to)[i] = reinterpret_cast<const unsigned*>(&from)[i];
  } else {
    to = from;
  }
}

// A token's angles of a lane's units, as they are in memory.
template <class S> struct LaneAngles {
  using A = typename S::Acc;
  using Lane = HeadLane<S>;
  static constexpr int kVec = S::kVec;

  Pack<typename S::Angle, kVec> cos[Lane::kHeld], sin[Lane::kHeld];
  bool known;

  __device__ void read(const Lane& at, const RotaryToken<S>& token) {
    using Angle = typename S::Angle;
    known = token.known;
#pragma unroll
    for (int i = 0; i < Lane::kHeld; ++i) {
      const i64 from = token.angles + (at.lane + i * Lane::kLanes) * kVec;
      Lane::template read_if<S::kAlignAngles, Lane::kAllTurn>(at.turns(i), static_cast<const Angle*>(token.args.cos) + from,
                                                              cos[i]);
      Lane::template read_if<S::kAlignAngles, Lane::kAllTurn>(at.turns(i), static_cast<const Angle*>(token.args.sin) + from,
                                                              sin[i]);
    }
  }

  __device__ void take(const LaneAngles& from) {
    known = from.known;
#pragma unroll
    for (int i = 0; i < Lane::kHeld; ++i) {
      copy_pack(from.cos[i], cos[i]);
      copy_pack(from.sin[i], sin[i]);
    }
  }

  // Turns the pairs of unit i; NaN for a position that is not in the tables.
  template <bool kRounds> __device__ void turn(const Lane& at, int i, A (&v)[Lane::kWidth]) const {
    if (!at.turns(i)) return;
    using X = typename S::X;
    A c[kVec], s[kVec], across[2][kVec], along[2][kVec];
    widen_pack(cos[i], c);
    widen_pack(sin[i], s);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const A first = v[S::kInterleaved ? 2 * e : e], second = v[S::kInterleaved ? 2 * e + 1 : kVec + e];
      if (S::kPositions != 0 && !known) c[e] = s[e] = widen<A>(__uint_as_float(0x7fc00000u));
      if constexpr (S::kBackward) s[e] = -s[e];
      across[0][e] = product(second, -s[e]);
      across[1][e] = product(first, s[e]);
      along[0][e] = kRounds ? product(first, c[e]) : fused(first, c[e], across[0][e]);
      along[1][e] = kRounds ? product(second, c[e]) : fused(second, c[e], across[1][e]);
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      round_all<kRounds, X>(across[which]);
      round_all<kRounds, X>(along[which]);
#pragma unroll
      for (int e = 0; kRounds && e < kVec; ++e) along[which][e] += across[which][e];
      round_all<kRounds, X>(along[which]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[S::kInterleaved ? 2 * e + which : which * kVec + e] = along[which][e];
    }
  }
};

// A lane's part of offset + weight, as it is in memory.
template <class S, class W> struct LaneWeight {
  using A = typename S::Acc;
  using Lane = HeadLane<S>;
  // Results after a rounded normalised value are in the promoted type of all factors.
  static constexpr bool kRoundsProduct = S::kRounds && (!kPresent<W> || kSame<W, typename S::X>);
  static constexpr bool kRoundsTurn = kRoundsProduct && kSame<typename S::Angle, typename S::X>;

  typename Lane::template Packs<typename PresentOr<W, typename S::X>::type> packs;

  __device__ void read(const Lane& at, const void* weight) {
    if constexpr (kPresent<W>) at.template read<S::kAlignWeights>(static_cast<const W*>(weight), packs);
  }
  __device__ void get(int i, A offset, A (&w)[Lane::kWidth]) const {
    if constexpr (kPresent<W>) widen_unit(packs[i], w);
#pragma unroll
    for (int e = 0; e < Lane::kWidth; ++e) {
      if constexpr (!kPresent<W>) w[e] = 1;
      else if constexpr (S::kOffset) w[e] += offset;
    }
  }
};

template <class S> __device__ typename S::Acc rstd_of(typename S::Acc squares, double eps) {
  return reciprocal_sqrt(fused(squares, kPerCol<S>, static_cast<typename S::Acc>(eps)));
}

// The place of a row: a head of a token of an example. All rows of a walk are equally far apart.
class HeadWalk {
 public:
  unsigned example, token, head;

  __device__ HeadWalk(unsigned row, unsigned step, unsigned heads, unsigned tokens) : heads(heads), tokens(tokens) {
    head = row % heads;
    token = row / heads % tokens;
    example = row / heads / tokens;
    heads_on = step % heads;
    tokens_on = step / heads % tokens;
    examples_on = step / heads / tokens;
  }

  __device__ void advance() {
    head += heads_on;
    token += tokens_on;
    example += examples_on;
    if (head >= heads) {
      head -= heads;
      ++token;
    }
    if (token >= tokens) {
      token -= tokens;
      ++example;
    }
  }

 private:
  unsigned heads, tokens, heads_on, tokens_on, examples_on;
};

// Walks through the rows that this block has of query or of key. Each is taken from registers, and the next one is loaded
// before it is computed.
template <class S, class Heads> __device__ void walk(const RotaryNormArgs& args, int part, Heads& heads) {
  using Lane = HeadLane<S>;
  const unsigned block = part == 0 ? blockIdx.x : blockIdx.x - args.query_blocks;
  const unsigned step = (part == 0 ? args.query_blocks : gridDim.x - args.query_blocks) * Lane::kBlockHeads;
  const unsigned behind = threadIdx.x % 32 / Lane::kLanes;
  const unsigned warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler so knows that its lanes go on together
  const i64 rows = args.rows[part];
  i64 first = block * Lane::kBlockHeads + warp * Lane::kWarpHeads;  // of this warp
  HeadWalk place(static_cast<unsigned>(first) + behind, step, args.rotary.heads[part], args.rotary.tokens);
  typename Heads::Row row;
  heads.fetch(place, first + behind < rows, row);
  while (first < rows) {
    typename Heads::Now now;
    heads.take(row, now);
    first += step;
    place.advance();
    if constexpr (S::kPrefetch) heads.fetch(place, first + behind < rows, row);
    heads.serve(now);
    if constexpr (!S::kPrefetch) heads.fetch(place, first + behind < rows, row);
  }
}

// The place of a row. A row past the end has the place of the first one, of which nothing is stored then.
struct RowPlace {
  unsigned example, token, head;

  __device__ RowPlace(const HeadWalk& at, bool live)
      : example(live ? at.example : 0), token(live ? at.token : 0), head(live ? at.head : 0) {}
  __device__ i64 offset(const long long (&stride)[3]) const {
    return example * stride[0] + token * stride[1] + head * stride[2];
  }
};

template <class S, class W> struct RotaryNormHeads {
  using A = typename S::Acc;
  using X = typename S::X;
  using Lane = HeadLane<S>;
  using Weight = LaneWeight<S, W>;

  struct Row {
    typename Lane::template Packs<X> x;
    LaneAngles<S> angles;
    X* y;
    bool live;
  };
  struct Now {
    typename Lane::Values v;
    LaneAngles<S> angles;
    X* y;
    bool live;
  };

  const RotaryNormArgs& args;
  const int part;
  const Lane at;
  Weight weight;

  __device__ RotaryNormHeads(const RotaryNormArgs& args, int part) : args(args), part(part) {
    weight.read(at, args.weight[part]);
  }

  __device__ void fetch(const HeadWalk& walk, bool live, Row& row) const {
    const RotaryHeads& heads = args.rotary.of[part];
    const RowPlace place(walk, live);
    row.live = live;
    row.y = static_cast<X*>(heads.y) + place.offset(heads.y_stride);
    at.template read<S::kAlign>(static_cast<const X*>(heads.x) + place.offset(heads.x_stride), row.x);
    row.angles.read(at, RotaryToken<S>(args.rotary, place.example, place.token));
  }

  __device__ void take(const Row& row, Now& now) const {
#pragma unroll
    for (int i = 0; i < Lane::kHeld; ++i) widen_unit(row.x[i], now.v[i]);
    now.angles.take(row.angles);
    now.y = row.y;
    now.live = row.live;
  }

  // All lanes of a warp call this.
  __device__ void serve(Now& now) const {
    A squares = 0;
#pragma unroll
    for (int i = 0; i < Lane::kHeld; ++i)
#pragma unroll
      for (int e = 0; e < Lane::kWidth; ++e) squares = fused(now.v[i][e], now.v[i][e], squares);
    const A rstd = rstd_of<S>(sum_lanes<Lane::kLanes>(squares), args.eps);
#pragma unroll
    for (int i = 0; i < Lane::kHeld; ++i) {
      A(&v)[Lane::kWidth] = now.v[i];
#pragma unroll
      for (int e = 0; e < Lane::kWidth; ++e) v[e] = product(v[e], rstd);
      round_all<S::kRounds, X>(v);
      if constexpr (kPresent<W>) {
        A w[Lane::kWidth];
        weight.get(i, static_cast<A>(args.weight_offset), w);
#pragma unroll
        for (int e = 0; e < Lane::kWidth; ++e) v[e] = product(v[e], w[e]);
        round_all<Weight::kRoundsProduct, X>(v);
      }
      now.angles.template turn<Weight::kRoundsTurn>(at, i, v);
    }
    if (now.live) at.template write<S::kAlignOut>(now.y, now.v);
  }

  __device__ void run() { walk<S>(args, part, *this); }
};

// Heads<S, W>::run for this block's part.
template <class S, template <class, class> class Heads> __device__ void run_part(const RotaryNormArgs& args) {
  wait_for_previous_kernel();
  const bool is_key = blockIdx.x >= args.query_blocks;
  if (kSame<typename S::QueryWeight, typename S::KeyWeight> || !is_key) Heads<S, typename S::QueryWeight>(args, is_key).run();
  else Heads<S, typename S::KeyWeight>(args, is_key).run();
}

template <class S> __device__ void rotary_norm(const RotaryNormArgs& args) { run_part<S, RotaryNormHeads>(args); }

}  // namespace kf
