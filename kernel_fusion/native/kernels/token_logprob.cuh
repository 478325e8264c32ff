// Log-probabilities of classes in rows of logits, and the gradient of the logits: policies of row_once (row_executors.cuh).
//
// A logit is z = scale * x or, capped, cap * tanh(scale * x), where the row's temperature is part of scale or cap. Forward
// reads a row once. Each thread keeps the largest logit that it has met, and sums of distances to that, which it corrects
// when it meets a larger one. The logarithm of a probability is (z - largest) - log_sum, which is never positive.
//
// Backward needs no sums, because forward kept those of the row: one read of x, one write of dx. An element of an id is
// written once more, so that all of its terms are added before it is rounded.
//
// An ignored row is not read. An id that is no class gives NaN, and a gradient of NaN to its row.
#pragma once

#include "math.cuh"
#include "row_executors.cuh"
#include "shared/reduce_args.h"
#include "sums.cuh"
#include "exponentials.cuh"

namespace kf {

template <class S> struct LogitRow {
  using A = typename S::Acc;
  using X = typename S::X;
  static constexpr int kVec = S::kVec;
  static constexpr A kTiny = -10000;  // e to that is 0
  struct Loaded {
    Pack<X, kVec> x;
    Pack<If<S::kMasked, b8>, kVec> mask;
    Pack<If<S::kWeighted, A>, kVec> weight;
  };
  struct Logit {
    A z, slope;  // slope: its derivative
  };

  const LogitRows& rows;
  i64 index;
  const X* x;
  const b8* mask = nullptr;
  const i64* ids;
  A scale = 1, cap = 1;
  bool ignored;

  __device__ LogitRow(const LogitRows& rows, i64 index)
      : rows(rows), index(index), x(reinterpret_cast<const X*>(rows.x) + row_offset<S::kStridedX, true>(rows.x_rows, index)),
        ids(reinterpret_cast<const i64*>(rows.ids) + index * rows.num_ids), ignored(*ids == rows.ignore_index) {
    if constexpr (S::kMasked)
      mask = reinterpret_cast<const b8*>(rows.mask) + row_offset<S::kStridedMask, true>(rows.mask_rows, index);
    const A by = S::kScaled && rows.temperature ? number(rows.temperature, index) : A(1);
    if constexpr (S::kCapped) {
      scale = static_cast<A>(rows.scale) / static_cast<A>(rows.softcap);
      cap = static_cast<A>(rows.softcap) / by;
    } else if constexpr (S::kScaled) {
      scale = static_cast<A>(rows.scale) / by;
    }
  }

  __device__ static A number(const char* p, i64 i) { return reinterpret_cast<const A*>(p)[i]; }
  __device__ static A nan() { return A(0) * negative_infinity(A(0)); }

  __device__ bool is_class(i64 id) const { return id >= 0 && id < rows.cols; }
  __device__ bool keeps(i64 id) const {
    if constexpr (S::kMasked) return mask[id * rows.mask_stride].bits;
    else return true;
  }
  __device__ A weight(i64 id) const {
    if constexpr (S::kWeighted) return number(rows.weight, id);
    else return 1;
  }

  __device__ Loaded load(int col) const {
    Loaded loaded;
    loaded.x = load_once<S::kAlignX, kVec>(x + col);
    if constexpr (S::kMasked && !S::kMaskRepeats && kVec > 1 && S::kAlignMask >= kVec) {
      loaded.mask = kf::load<S::kAlignMask, kVec>(mask + col);
    } else if constexpr (S::kMasked) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) loaded.mask.v[e] = mask[S::kMaskRepeats ? 0 : col + e];
    }
    if constexpr (S::kWeighted) loaded.weight = kf::load<sizeof(A), kVec>(reinterpret_cast<const A*>(rows.weight) + col);
    return loaded;
  }
  // The same of an element of what was loaded.
  __device__ static bool keeps(const Loaded& loaded, int e) {
    if constexpr (S::kMasked) return loaded.mask.v[e].bits;
    else return true;
  }
  __device__ static A weight(const Loaded& loaded, int e) {
    if constexpr (S::kWeighted) return loaded.weight.v[e];
    else return 1;
  }

  __device__ Logit logit(A v) const {
    if constexpr (S::kCapped) {
      const A t = Math<A>::tanh(product(scale, v));
      return {product(cap, t), scale * cap * fused(-t, t, A(1))};
    } else if constexpr (S::kScaled) {
      return {product(scale, v), scale};
    } else {
      return {v, 1};
    }
  }
};

template <class S> struct TokenLogprob : LogitRow<S> {
  using Args = TokenLogprobArgs;
  using Row = LogitRow<S>;
  using A = typename Row::A;
  using Loaded = typename Row::Loaded;
  static constexpr int kVec = S::kVec;
  static constexpr bool kSums = S::kExtra == Extra::kSum, kEntropy = S::kExtra == Extra::kEntropy;

  // Numbers of some of a row's logits: the largest, its first column, and of the distances d to it the sum of e^d.
  // `extra` is the sum of weight * d or e^d * d. A mask keeps a class if `kept` is not 0.
  struct Numbers {
    A largest, sum, extra, weights;
    int best, kept;

    __device__ A base() const { return largest == negative_infinity(A(0)) ? A(0) : largest; }

    // Takes distances to another number, which is not less.
    __device__ void raise(A to) {
      const Numbers before = *this;
      largest = to;
      const A moved = Larger()(before.largest - base(), Row::kTiny), factor = exp_below(moved, A(0));
      if constexpr (kSums) extra = fused(weights, before.base() - base(), extra);
      if constexpr (kEntropy) extra = product(fused(sum, moved, extra), factor);
      sum = product(sum, factor);
    }

    // Joins those of kLanes neighbours, in all of these.
    template <int kLanes> __device__ void join() {
      const A top = combine_lanes<kLanes>(largest, Larger());
      if constexpr (S::kPredicts) {
        constexpr int kNone = 0x7fffffff;
        best = combine_lanes<kLanes>(largest == top ? best : kNone, [](int a, int b) { return min(a, b); });
      }
      if constexpr (S::kMasked) kept = combine_lanes<kLanes>(kept, [](int a, int b) { return a | b; });
      raise(top);
      sum = sum_lanes<kLanes>(sum);
      if constexpr (kSums || kEntropy) extra = sum_lanes<kLanes>(extra);
      if constexpr (kSums) weights = sum_lanes<kLanes>(weights);
    }
  };

  const Args& args;

  __device__ TokenLogprob(const Args& args, i64 index) : Row(args, index), args(args) {}

  __device__ static Numbers begin() { return {negative_infinity(A(0)), 0, 0, 0, 0, 0}; }
  __device__ int limit(int end) const { return this->ignored ? 0 : end; }
  __device__ void leave(int) const {}

  __device__ void take(int col, const Loaded& loaded, Numbers& numbers) const {
    A z[kVec], terms[kVec];
    widen_pack(loaded.x, z);
    A most = negative_infinity(A(0));
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      z[e] = this->keeps(loaded, e) ? this->logit(z[e]).z : negative_infinity(A(0));
      most = Larger()(most, z[e]);
      numbers.kept |= this->keeps(loaded, e);
    }
    if constexpr (S::kPredicts) {
      if (most > numbers.largest) {
#pragma unroll
        for (int e = kVec - 1; e >= 0; --e)
          if (z[e] == most) numbers.best = col + e;
      }
    }
    numbers.raise(Larger()(numbers.largest, most));
    const A base = numbers.base();
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      terms[e] = exp_below(z[e], base);
      if constexpr (kEntropy) numbers.extra = fused(terms[e], Larger()(z[e] - base, Row::kTiny), numbers.extra);
      if constexpr (kSums) {
        numbers.extra = fused(this->weight(loaded, e), z[e] - base, numbers.extra);
        numbers.weights += this->weight(loaded, e);
      }
    }
    numbers.sum += sum_elements(terms);
  }

  __device__ void finish(int member, int members, const Numbers& numbers) const {
    const auto put = [](char* to, i64 i, A v) { reinterpret_cast<A*>(to)[i] = v; };
    const bool dead = this->ignored || (S::kMasked && !numbers.kept);
    const A log_sum = dead ? A(0) : log(numbers.sum);
    for (i64 k = member; k < args.num_ids; k += members)
      put(args.logprob, this->index * args.num_ids + k, logprob(this->ids[k], numbers.largest, log_sum));
    if (member != 0) return;
    // Without infinity only NaN makes a sum NaN.
    const bool is_nan = numbers.sum != numbers.sum && numbers.largest != -negative_infinity(A(0));
    put(args.largest, this->index, this->ignored ? A(0) : is_nan ? Row::nan() : numbers.largest);
    put(args.log_sum, this->index, log_sum);
    if constexpr (kSums) put(args.found, this->index, dead ? A(0) : fused(-numbers.weights, log_sum, numbers.extra));
    if constexpr (kEntropy) put(args.found, this->index, dead ? A(0) : log_sum - numbers.extra / numbers.sum);
    if constexpr (S::kPredicts) {
      const i64 best = numbers.sum != numbers.sum ? first_nan(numbers.best) : numbers.best;
      reinterpret_cast<i64*>(args.predicted)[this->index] = this->ignored ? -1 : best;
    }
  }

 private:
  // The first class whose logit is NaN, which counts as the largest; `otherwise` if only infinities made the sum NaN.
  __device__ i64 first_nan(i64 otherwise) const {
    for (i64 id = 0; id < args.cols; ++id) {
      const A z = this->logit(widen<A>(this->x[id])).z;
      if (z != z && this->keeps(id)) return id;
    }
    return otherwise;
  }
  __device__ A logprob(i64 id, A largest, A log_sum) const {
    if (this->ignored) return 0;
    if (!this->is_class(id)) return Row::nan();
    if (!this->keeps(id)) return negative_infinity(A(0));
    return (this->logit(widen<A>(this->x[id])).z - largest) - log_sum;
  }
};

template <class S> __device__ void token_logprob(const TokenLogprobArgs& args) { run_rows<TokenLogprob, S>(args); }

template <class S> struct TokenLogprobBwd : LogitRow<S> {
  using Args = TokenLogprobBwdArgs;
  using Row = LogitRow<S>;
  using A = typename Row::A;
  using X = typename Row::X;
  using Loaded = typename Row::Loaded;
  using Logit = typename Row::Logit;
  static constexpr int kVec = S::kVec;
  static constexpr bool kMore = S::kExtra != Extra::kNone;  // whether there may be db and dc
  struct Numbers {
    template <int> __device__ void join() {}
  };

  const Args& args;
  X* dx;
  A largest = 0, log_sum = 0, a = 0, b = 0, c = 0;
  bool zero;

  __device__ TokenLogprobBwd(const Args& args, i64 index)
      : Row(args, index), args(args), dx(reinterpret_cast<X*>(args.dx) + index * args.cols), zero(this->ignored) {
    if (zero) return;
    const auto number = [&](const char* p) { return p ? Row::number(p, index) : A(0); };
    largest = number(args.largest);
    log_sum = number(args.log_sum);
    a = number(args.da);
    if constexpr (kMore) {
      b = number(args.db);
      c = number(args.dc);
    }
    for (i64 k = 0; k < args.num_ids; ++k) a -= given(k);
    if constexpr (S::kMasked) zero = largest == negative_infinity(A(0)) && log_sum == A(0);  // it keeps nothing
  }

  __device__ static Numbers begin() { return {}; }
  __device__ int limit(int end) const { return zero ? 0 : end; }
  __device__ void leave(int col) const { store<S::kAlignDX>(dx + col, Pack<X, kVec>{}); }

  __device__ void take(int col, const Loaded& loaded, Numbers&) const {
    A g[kVec];
    widen_pack(loaded.x, g);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const Logit logit = this->logit(g[e]);
      g[e] = this->keeps(loaded, e) ? gradient(logit, this->weight(loaded, e), A(0)) * logit.slope : A(0);
    }
    store<S::kAlignDX>(dx + col, narrow_pack<X>(g));
  }

  __device__ void finish(int member, int members, const Numbers&) const {
    if (zero) return;
    for (i64 k = member; k < args.num_ids; k += members) {
      const i64 id = this->ids[k];
      if (!this->is_class(id) || !this->keeps(id)) continue;
      A own = 0;
      for (i64 other = 0; other < args.num_ids; ++other)
        if (this->ids[other] == id) own += given(other);
      const Logit logit = this->logit(widen<A>(this->x[id]));
      dx[id] = narrow<X>(gradient(logit, this->weight(id), own) * logit.slope);
    }
  }

 private:
  // The gradient of the log-probability of id number k.
  __device__ A given(i64 k) const {
    const i64 id = this->ids[k];
    if (!this->is_class(id)) return Row::nan();
    return this->keeps(id) ? Row::number(args.dlogprob, this->index * args.num_ids + k) : A(0);
  }

  // The gradient of a logit, whose log-probability has the gradient `own`. A probability of 0 counts for nothing, also times
  // its logarithm. What does not come with it is added first: of a single class it is exactly -a, so that the result is 0.
  __device__ A gradient(const Logit& logit, A weight, A own) const {
    A log_p = (logit.z - largest) - log_sum;
    if constexpr (!kMore) return fused(exp_below(log_p, A(0)), a, own);
    log_p = log_p < Row::kTiny ? Row::kTiny : log_p;  // NaN stays
    return fused(exp_below(log_p, A(0)), fused(b, log_p, a), fused(c, weight, own));
  }
};

template <class S> __device__ void token_logprob(const TokenLogprobBwdArgs& args) { run_rows<TokenLogprobBwd, S>(args); }

}  // namespace kf
