// The addresses of rows in 64 bits, the factor that weight and offset make, and stores of whole sectors.
//
// With S::kGrouped, groups of rows have their own weight, bias and residual gate (RowGroups): kernels count samples,
// blockIdx.y names the group.
#pragma once

#include "pieces.cuh"
#include "shared/row_norm_args.h"
#include "vectors.cuh"

namespace kf {

// With kQuick, rows that 32 bits can number take 32-bit divisions, which need more code.
template <bool kStrided, bool kQuick = false> __device__ i64 row_offset(const RowLayout& layout, i64 row) {
  if constexpr (!kStrided) return row * layout.stride[2];
  if (kQuick && row <= 0xffffffffll) {
    const auto inner = static_cast<unsigned>(layout.inner), middle = static_cast<unsigned>(layout.middle);
    const unsigned outer = static_cast<unsigned>(row) / inner;
    return outer / middle * layout.stride[0] + outer % middle * layout.stride[1] +
           (static_cast<unsigned>(row) - outer * inner) * layout.stride[2];
  }
  const i64 outer = row / layout.inner;
  return outer / layout.middle * layout.stride[0] + outer % layout.middle * layout.stride[1] +
         row % layout.inner * layout.stride[2];
}

// The beginning of this block's group of `each` things; 0 without groups.
template <class S, class Args> __device__ i64 group_offset(const Args& args, i64 each) {
  if constexpr (S::kGrouped) return (args.groups.first + blockIdx.y) * each;
  else return 0;
}

// The number of the row that a sample has in this block's group. A second pass begins with the rows that the first one read
// last, which caches still hold.
template <class S, class Args> __device__ i64 row_of_sample(const Args& args, i64 sample) {
  if constexpr (is_second_pass<S>()) sample = args.rows - 1 - sample;
  if constexpr (S::kGrouped) return sample * args.groups.step + group_offset<S>(args, args.groups.inner);
  else return sample;
}

// Loads a vector of a row. For an absent tensor it is empty.
template <class S, int kAlign, class T> __device__ Pack<T, S::kVec> load_row(const T* row, int col) {
  if constexpr (kPresent<T>) return load_cols<kAlign, S::kVec, S::kCols, Place<S>::kCovers>(row, col);
  else return {};
}

// The weight and the bias of this block's group.
template <class S, class Args> __device__ const typename S::Weight* weight_of(const Args& args) {
  return static_cast<const typename S::Weight*>(args.weight) + group_offset<S>(args, args.groups.weight_pitch);
}
template <class S, class Args> __device__ const typename S::Bias* bias_of(const Args& args) {
  return static_cast<const typename S::Bias*>(args.bias) + group_offset<S>(args, args.groups.bias_pitch);
}

template <class S, class Args> __device__ auto load_weight(const Args& args, int col) {
  return load_row<S, S::kAlignWeight>(weight_of<S>(args), col);
}
template <class S, class Args> __device__ auto load_bias(const Args& args, int col) {
  return load_row<S, S::kAlignWeight>(bias_of<S>(args), col);
}
template <class S, class Args> __device__ auto load_gate(const Args& args, int col) {
  using Gate = typename S::ResidualGate;
  const auto* p = static_cast<const Gate*>(args.gate) + group_offset<S>(args, args.groups.gate_pitch);
  return load_row<S, S::kAlignWeight>(p, col);
}

// Starts to bring a vector to L2.
template <class S, class T> __device__ void prefetch_row(const T* row, int col) {
  if constexpr (kPresent<T>)
    if (Place<S>::kCovers || col < S::kCols) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + col));
}

// weight_offset + weight; the addition is compiled in with an offset.
template <class S, class Weight, int kVec, class A>
__device__ void widen_weight(const Pack<Weight, kVec>& pack, double offset, A (&w)[kVec]) {
  widen_pack(pack, w);
  if constexpr (S::kOffset) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) w[e] += static_cast<A>(offset);
  }
}

// Stores rows that begin anywhere by whole sectors of memory.
//
// A warp's single elements mostly begin and end within a sector of 32 bytes: memory then takes up to a third more
// sectors. So shuffles shift them. fp16 and bf16 elements go two to a lane, from two chunks.
//
// Rounds and stores what value(i, v) puts into v, for each vector i of the thread, in order.
template <class S, class T, class Value> __device__ void store_shifted(T* row, const Place<S>& at, Value&& value) {
  using P = Place<S>;
  static_assert(S::kVec == 1 && S::kLanes == 32 && sizeof(T) <= 4);
  constexpr int kEach = 4 / static_cast<int>(sizeof(T));  // elements per lane, and chunks per store
  constexpr int kWide = 32 * kEach;                       // columns of a store
  const int lane = at.lane, begin = at.first - lane, end = begin + P::cols_of(at.warp);
  // The warp's first column within its sector.
  const int shift = static_cast<int>(reinterpret_cast<unsigned long long>(row + begin) % 32 / sizeof(T));
  T* const mine = row + begin - shift + lane * kEach;
  const int from = lane * kEach - shift, source = from & 31;  // whose element a lane stores
  // The last chunk's element goes with the next store.
  const bool carries = lane + shift >= 32;
  // A lane's word has an fp16 or bf16 element of either chunk; it takes one each of two neighbours.
  const auto of_second = [](int from) { return from < 0 || from >= 32; };
  const unsigned halves = (of_second(from) ? 0x32 : 0x10) | (of_second(from + 1) ? 0x7600 : 0x5400);
  unsigned carried = 0;
#pragma unroll
  for (int j = 0; j <= P::kVectors / kEach; ++j) {
    unsigned word = 0;
    if constexpr (kEach == 1) {
      float v[1] = {};
      if (j < P::kVectors) value(j, v);
      word = __float_as_uint(v[0]);
      const unsigned sent = carries ? carried : word;
      carried = word;
      word = __shfl_sync(~0u, sent, source);
    } else {
      float low[1] = {}, high[1] = {};
      if (2 * j < P::kVectors) value(2 * j, low);
      if (2 * j + 1 < P::kVectors) value(2 * j + 1, high);
      const unsigned both = narrow_pair(T{}, low[0], high[0]);
      const unsigned sent = __byte_perm(both, carried, carries ? 0x7610 : 0x3210);
      carried = both;
      word = __byte_perm(__shfl_sync(~0u, sent, source), __shfl_sync(~0u, sent, (source + 1) & 31), halves);
    }
    // Only the first store begins before the warp's columns; only the last ends after them.
    const int col = begin - shift + j * kWide + lane * kEach;
    const bool begins = j > 0 || col >= begin, ends = (j + 1) * kEach <= P::kFull || col + kEach <= end;
    T* const p = mine + j * kWide;
    if (begins && ends) store_word(p, word);
    if constexpr (kEach == 2) {
      if (j == 0 && col == begin - 1) store_word(p + 1, static_cast<unsigned short>(word >> 16));
      if ((j + 1) * kEach > P::kFull && col == end - 1) store_word(p, static_cast<unsigned short>(word));
    }
  }
}

}  // namespace kf
