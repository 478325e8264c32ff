// Several warps' work for one warp.
#pragma once

#include "tree.cuh"

namespace kf {

// The stretches of S::kShares neighbouring warps of the tree, which one warp executes: its vectors one after the other.
template <class S> struct Stretches {
  using P = Place<S>;
  static constexpr int kShares = S::kShares, kVectors = kShares * P::kVectors;
  static_assert(kShares == 1 || (S::kLanes == 32 && S::kCluster == 1));
  P of[kShares];
  int lane, row, warp, first;  // warp of the block

  __device__ Stretches() : Stretches(P(), threadIdx.x) {}
  __device__ static Stretches anew() {
    unsigned member;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(member));
    return {P(member), member};
  }
  __device__ int col(int i) const { return of[i / P::kVectors].col(i % P::kVectors); }
  __device__ bool leader() const { return lane == 0 && warp == 0; }

 private:
  __device__ Stretches(const P& place, unsigned member) : lane(place.lane), row(place.row), warp(place.warp) {
    of[0] = place;
    if constexpr (kShares > 1) {
      lane = member % 32;
      warp = member / 32;
#pragma unroll
      for (int k = 0; k < kShares; ++k) {
        of[k].lane = lane;
        of[k].warp = warp * kShares + k;
        of[k].first = P::start(of[k].warp) + lane * S::kVec;
      }
    }
    first = of[0].first;
  }
};

}  // namespace kf
