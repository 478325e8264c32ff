// The formulas of backward (row_norm_bwd.cuh), for one element or one vector of a row.
#pragma once

#include "stages.cuh"
#include "tree.cuh"

namespace kf {

// x - mean and xhat. They use no fma with mean * rstd, because equal elements must give exactly 0.
template <class S> struct Normalize {
  using A = typename S::Acc;
  A mean, rstd;
  __device__ A centred(A x) const { return x - mean; }
  __device__ A operator()(A x) const { return centred(x) * rstd; }

  // share() * factor() goes to dweight: dy * (x - mean), given as `dyx`, times rstd; or dy times the rounded xhat.
  __device__ A share(A dy, A centred, A dyx) const {
    if constexpr (kHf<S>) return product(dy, Roundings<S>::normalized(centred * rstd));
    else return dyx;
  }
  __device__ A factor() const { return kHf<S> ? A(1) : rstd; }
};

// A row's sums of g and g * (x - mean), which Derivative multiplies by rstd. add() returns dy * (x - mean), which goes
// to dweight times rstd in one fma.
template <class A> struct RowSums {
  A g, gx;
  __device__ A add(A dy, A centred, A weight) {
    const A dyx = product(dy, centred);
    g = fused(dy, weight, g);
    gx = fused(dyx, weight, gx);
    return dyx;
  }
};

// dx in two fma, a subtraction and a product. In rows of one element g must be rounded as in the sum, so that dx is 0.
template <class S> struct Derivative {
  using A = typename S::Acc;
  A mean, rstd, mean_g, slope;
  __device__ Derivative(const Normalize<S>& row, A sum_g, A sum_gx)
      : mean(row.mean), rstd(row.rstd), mean_g(mean_of(sum_g)), slope(-row.rstd * mean_of(row.rstd * sum_gx)) {}
  // Before sm_90 a division, because the compiler then holds fewer registers and long rows do not spill.
  __device__ static A mean_of(A sum) {
    if constexpr (is_second_pass<S>()) return sum;  // of all pieces the means are given
#if __CUDA_ARCH__ >= 900
    return sum * kPerCol<S>;
#else
    return sum / static_cast<A>(S::kCols);
#endif
  }
  __device__ A operator()(A dy, A weight, A x) const {
    const A g = S::kCols == 1 ? product(dy, weight) - mean_g : fused(dy, weight, -mean_g);
    return fused(x - mean, slope, g) * rstd;
  }
};

// The argument of the activation, which is also the number that a last factor multiplies.
template <class S, class A> __device__ A affine_of(A xhat, A weight, A bias) {
  using R = Roundings<S>;
  return R::argument(fused(R::normalized(xhat), weight, bias));
}

// With an activation, dy * activation'(z) replaces dy. All gradients follow from it.
template <class S>
__device__ typename S::Acc incoming(typename S::Acc dy, typename S::Acc xhat, typename S::Acc weight, typename S::Acc bias) {
  if constexpr (S::kActivation != 0) {
    return times_slope<S::kActivation, SharedMath<S>>(dy, affine_of<S>(xhat, weight, bias));
  } else {
    return dy;
  }
}

// The same for a vector, computed from x.
template <class S, int kVec, class A>
__device__ void replace_dy(const Normalize<S>& normalize, const A (&x)[kVec], const A (&weight)[kVec], const A (&bias)[kVec],
                           A (&dy)[kVec]) {
  if constexpr (S::kActivation != 0) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) dy[e] = incoming<S>(dy[e], normalize(x[e]), weight[e], bias[e]);
  }
}

// The normalised row without the factor: h as it was stored, or u, which is computed again.
template <class S>
__device__ void widen_row(const Before<S>& before, const Pack<typename S::Row, S::kVec>& pack, i64 row, int col,
                          typename S::Acc (&x)[S::kVec]) {
  widen_pack(pack, x);
  if constexpr (!kAddsResidual<S>) before.change(row, col, x);
}

// Multiplies x by a first factor, or dy by a last one.
template <class S, int kVec, class A>
__device__ void apply_factor(const Before<S>& before, const Pack<Factor<S>, kVec>& factor, A (&x)[kVec], A (&dy)[kVec]) {
  if constexpr (kFactorFirst<S>) before.multiply(factor, x);
  else multiply_factor<S, SharedMath<S>>(factor, dy);
}

// A parameter of a column: with kFactor weight_offset + weight, or 1 without a weight; otherwise a bias, or 0.
template <class S, class T, bool kFactor, int kVec, class A>
__device__ void widen_parameter(const Pack<T, kVec>& pack, double offset, A (&v)[kVec]) {
  if constexpr (!kPresent<T>) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] = kFactor ? 1 : 0;
  } else if constexpr (kFactor) {
    widen_weight<S>(pack, offset, v);
  } else {
    widen_pack(pack, v);
  }
}

// The row that backward reads beside the normalised one, which is a factor or x.
template <class S> using Second = typename PresentOr<typename S::PreX, Factor<S>>::type;

// The way from the gradient at h to the gradients of a row that are stored.
template <class S> struct Outgoing {
  using A = typename S::Acc;
  using X = typename S::X;
  using Other = Beside<S>;
  static constexpr int kVec = S::kVec, kCols = S::kCols;
  static constexpr bool kCovers = Place<S>::kCovers;

  const Dropout<S>& dropout;
  i64 row;
  X* dx_row;
  Other* dresidual_row;  // or the row of the factor's gradient

  __device__ Outgoing(const RowNormBwdArgs& args, const Dropout<S>& dropout, i64 row)
      : dropout(dropout), row(row), dx_row(static_cast<X*>(args.dx) + row * kCols),
        dresidual_row(static_cast<Other*>(args.dresidual) + row * kCols) {}

  // The gradient of a last factor's row, from dy * (xhat * weight + bias).
  __device__ void last_factor(const Normalize<S>& normalize, int col, const A (&dy)[kVec], const A (&x)[kVec],
                              const A (&weight)[kVec], const A (&bias)[kVec], const Pack<Factor<S>, kVec>& factor) const {
    if constexpr (kFactorLast<S> && S::kDResidual) {
      A dfactor[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e) dfactor[e] = product(dy[e], affine_of<S>(normalize(x[e]), weight[e], bias[e]));
      store_dfactor(col, dfactor, factor);
    }
  }

  // The gradient of a first factor's row, from du * x; and dx, which is du times the factor.
  __device__ void first_factor(int col, A (&du)[kVec], const Pack<X, kVec>& pack, const Pack<Factor<S>, kVec>& factor) const {
    if constexpr (S::kDResidual) {
      A dfactor[kVec];
      widen_pack(pack, dfactor);
#pragma unroll
      for (int e = 0; e < kVec; ++e) dfactor[e] = product(dfactor[e], du[e]);
      store_dfactor(col, dfactor, factor);
    }
    if constexpr (S::kDX) {
      multiply_factor<S, typename MathFor<A, X>::type>(factor, du);
      store_cols<S::kAlignDX, kVec, kCols, kCovers>(dx_row, col, narrow_pack<X>(du));
    }
  }

  // Stores the gradient of the factor's row, from the gradient at the factor.
  __device__ void store_dfactor(int col, A (&g)[kVec], const Pack<Factor<S>, kVec>& factor) const {
    A at[kVec];
    widen_pack(factor, at);
    times_factor_slope<S, typename MathFor<A, Factor<S>>::type>(g, at);
    store_cols<16, kVec, kCols, kCovers>(dresidual_row, col, narrow_pack<Factor<S>>(g));
  }

  // `pre_x` is the argument of the pre-activation. `dgate` becomes the term that the row adds to the gate's gradient.
  template <class PreX>
  __device__ void operator()(int col, A (&g)[kVec], const Pack<typename S::DH, kVec>& dh, const Pack<PreX, kVec>& pre_x,
                             const Pack<ResidualGate<S>, kVec>& gate, A (&dgate)[kVec]) const {
    if constexpr (kPresent<typename S::DH>) {
      A added[kVec];
      widen_pack(dh, added);
#pragma unroll
      for (int e = 0; e < kVec; ++e) g[e] += added[e];
    }
    if constexpr (S::kDResidual && !kFactorLast<S>)
      store_cols<16, kVec, kCols, kCovers>(dresidual_row, col, narrow_pack<Other>(g));
    if constexpr (S::kDGate) {
      before_gate(col, pre_x, dgate);
#pragma unroll
      for (int e = 0; e < kVec; ++e) dgate[e] = product(dgate[e], g[e]);
    }
    if constexpr (S::kDX) {
      if constexpr (kGatesResidual<S>) {
        A factor[kVec];
        widen_pack(gate, factor);
#pragma unroll
        for (int e = 0; e < kVec; ++e) g[e] = product(g[e], factor[e]);
      }
      dropout.apply(row * kCols + col, g);
      if constexpr (S::kPreActivation != 0) {
        A at[kVec];
        widen_pack(pre_x, at);
        multiply_slope<S::kPreActivation, typename MathFor<A, X>::type>(g, at);
      }
      store_cols<S::kAlignDX, kVec, kCols, kCovers>(dx_row, col, narrow_pack<X>(g));
    }
  }

  // Computes the numbers that the residual's gate multiplies.
  __device__ void before_gate(int col, const Pack<X, kVec>& x, A (&u)[kVec]) const {
    widen_pack(x, u);
    activate<S::kPreActivation, typename MathFor<A, ResidualGate<S>>::type>(u);
    dropout.apply(row * kCols + col, u);
  }
};

// dweight, dbias and dgate, and which of them are wanted.
template <class S> inline constexpr int kColumnSums = S::kDGate ? 3 : 2;
template <class S> __device__ constexpr bool is_wanted(int which) {
  return which == 0 ? S::kDWeight : which == 1 ? S::kDBias : S::kDGate;
}

// A thread of backward keeps for its columns the weight, the bias and the column sums.

// A thread keeps parameters in registers, in the compute type, or in shared memory, or it does not keep them.
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

  // The parameters of this thread's i-th vector.
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

// The column sums of this thread, kept in the way that S::kSums says.
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
