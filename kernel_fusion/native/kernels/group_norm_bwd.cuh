// The gradients of group norms (group_norm.cuh), from dy, x and the statistics. With z, the argument of the activation,
// g = dy * act'(z), v = weight * factor, and sums over the positions of a channel
//
//   A = sum g,  B = sum g * xhat,  K = sum xhat                     xhat = deviation * rstd; rstd comes after the sums
//   m1 = sum over a group of v * A / M,  m2 = sum of v * B / M      M: the elements of a group
//
//   dx = rstd * (v * g - m1 - xhat * m2)
//   dadd = rstd * (v * A - positions * m1 - m2 * K)
//   dscale = weight * B + bias * A,  dshift = A
//   dweight, dbias: sums over samples of factor * B, factor * A     factor: scale_offset + scale
//
// `sums` makes those of pieces, `finish_bwd` the rest but dx, which `dx` makes; `row_bwd` does all that for a short row.
// Memory: two reads of x and dy, one write of dx; of short rows one read.
#pragma once

#include "group_norm.cuh"

namespace kf {

template <class S> inline constexpr int kSums = S::kSumsX ? 3 : 2;

// ---- Sums of a channel -----------------------------------------------------------------------------------------------------

template <class A, int kCount> struct Sums {
  A of[kCount];

  __device__ Sums& operator+=(const Sums& other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) of[i] += other.of[i];
    return *this;
  }
};

// Adds the sums of kLanes threads, a line; the first one has the result. Every thread of the block calls this.
template <int kLanes, int kThreads, class A, int kCount> __device__ void add_line(Sums<A, kCount>& sums) {
#pragma unroll
  for (int step = (kLanes < 32 ? kLanes : 32) / 2; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums.of[i] += __shfl_down_sync(~0u, sums.of[i], step, kLanes < 32 ? kLanes : 32);
  if constexpr (kLanes > 32) {
    __shared__ Sums<A, kCount> table[kThreads / 32];
    const int warp = threadIdx.x / 32;
    __syncthreads();  // a former use of the table
    if (threadIdx.x % 32 == 0) table[warp] = sums;
    __syncthreads();
    if (threadIdx.x % kLanes == 0)
#pragma unroll
      for (int w = 1; w < kLanes / 32; ++w) sums += table[warp + w];
  }
}

// g and the deviations of elements of one channel.
template <class S> struct Incoming {
  using A = typename S::Acc;
  using M = typename SharedMathFor<A, typename S::X, typename S::Finest>::type;
  A add, mean, rstd, scale;  // scale: dz over a deviation's change
  Argument<S> argument;

  __device__ Incoming() {}
  __device__ Incoming(const GroupNormArgs& args, i64 c, i64 at, A mean, A rstd) : mean(mean), rstd(rstd) {
    const Channel<S> channel(args, c, at);
    add = channel.add;
    scale = rstd * channel.scaled();
    argument = Argument<S>(channel, rstd);
  }
  __device__ A deviation(A x) const { return with_added<S>(x, add) - mean; }
  __device__ A gradient(A dy, A deviation) const {
    if constexpr (S::kActivation == 0) return dy;
    else return act::times_slope<typename Activation<S::kActivation>::type, M>(dy, argument(deviation));
  }
  __device__ void add_to(Sums<A, kSums<S>>& sums, A x, A dy) const {
    const A d = deviation(x), g = gradient(dy, d);
    sums.of[0] += g;
    sums.of[1] = fused(g, d, sums.of[1]);
    if constexpr (S::kSumsX) sums.of[2] += d;
  }
};

// dx of one channel.
template <class S> struct Outgoing {
  using A = typename S::Acc;
  Incoming<S> in;
  A constant, slope;  // of dx = g * in.scale - constant - deviation * slope

  __device__ Outgoing() {}
  __device__ Outgoing(const Incoming<S>& in, A m1, A m2) : in(in), constant(in.rstd * m1), slope(in.rstd * in.rstd * m2) {}
  __device__ A operator()(A x, A dy) const {
    const A d = in.deviation(x), g = in.gradient(dy, d);
    return fused(g, in.scale, fused(-d, slope, -constant));
  }
};

// A vector of x and the vector of dy at the same place.
template <class S> struct Both {
  Pack<typename S::X, S::kVec> x;
  Pack<typename S::Y, S::kVec> dy;

  __device__ Both(const GroupNormArgs& args, i64 i)
      : x(load<S::kAlign, S::kVec>(x_of<S>(args) + i)),
        dy(load<S::kAlignOut, S::kVec>(static_cast<const typename S::Y*>(args.dy) + i)) {}
  __device__ Both() {}
};

template <class S, class A> __device__ void store_dx(const GroupNormArgs& args, i64 i, const A (&v)[S::kVec]) {
  store<S::kAlign>(static_cast<typename S::X*>(args.y) + i, narrow_pack<typename S::X>(v));
}

// One of two numbers of a group in `p`: mean or rstd of `stats`, m1 or m2 of `means`.
template <class A> __device__ A of_group(const GroupNormArgs& args, const void* p, int which, i64 group) {
  return static_cast<const A*>(p)[which * args.samples * groups_of(args) + group];
}

// ---- Contiguous ------------------------------------------------------------------------------------------------------------

template <class S> __device__ Incoming<S> incoming(const GroupNormArgs& args, const Stretch<S>& at) {
  using A = typename S::Acc;
  const i64 group = quotient(at.channel, args.depth);
  return {args, remainder(at.channel, args.channels), at.channel, of_group<A>(args, args.stats, 0, group),
          of_group<A>(args, args.stats, 1, group)};
}

template <class S>
__device__ Sums<typename S::Acc, kSums<S>> sum_up(const GroupNormArgs& args, const Stretch<S>& at, const Incoming<S>& in) {
  using A = typename S::Acc;
  // Sums of a vector, of kChain vectors and of all: few additions to large sums, which round most.
  constexpr int kChain = 8;
  Sums<A, kSums<S>> sums{}, chain{};
  batched<S::kUnroll>(
      lane_of_line<S>(), at.vectors, S::kLanes, [&](int v) { return Both<S>(args, at.begin + i64(v) * S::kVec); },
      [&](int v, const Both<S>& both) {
        A x[S::kVec], dy[S::kVec];
        widen_pack(both.x, x);
        widen_pack(both.dy, dy);
        Sums<A, kSums<S>> few{};
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) in.add_to(few, x[e], dy[e]);
        chain += few;
        if (v / S::kLanes % kChain == kChain - 1) {
          sums += chain;
          chain = {};
        }
      });
  sums += chain;
  add_line<S::kLanes, S::kThreads>(sums);
  return sums;
}

template <class S> __device__ void write_dx(const GroupNormArgs& args, const Stretch<S>& at, const Outgoing<S>& out) {
  using A = typename S::Acc;
  batched<S::kUnroll>(
      lane_of_line<S>(), at.vectors, S::kLanes, [&](int v) { return Both<S>(args, at.begin + i64(v) * S::kVec); },
      [&](int v, const Both<S>& both) {
        A x[S::kVec], dy[S::kVec];
        widen_pack(both.x, x);
        widen_pack(both.dy, dy);
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) x[e] = out(x[e], dy[e]);
        store_dx<S>(args, at.begin + i64(v) * S::kVec, x);
      });
}

// ---- A group's sums become gradients ---------------------------------------------------------------------------------------

template <class S> __device__ typename S::Acc* sums_of(const GroupNormArgs& args, int which) {
  return static_cast<typename S::Acc*>(args.sums) + which * args.samples * args.channels;
}

template <class S>
__device__ void store_sums(const GroupNormArgs& args, i64 channel, const Sums<typename S::Acc, kSums<S>>& sums) {
#pragma unroll
  for (int i = 0; i < kSums<S>; ++i) sums_of<S>(args, i)[channel] = sums.of[i];
}

template <class T, class A> __device__ void store_number(void* p, i64 i, A v) {
  if constexpr (kPresent<T>)
    if (p) static_cast<T*>(p)[i] = narrow<T>(v);
}

// The threads of a block share the channels of a group; their sums are stored. The result, m1 and m2, is in shared memory.
template <class S> __device__ const typename S::Acc* finish_group(const GroupNormArgs& args, i64 group) {
  using A = typename S::Acc;
  __shared__ A means[2];
  const i64 first = group * args.depth;
  const A rstd = of_group<A>(args, args.stats, 1, group);
  Sums<A, 2> total{};
  __syncthreads();  // the sums are stored
  for (i64 d = threadIdx.x; d < args.depth; d += S::kThreads) {
    const i64 at = first + d, sample = quotient(at, args.channels), c = at - sample * args.channels;
    const Channel<S> channel(args, c, at);
    const A a = sums_of<S>(args, 0)[at], b = rstd * sums_of<S>(args, 1)[at], v = channel.scaled();
    total += {v * a, v * b};
    store_number<typename S::Scale>(args.dscale, at, fused(channel.weight, b, channel.bias * a));
    store_number<typename S::Shift>(args.dshift, at, a);
    if (args.dweight) static_cast<A*>(args.dweight)[sample * args.pitch + c] = channel.factor * b;
    if (args.dbias) static_cast<A*>(args.dbias)[sample * args.pitch + c] = channel.factor * a;
  }
  add_line<S::kThreads, S::kThreads>(total);
  if (threadIdx.x == 0) {
    const A per_element = A(1) / (static_cast<A>(args.depth) * static_cast<A>(args.positions));
    means[0] = total.of[0] * per_element;
    means[1] = total.of[1] * per_element;
  }
  __syncthreads();
  if constexpr (S::kSumsX) {
    const A m1 = means[0] * static_cast<A>(args.positions), m2 = means[1] * rstd;
    for (i64 d = threadIdx.x; d < args.depth; d += S::kThreads) {
      const i64 at = first + d;
      const A v = Channel<S>(args, remainder(at, args.channels), at).scaled();
      const A de = rstd * (fused(v, sums_of<S>(args, 0)[at], -m1) - m2 * sums_of<S>(args, 2)[at]);
      store_number<typename S::Add>(args.dadd, at, de);
    }
  }
  return means;
}

// ---- Kernels ---------------------------------------------------------------------------------------------------------------

template <class S> __device__ void store_part(const GroupNormArgs& args, i64 i, const Sums<typename S::Acc, kSums<S>>& sums) {
  auto* p = static_cast<typename S::Acc*>(args.parts) + i * kSums<S>;
#pragma unroll
  for (int k = 0; k < kSums<S>; ++k) p[k] = sums.of[k];
}

template <class S> __device__ void sums_of_stretch(const GroupNormArgs& args) {
  const i64 number = static_cast<i64>(blockIdx.x) * kLines<S> + line_of_block<S>();
  const auto at = Stretch<S>::of(args, number);
  const auto sums = sum_up<S>(args, at, incoming<S>(args, at));
  if (lane_of_line<S>() == 0 && at.vectors > 0) store_part<S>(args, number, sums);
}

template <class S> __device__ Incoming<S> incoming(const GroupNormArgs& args, const Tiled<S>& at, int e) {
  using A = typename S::Acc;
  const i64 c = at.channel + e, number = at.number(args, e), group = quotient(number, args.depth);
  return {args, c, number, of_group<A>(args, args.stats, 0, group), of_group<A>(args, args.stats, 1, group)};
}

template <class S> __device__ void sums_of_tile(const GroupNormArgs& args) {
  using A = typename S::Acc;
  using Of = Sums<A, kSums<S>>;
  const Tiled<S> at(args, blockIdx.x);
  Incoming<S> in[S::kVec];
  Of sums[S::kVec] = {};
  if (at.inside)
#pragma unroll
    for (int e = 0; e < S::kVec; ++e) in[e] = incoming<S>(args, at, e);
  batched<S::kUnroll>(
      at.position, at.end, static_cast<i64>(kLines<S>), [&](i64 p) { return Both<S>(args, at.element(args, p)); },
      [&](i64, const Both<S>& both) {
        A x[S::kVec], dy[S::kVec];
        widen_pack(both.x, x);
        widen_pack(both.dy, dy);
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) in[e].add_to(sums[e], x[e], dy[e]);
      });
  join_lines<S>(sums, [](Of& mine, const Of& other) { mine += other; });
  if (line_of_block<S>() > 0 || !at.inside) return;
#pragma unroll
  for (int e = 0; e < S::kVec; ++e) store_part<S>(args, at.part(args, e), sums[e]);
}

// Each warp adds the pieces of some channels.
template <class S> __device__ void finish_sums(const GroupNormArgs& args) {
  using A = typename S::Acc;
  using Of = Sums<A, kSums<S>>;
  const i64 group = blockIdx.x, first = group * args.depth;
  const int lane = threadIdx.x % 32;
  for (i64 d = threadIdx.x / 32; d < args.depth; d += S::kThreads / 32) {
    Of sums{};
    batched<4>(
        static_cast<i64>(lane), static_cast<i64>(args.pieces), i64(32),
        [&](i64 piece) {
          const i64 i = S::kChannelsLast ? piece * args.depth + d : d * args.pieces + piece;
          return static_cast<const Of*>(args.parts)[PartOfGroup<S>(args, group, i).index];
        },
        [&](i64, const Of& part) { sums += part; });
    add_line<32, 32>(sums);
    if (lane == 0) store_sums<S>(args, first + d, sums);
  }
  const A* found = finish_group<S>(args, group);
  if (threadIdx.x < 2) static_cast<A*>(args.means)[threadIdx.x * args.samples * groups_of(args) + group] = found[threadIdx.x];
}

template <class S> __device__ void dx_of_stretch(const GroupNormArgs& args) {
  using A = typename S::Acc;
  const i64 number = static_cast<i64>(gridDim.x - 1 - blockIdx.x) * kLines<S> + line_of_block<S>();
  const auto at = Stretch<S>::of(args, number);
  const i64 group = quotient(at.channel, args.depth);
  write_dx<S>(args, at,
              {incoming<S>(args, at), of_group<A>(args, args.means, 0, group), of_group<A>(args, args.means, 1, group)});
}

template <class S> __device__ void dx_of_tile(const GroupNormArgs& args) {
  using A = typename S::Acc;
  const Tiled<S> at(args, gridDim.x - 1 - blockIdx.x);
  if (!at.inside) return;
  Outgoing<S> out[S::kVec];
#pragma unroll
  for (int e = 0; e < S::kVec; ++e) {
    const i64 group = quotient(at.number(args, e), args.depth);
    out[e] = {incoming<S>(args, at, e), of_group<A>(args, args.means, 0, group), of_group<A>(args, args.means, 1, group)};
  }
  batched<S::kUnroll>(
      at.position, at.end, static_cast<i64>(kLines<S>), [&](i64 p) { return Both<S>(args, at.element(args, p)); },
      [&](i64 p, const Both<S>& both) {
        A x[S::kVec], dy[S::kVec];
        widen_pack(both.x, x);
        widen_pack(both.dy, dy);
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) x[e] = out[e](x[e], dy[e]);
        store_dx<S>(args, at.element(args, p), x);
      });
}

template <class S> __device__ void row_bwd(const GroupNormArgs& args) {
  using A = typename S::Acc;
  const i64 group = blockIdx.x, first = group * args.depth;
  const A mean = of_group<A>(args, args.stats, 0, group), rstd = of_group<A>(args, args.stats, 1, group);
  for (i64 base = 0; base < args.depth; base += kLines<S>) {  // all threads together
    const i64 d = base + line_of_block<S>();
    const bool inside = d < args.depth;
    const Stretch<S> at(args, inside ? first + d : first, 0, inside);
    const auto sums = sum_up<S>(args, at, Incoming<S>(args, remainder(at.channel, args.channels), at.channel, mean, rstd));
    if (inside && lane_of_line<S>() == 0) store_sums<S>(args, at.channel, sums);
  }
  const A* found = finish_group<S>(args, group);
  if (!args.y) return;
  const A m1 = found[0], m2 = found[1];
  for (i64 d = line_of_block<S>(); d < args.depth; d += kLines<S>) {
    const Incoming<S> in(args, remainder(first + d, args.channels), first + d, mean, rstd);
    write_dx<S>(args, {args, first + d, 0, true}, {in, m1, m2});
  }
}

template <class S> __device__ void group_norm_bwd(const GroupNormArgs& args) {
  wait_for_previous_kernel();
  if constexpr (S::kStep == GroupStep::kRowBwd) row_bwd<S>(args);
  else if constexpr (S::kStep == GroupStep::kFinishBwd) finish_sums<S>(args);
  else if constexpr (S::kStep == GroupStep::kSums && S::kChannelsLast) sums_of_tile<S>(args);
  else if constexpr (S::kStep == GroupStep::kSums) sums_of_stretch<S>(args);
  else if constexpr (S::kChannelsLast) dx_of_tile<S>(args);
  else dx_of_stretch<S>(args);
}

}  // namespace kf
