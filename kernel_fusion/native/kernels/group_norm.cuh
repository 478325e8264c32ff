// y = act((norm(x + add) * weight + bias) * factor + shift), the norm over the D channels of a group and all positions of a
// sample.
//
// add, shift and factor = scale_offset + scale have one element per sample and channel. The products are taken in this order,
// because weight * factor and bias * factor of infinite numbers would turn infinite results into NaN. Few rows are long, so
// the positions are cut into pieces:
//
//   moments   mean and squared deviations of each channel in each piece
//   finish    joins a group's, by Chan's formula
//   apply     y
//
// `row` does all that in one block, for short rows. Memory: two reads of x and one write of y; the second read of a short
// row comes from caches.
//
// Contiguous: a line of kLanes threads takes a piece of one channel, whose parameters are numbers. Channels last: a thread
// has a vector of channels in all positions of its line; kLanes threads are neighbours, and a block takes a tile of
// channels in a piece of the positions. The order of sums depends on the sizes of one sample alone.
//
// Each thread shifts by the first element that it reads: squares about it are at most as many times those about the mean
// as the thread has elements.
#pragma once

#include "math.cuh"
#include "shared/group_norm_args.h"
#include "tree.cuh"
#include "vectors.cuh"

namespace kf {

// a / b of numbers that are not negative, mostly by a 32-bit division.
__device__ inline i64 quotient(i64 a, i64 b) {
  if ((a | b) >> 32 == 0) return static_cast<unsigned>(a) / static_cast<unsigned>(b);
  return a / b;
}
__device__ inline i64 remainder(i64 a, i64 b) { return a - quotient(a, b) * b; }
__device__ inline i64 groups_of(const GroupNormArgs& args) { return quotient(args.channels, args.depth); }

// ---- Moments ---------------------------------------------------------------------------------------------------------------

// The mean of some elements, and the sum of squared deviations from it. `rest` is what rounding took from the mean: one part
// joins many, and far from zero each rounding would be as large as that of the final mean.
template <class A> struct Part {
  A count, mean, rest, squares;

  __device__ void join(const Part& other) {
    if (other.count == A(0)) return;
    if (count == A(0)) {
      *this = other;
      return;
    }
    const A all = count + other.count, share = other.count / all, apart = (other.mean - mean) + (other.rest - rest);
    move_mean(apart * share);
    squares += fused(apart * apart, count * share, other.squares);
    count = all;
  }
  // Adds to the mean, and what that rounds away to the rest.
  __device__ void move_mean(A by) {
    const A moved = mean + by, step = moved - mean;
    rest += (mean - (moved - step)) + (by - step);
    mean = moved;
  }
};

// The sums of the elements that a thread reads, less the first of them.
template <class A> struct Gathered {
  A count = 0, shift = 0, sum = 0, squares = 0;

  template <int kVec> __device__ void add(const A (&v)[kVec]) {
    if (count == A(0)) shift = v[0];
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const A d = v[e] - shift;
      sum += d;
      squares = fused(d, d, squares);
    }
    count += A(kVec);
  }
  __device__ Part<A> part() const {
    if (count == A(0)) return {0, 0, 0, 0};
    const A off = sum / count, about_mean = fused(-off, sum, squares);
    const bool finite = squares - squares == A(0);  // else the correction may be infinite
    Part<A> made{count, shift, 0, finite ? (about_mean < A(0) ? A(0) : about_mean) : squares};
    made.move_mean(off);
    return made;
  }
};

// Joins the parts of kLanes lanes of a warp into the first of them.
template <int kLanes, class A> __device__ Part<A> join_lanes(Part<A> part) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    part.join({__shfl_down_sync(~0u, part.count, step, kLanes), __shfl_down_sync(~0u, part.mean, step, kLanes),
               __shfl_down_sync(~0u, part.rest, step, kLanes), __shfl_down_sync(~0u, part.squares, step, kLanes)});
  return part;
}

// Joins the parts of each line of kLanes threads into that of its first thread. Every thread of the block calls this.
template <int kLanes, int kThreads, class A> __device__ Part<A> join_line(Part<A> part) {
  part = join_lanes<(kLanes < 32 ? kLanes : 32)>(part);
  if constexpr (kLanes > 32) {
    __shared__ A table[kThreads / 32][4];
    const int warp = threadIdx.x / 32;
    __syncthreads();  // a former use of the table
    if (threadIdx.x % 32 == 0) {
      table[warp][0] = part.count;
      table[warp][1] = part.mean;
      table[warp][2] = part.rest;
      table[warp][3] = part.squares;
    }
    __syncthreads();
    if (threadIdx.x % kLanes == 0)
#pragma unroll
      for (int w = 1; w < kLanes / 32; ++w)
        part.join({table[warp + w][0], table[warp + w][1], table[warp + w][2], table[warp + w][3]});
  }
  return part;
}

// ---- Numbers of a channel --------------------------------------------------------------------------------------------------

template <class A, class T> __device__ A number(const void* p, i64 i, A otherwise) {
  if constexpr (kPresent<T>) return widen<A>(static_cast<const T*>(p)[i]);
  else return otherwise;
}

// What one channel of one sample has: its parameters, in the compute type.
template <class S> struct Channel {
  using A = typename S::Acc;
  A weight, bias, factor, shift, add;

  // The numbers of channel c of a sample, which is channel `at` among those of all samples.
  __device__ Channel(const GroupNormArgs& args, i64 c, i64 at)
      : weight(number<A, typename S::Weight>(args.weight, c, 1)), bias(number<A, typename S::Bias>(args.bias, c, 0)), factor(1),
        shift(number<A, typename S::Shift>(args.shift, at, 0)), add(added(args, at)) {
    if constexpr (kPresent<typename S::Scale>)
      factor = static_cast<A>(args.scale_offset) + number<A, typename S::Scale>(args.scale, at, 0);
  }
  __device__ static A added(const GroupNormArgs& args, i64 at) { return number<A, typename S::Add>(args.add, at, 0); }

  __device__ A scaled() const { return weight * factor; }  // dz over d norm(x + add)
};

// x + add
template <class S, class A> __device__ A with_added(A x, A add) {
  if constexpr (kPresent<typename S::Add>) return x + add;
  else return x;
}

// The argument of the activation, from deviations: (deviation * scale + bias) * factor + shift. Without a factor, `bias` is
// the sum of bias and shift.
template <class S> struct Argument {
  using A = typename S::Acc;
  A scale, bias, factor, shift;

  __device__ Argument() {}
  __device__ Argument(const Channel<S>& channel, A rstd)
      : scale(rstd * channel.weight), bias(channel.bias), factor(channel.factor), shift(channel.shift) {
    if constexpr (!kPresent<typename S::Scale>) bias += shift;
  }
  __device__ A operator()(A deviation) const {
    const A n = fused(deviation, scale, bias);
    if constexpr (kPresent<typename S::Scale>) return fused(n, factor, shift);
    else return n;
  }
};

// y of one channel.
template <class S> struct Applied {
  using A = typename S::Acc;
  using M = typename MathFor<A, typename S::Y>::type;
  A add, mean;
  Argument<S> argument;

  __device__ Applied() {}
  __device__ Applied(const GroupNormArgs& args, i64 c, i64 at, A mean, A rstd) : mean(mean) {
    const Channel<S> channel(args, c, at);
    add = channel.add;
    argument = Argument<S>(channel, rstd);
  }
  __device__ A operator()(A x) const {
    const A z = argument(with_added<S>(x, add) - mean);
    if constexpr (S::kActivation != 0) return Activation<S::kActivation>::type::template value<M>(z);
    else return z;
  }
};

// ---- Contiguous: lines of threads ------------------------------------------------------------------------------------------

// A piece of a channel, for one line of threads.
template <class S> struct Stretch {
  i64 channel, begin;  // among all channels of all samples; the first element
  int vectors;

  __device__ Stretch(const GroupNormArgs& args, i64 channel, i64 piece, bool inside)
      : channel(channel), begin(channel * args.positions + piece * args.piece), vectors(0) {
    const i64 rest = args.positions - piece * args.piece;
    if (inside) vectors = static_cast<int>((rest < args.piece ? rest : args.piece) / S::kVec);
  }

  // Stretch `number` of all; outside it is empty.
  __device__ static Stretch of(const GroupNormArgs& args, i64 number) {
    const bool inside = number < args.samples * args.channels * args.pieces;
    const i64 channel = inside ? quotient(number, args.pieces) : 0;
    return Stretch(args, channel, inside ? number - channel * args.pieces : 0, inside);
  }
};

template <class S> __device__ int lane_of_line() { return static_cast<int>(threadIdx.x) % S::kLanes; }
template <class S> __device__ int line_of_block() { return static_cast<int>(threadIdx.x) / S::kLanes; }
template <class S> inline constexpr int kLines = S::kThreads / S::kLanes;

template <class S> __device__ const typename S::X* x_of(const GroupNormArgs& args) {
  return static_cast<const typename S::X*>(args.x);
}

template <class S> __device__ void gather(const GroupNormArgs& args, const Stretch<S>& at, Gathered<typename S::Acc>& all) {
  using A = typename S::Acc;
  using Vector = Pack<typename S::X, S::kVec>;
  const auto* p = x_of<S>(args) + at.begin;
  const A add = Channel<S>::added(args, at.channel);
  batched<S::kUnroll>(
      lane_of_line<S>(), at.vectors, S::kLanes, [&](int v) { return load<S::kAlign, S::kVec>(p + i64(v) * S::kVec); },
      [&](int, const Vector& pack) {
        A x[S::kVec];
        widen_pack(pack, x);
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) x[e] = with_added<S>(x[e], add);
        all.add(x);
      });
}

template <class S> __device__ void apply(const GroupNormArgs& args, const Stretch<S>& at, const Applied<S>& value) {
  using A = typename S::Acc;
  using Vector = Pack<typename S::X, S::kVec>;
  const auto* p = x_of<S>(args) + at.begin;
  auto* out = static_cast<typename S::Y*>(args.y) + at.begin;
  batched<S::kUnroll>(
      lane_of_line<S>(), at.vectors, S::kLanes, [&](int v) { return load<S::kAlign, S::kVec>(p + i64(v) * S::kVec); },
      [&](int v, const Vector& pack) {
        A x[S::kVec];
        widen_pack(pack, x);
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) x[e] = value(x[e]);
        store<S::kAlignOut>(out + i64(v) * S::kVec, narrow_pack<typename S::Y>(x));
      });
}

// ---- Channels last: tiles of channels --------------------------------------------------------------------------------------

// A block's tile: kLanes vectors of channels in a piece of a sample's positions, with a thread's place in it.
template <class S> struct Tiled {
  i64 sample, piece, channel, position, end;
  bool inside;

  __device__ Tiled(const GroupNormArgs& args, i64 block) {
    constexpr int kSpan = S::kLanes * S::kVec;
    const i64 tiles = (args.channels + kSpan - 1) / kSpan, of_tile = quotient(block, tiles);
    sample = quotient(of_tile, args.pieces);
    piece = of_tile - sample * args.pieces;
    channel = (block - of_tile * tiles) * kSpan + lane_of_line<S>() * S::kVec;
    inside = channel < args.channels;
    position = piece * args.piece + line_of_block<S>();
    end = piece * args.piece + args.piece;
    if (end > args.positions) end = args.positions;
    if (!inside) end = 0;
  }
  __device__ i64 element(const GroupNormArgs& args, i64 p) const {
    return (sample * args.positions + p) * args.channels + channel;
  }
  __device__ i64 number(const GroupNormArgs& args, int e) const { return sample * args.channels + channel + e; }
  __device__ i64 part(const GroupNormArgs& args, int e) const {
    return (sample * args.pieces + piece) * args.channels + channel + e;
  }
};

// Joins values of the lines of a block, kVec in each thread, into those of line 0. Every thread calls this.
template <class S, class T, class Join> __device__ void join_lines(T (&values)[S::kVec], const Join& join) {
  __shared__ T table[S::kVec][S::kThreads];
  const int line = line_of_block<S>();
#pragma unroll
  for (int half = kLines<S> / 2; half > 0; half /= 2) {
    __syncthreads();
    if (line >= half && line < 2 * half) {
#pragma unroll
      for (int e = 0; e < S::kVec; ++e) table[e][threadIdx.x] = values[e];
    }
    __syncthreads();
    if (line < half) {
#pragma unroll
      for (int e = 0; e < S::kVec; ++e) join(values[e], table[e][threadIdx.x + half * S::kLanes]);
    }
  }
}

// ---- Kernels ---------------------------------------------------------------------------------------------------------------

template <class A> __device__ void store_part(const GroupNormArgs& args, i64 i, const Part<A>& part) {
  A* p = static_cast<A*>(args.parts) + 3 * i;
  p[0] = part.mean;
  p[1] = part.rest;
  p[2] = part.squares;
}

template <class S> __device__ void moments_of_stretch(const GroupNormArgs& args) {
  using A = typename S::Acc;
  const i64 number = static_cast<i64>(blockIdx.x) * kLines<S> + line_of_block<S>();
  const auto at = Stretch<S>::of(args, number);
  Gathered<A> all;
  gather<S>(args, at, all);
  const Part<A> part = join_line<S::kLanes, S::kThreads>(all.part());
  if (lane_of_line<S>() == 0 && at.vectors > 0) store_part(args, number, part);
}

template <class S> __device__ void moments_of_tile(const GroupNormArgs& args) {
  using A = typename S::Acc;
  using Vector = Pack<typename S::X, S::kVec>;
  const Tiled<S> at(args, blockIdx.x);
  A shift[S::kVec] = {}, sum[S::kVec] = {}, squares[S::kVec] = {}, add[S::kVec] = {}, count = 0;
  if (at.inside)
#pragma unroll
    for (int e = 0; e < S::kVec; ++e) add[e] = Channel<S>::added(args, at.number(args, e));
  batched<S::kUnroll>(
      at.position, at.end, static_cast<i64>(kLines<S>),
      [&](i64 p) { return load<S::kAlign, S::kVec>(x_of<S>(args) + at.element(args, p)); },
      [&](i64, const Vector& pack) {
        A x[S::kVec];
        widen_pack(pack, x);
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) {
          const A v = with_added<S>(x[e], add[e]);
          if (count == A(0)) shift[e] = v;
          const A d = v - shift[e];
          sum[e] += d;
          squares[e] = fused(d, d, squares[e]);
        }
        count += A(1);
      });
  Part<A> parts[S::kVec];
#pragma unroll
  for (int e = 0; e < S::kVec; ++e) parts[e] = Gathered<A>{count, shift[e], sum[e], squares[e]}.part();
  join_lines<S>(parts, [](Part<A>& mine, const Part<A>& other) { mine.join(other); });
  if (line_of_block<S>() > 0 || !at.inside) return;
#pragma unroll
  for (int e = 0; e < S::kVec; ++e) store_part(args, at.part(args, e), parts[e]);
}

// The index of part i of a group among all parts, and the positions that it has.
template <class S> struct PartOfGroup {
  i64 index, count;

  __device__ PartOfGroup(const GroupNormArgs& args, i64 group, i64 i) {
    const i64 groups = groups_of(args), sample = quotient(group, groups), first = group * args.depth;
    i64 piece;
    if constexpr (S::kChannelsLast) {
      piece = quotient(i, args.depth);
      index = (sample * args.pieces + piece) * args.channels + (first - sample * args.channels) + (i - piece * args.depth);
    } else {
      piece = remainder(i, args.pieces);
      index = first * args.pieces + i;
    }
    count = piece + 1 < args.pieces ? args.piece : args.positions - piece * args.piece;
  }
};

// Stores a group's statistics, of which the first thread has the moments.
template <class A> __device__ void store_stats(const GroupNormArgs& args, i64 group, const Part<A>& all, A (&stats)[2]) {
  const A variance = all.squares / all.count;
  stats[0] = all.mean + all.rest;
  stats[1] = reciprocal_sqrt(variance + static_cast<A>(args.eps));
  A* p = static_cast<A*>(args.stats) + group;
  p[0] = stats[0];
  p[args.samples * groups_of(args)] = stats[1];
}

template <class S> __device__ void finish_moments(const GroupNormArgs& args) {
  using A = typename S::Acc;
  const i64 group = blockIdx.x, count = args.depth * args.pieces;
  const A* parts = static_cast<const A*>(args.parts);
  Part<A> all{};
  batched<4>(
      static_cast<i64>(threadIdx.x), count, static_cast<i64>(S::kThreads),
      [&](i64 i) {
        const PartOfGroup<S> at(args, group, i);
        const A* part = parts + 3 * at.index;
        return Part<A>{static_cast<A>(at.count), part[0], part[1], part[2]};
      },
      [&](i64, const Part<A>& each) { all.join(each); });
  all = join_line<S::kThreads, S::kThreads>(all);
  A stats[2];
  if (threadIdx.x == 0) store_stats(args, group, all, stats);
}

template <class S> __device__ void apply_to_tile(const GroupNormArgs& args) {
  using A = typename S::Acc;
  using Vector = Pack<typename S::X, S::kVec>;
  const Tiled<S> at(args, gridDim.x - 1 - blockIdx.x);  // what was read last is still in L2
  if (!at.inside) return;
  const i64 groups = groups_of(args);
  const A* stats = static_cast<const A*>(args.stats) + at.sample * groups;
  Applied<S> value[S::kVec];
#pragma unroll
  for (int e = 0; e < S::kVec; ++e) {
    const i64 group = quotient(at.channel + e, args.depth);
    value[e] = Applied<S>(args, at.channel + e, at.number(args, e), stats[group], stats[args.samples * groups + group]);
  }
  auto* out = static_cast<typename S::Y*>(args.y);
  batched<S::kUnroll>(
      at.position, at.end, static_cast<i64>(kLines<S>),
      [&](i64 p) { return load<S::kAlign, S::kVec>(x_of<S>(args) + at.element(args, p)); },
      [&](i64 p, const Vector& pack) {
        A x[S::kVec];
        widen_pack(pack, x);
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) x[e] = value[e](x[e]);
        store<S::kAlignOut>(out + at.element(args, p), narrow_pack<typename S::Y>(x));
      });
}

template <class S> __device__ void apply_to_stretch(const GroupNormArgs& args) {
  using A = typename S::Acc;
  const i64 number = static_cast<i64>(gridDim.x - 1 - blockIdx.x) * kLines<S> + line_of_block<S>();
  const auto at = Stretch<S>::of(args, number);
  if (at.vectors == 0) return;
  const i64 group = quotient(at.channel, args.depth);
  const A* stats = static_cast<const A*>(args.stats) + group;
  const A mean = stats[0], rstd = stats[args.samples * groups_of(args)];
  apply<S>(args, at, Applied<S>(args, remainder(at.channel, args.channels), at.channel, mean, rstd));
}

template <class S> __device__ void row(const GroupNormArgs& args) {
  using A = typename S::Acc;
  const i64 group = blockIdx.x, first = group * args.depth;
  Gathered<A> gathered;
  for (i64 d = line_of_block<S>(); d < args.depth; d += kLines<S>) gather<S>(args, {args, first + d, 0, true}, gathered);
  const Part<A> all = join_line<S::kThreads, S::kThreads>(gathered.part());
  __shared__ A stats[2];
  if (threadIdx.x == 0) store_stats(args, group, all, stats);
  __syncthreads();
  for (i64 d = line_of_block<S>(); d < args.depth; d += kLines<S>)
    apply<S>(args, {args, first + d, 0, true},
             Applied<S>(args, remainder(first + d, args.channels), first + d, stats[0], stats[1]));
}

template <class S> __device__ void group_norm(const GroupNormArgs& args) {
  wait_for_previous_kernel();
  if constexpr (S::kStep == GroupStep::kRow) row<S>(args);
  else if constexpr (S::kStep == GroupStep::kFinish) finish_moments<S>(args);
  else if constexpr (S::kStep == GroupStep::kMoments && S::kChannelsLast) moments_of_tile<S>(args);
  else if constexpr (S::kStep == GroupStep::kMoments) moments_of_stretch<S>(args);
  else if constexpr (S::kChannelsLast) apply_to_tile<S>(args);
  else apply_to_stretch<S>(args);
}

}  // namespace kf
