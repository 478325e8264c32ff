// A backward thread keeps these of its columns: weight, bias, and the column sums.
#pragma once

#include "gradients.cuh"

namespace kf {

// Parameters in the compute type in registers, in shared memory, or not kept.
enum class Keeping { kWide, kShared, kMemory };

// A parameter of a thread's columns; its first kKept vectors are kept for all rows.
template <class S, class T, int kKept, Keeping kKeeping, bool kFactor> struct ColumnParameter {
  using A = typename S::Acc;
  static constexpr int kVec = S::kVec, kPieces = sizeof(Pack<T, kVec>) <= 16 ? 1 : sizeof(Pack<T, kVec>) / 16;
  using Piece = Pack<T, kVec / kPieces>;  // 16 bytes of neighbouring threads are neighbours

  const RowNormBwdArgs& args;
  const Place<S>& at;
  Piece* shared;  // [kKept][kPieces][threads]
  int threads, member;
  Pack<T, kVec> loaded[kKeeping == Keeping::kMemory ? 1 : kKept];  // until keep()
  A wide[kKeeping == Keeping::kWide ? kKept : 1][kVec];

  // Starts loading what is kept; `threads` threads do so together for shared memory.
  __device__ ColumnParameter(const RowNormBwdArgs& args, const Place<S>& at, void* shared_bytes = nullptr, int threads = 0,
                             int member = 0)
      : args(args), at(at), shared(static_cast<Piece*>(shared_bytes)), threads(threads), member(member) {
    if constexpr (kKeeping == Keeping::kMemory) return;
#pragma unroll
    for (int i = 0; i < kKept; ++i) loaded[i] = load(i);
  }

  // Every thread calls this before get(). Threads with `writes` fill shared memory; then all must meet.
  __device__ void keep(bool writes = false) {
    if constexpr (kKeeping == Keeping::kMemory) return;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if constexpr (kKeeping == Keeping::kWide) {
        widen(loaded[i], wide[i]);
        // Opaque to the compiler, which would widen it for every row.
        if constexpr (kPresent<T> && sizeof(A) == 4)
#pragma unroll
          for (int e = 0; e < kVec; ++e) asm volatile("" : "+f"(wide[i][e]));
        // Waits for values that need no widening; else every row would wait for them and for `pace`, which shares their
        // scoreboard. fp32 rows wait longer for memory anyway.
        if constexpr (kPresent<T> && sizeof(T) == 4 && sizeof(typename S::X) < 4)
#pragma unroll
          for (int e = 0; e < kVec; e += 4) wide[i][e] = __shfl_sync(0xffffffffu, wide[i][e], threadIdx.x % 32);
      } else if (writes) {
#pragma unroll
        for (int j = 0; j < kPieces; ++j)
          shared[(i * kPieces + j) * threads + member] = reinterpret_cast<const Piece*>(&loaded[i])[j];
      }
    }
  }

  // This thread's i-th vector.
  __device__ void get(int i, A (&v)[kVec]) {
    if (kKeeping == Keeping::kMemory || i >= kKept) {
      widen(load(i), v);
    } else if constexpr (kKeeping == Keeping::kWide) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] = wide[i][e];
    } else {
      Pack<T, kVec> pack;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) reinterpret_cast<Piece*>(&pack)[j] = shared[(i * kPieces + j) * threads + member];
      widen(pack, v);
    }
  }

 private:
  __device__ Pack<T, kVec> load(int i) const {
    if constexpr (kFactor) return load_weight<S>(args, at.col(i));
    else return load_bias<S>(args, at.col(i));
  }
  __device__ void widen(const Pack<T, kVec>& pack, A (&v)[kVec]) const {
    widen_parameter<S, T, kFactor>(pack, args.weight_offset, v);
  }
};

template <class S> __device__ constexpr Keeping keeping_of_weight() {
  if (S::kKeeps == KeptParameters::kNothing) return Keeping::kMemory;
  return S::kKeeps == KeptParameters::kShared ? Keeping::kShared : Keeping::kWide;
}
template <class S, int kVectors>
using ColumnWeight = ColumnParameter<S, typename S::Weight, kVectors - S::kUnkept, keeping_of_weight<S>(), true>;
template <class S, int kVectors>
using ColumnBias = ColumnParameter<S, typename S::Bias, kVectors,
                                   S::kKeeps == KeptParameters::kBoth ? Keeping::kWide : Keeping::kMemory, false>;

// The column sums of this thread, kept as S::kSums says.
template <class S> struct Accumulators {
  using A = typename S::Acc;
  static constexpr int kVectors = Place<S>::kVectors;
  static constexpr int kPerQuad = S::kVec * sizeof(A) < 16 ? S::kVec : 16 / static_cast<int>(sizeof(A));
  static constexpr int kQuads = S::kVec / kPerQuad;
  struct alignas(kPerQuad * sizeof(A)) Quad {
    A v[kPerQuad];
  };

  A sums[kColumnSums<S>][S::kSums == KeptSums::kRegisters ? kVectors : 1][S::kVec];
  Quad* quads;  // [kColumnSums][kVectors][kQuads][blockDim.x]

  __device__ Quad& quad(int which, int i, int j) {
    return quads[((which * kVectors + i) * kQuads + j) * blockDim.x + threadIdx.x];
  }

  __device__ explicit Accumulators(void* shared) : quads(static_cast<Quad*>(shared)) {
#pragma unroll
    for (int which = 0; which < kColumnSums<S>; ++which) {
      if constexpr (S::kSums == KeptSums::kRegisters) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
#pragma unroll
          for (int e = 0; e < S::kVec; ++e) sums[which][i][e] = 0;
      } else if constexpr (S::kSums == KeptSums::kShared) {
        for (int i = 0; i < kVectors; ++i)
#pragma unroll
          for (int j = 0; j < kQuads; ++j) quad(which, i, j) = Quad{};
      }
    }
  }

  // Adds v times `factor`.
  __device__ void add(int which, int i, const A (&v)[S::kVec], A factor) {
    if constexpr (S::kSums == KeptSums::kRegisters) {
#pragma unroll
      for (int e = 0; e < S::kVec; ++e) sums[which][i][e] = fused(v[e], factor, sums[which][i][e]);
    } else if constexpr (S::kSums == KeptSums::kShared) {
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
        Quad s = quad(which, i, j);
#pragma unroll
        for (int e = 0; e < kPerQuad; ++e) s.v[e] = fused(v[j * kPerQuad + e], factor, s.v[e]);
        quad(which, i, j) = s;
      }
    }
  }

  __device__ A get(int which, int i, int e) {
    if constexpr (S::kSums == KeptSums::kRegisters) return sums[which][i][e];
    else return quad(which, i, e / kPerQuad).v[e % kPerQuad];
  }
};

}  // namespace kf
