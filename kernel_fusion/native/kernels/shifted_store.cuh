// Stores rows that begin anywhere by whole sectors of memory.
//
// A warp's single elements mostly begin and end within a sector of 32 bytes: memory then takes up to a third more
// sectors. So shuffles shift them. fp16 and bf16 elements go two to a lane, from two chunks.
#pragma once

#include "tree.cuh"
#include "vectors.cuh"

namespace kf {

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
