// dx = scale * (dy - sum(dy * y)) * y over rows of run-time length: the policy (row_executors.cuh). Left out elements have
// y = 0, so dx = 0; with kLeavesOut even in a row with NaN. Memory: one read of dy and y, one write of dx.
#pragma once

#include "row_executors.cuh"
#include "shared/reduce_args.h"
#include "sums.cuh"

namespace kf {

template <class S> struct SoftmaxBwd {
  using A = typename S::Acc;
  using DX = typename S::DX;
  using Args = SoftmaxBwdArgs;
  using First = typename S::DY;
  using Second = typename S::Y;
  static constexpr bool kLimited = false;
  static constexpr int kVec = S::kVec, kAlignFirst = S::kAlignDY, kAlignSecond = S::kAlignY;
  struct Loaded {
    Pack<First, kVec> dy;
    Pack<Second, kVec> y;
  };
  using Held = Loaded;

  const First* first;
  const Second* second;
  DX* dx;
  A scale;

  __device__ SoftmaxBwd(const SoftmaxBwdArgs& args, i64 row)
      : first(static_cast<const First*>(args.dy) + row_offset<S::kStridedDY, true>(args.dy_rows, row)),
        second(static_cast<const Second*>(args.y) + row_offset<S::kStridedY, true>(args.y_rows, row)),
        dx(static_cast<DX*>(args.dx) + row * args.cols), scale(static_cast<A>(args.scale)) {}

  __device__ static int limit(int end) { return end; }
  __device__ Loaded load(int col) const {
    return {kf::load<S::kAlignDY, kVec>(first + col), kf::load<S::kAlignY, kVec>(second + col)};
  }
  __device__ static void hold(int, int, const Loaded& loaded, Held& held, bool = false) { held = loaded; }

  __device__ static void add(const Held& held, A (&sums)[kVec]) {
    A g[kVec], p[kVec];
    widen_pack(held.dy, g);
    widen_pack(held.y, p);
#pragma unroll
    for (int e = 0; e < kVec; ++e) sums[e] = fused(g[e], p[e], sums[e]);
  }
  template <class At, int kVectors> __device__ static Pair<A> of_warp(const At& at, int limit, const Held (&held)[kVectors]) {
    A sums[kVec] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (at.col(i) < limit) add(held[i], sums);
    return {sum_lanes<S::kLanes>(sum_elements(sums)), 0};
  }
  struct Running {
    A sums[kVec] = {};

    __device__ void add(const Held& held) { SoftmaxBwd::add(held, sums); }
    __device__ Pair<A> of_warp() { return {sum_lanes<S::kLanes>(sum_elements(sums)), 0}; }
  };

  __device__ static Pair<A> join(int lane, const A (*slots)[2]) {
    return {Exchange<S>::sum(lane, [&](int w) { return slots[w][0]; }), 0};
  }
  __device__ static A finish(const Pair<A>& whole) { return whole.first; }
  __device__ static A finish_anew(const Pair<A>& whole) { return whole.first; }
  __device__ static A finish(const Pair<A>&, const Pair<A>& whole) { return whole.first; }

  __device__ void write(int col, const Held& held, A sum) const {
    A g[kVec], p[kVec];
    widen_pack(held.dy, g);
    widen_pack(held.y, p);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      g[e] = scale * ((g[e] - sum) * p[e]);
      if constexpr (S::kLeavesOut) g[e] = p[e] == A(0) ? A(0) : g[e];
    }
    store<S::kAlignDX>(dx + col, narrow_pack<DX>(g));
  }
  __device__ void write_anew(int col, const Held& held, A sum) const { write(col, held, sum); }
};

template <class S> __device__ void softmax_bwd(const SoftmaxBwdArgs& args) { run_rows<SoftmaxBwd, S>(args); }

}  // namespace kf
