// Dropout drops elements whose 32 random bits (shared/philox.h) are at most `last`.
#pragma once

#include "shared/philox.h"

namespace kf {

struct Dropper {
  unsigned long long seed = 0;
  unsigned last = 0;

  Dropper() = default;
  // Reads the seed from global memory, so call wait_for_previous_kernel() first.
  __device__ Dropper(const void* seed, unsigned last) : seed(*static_cast<const unsigned long long*>(seed)), last(last) {}

  // Sets those of kVec neighbours to zero that are dropped; kVec divides `position` and eight.
  template <int kVec, class A> __device__ void drop_neighbours(unsigned long long position, A (&v)[kVec]) const {
    static_assert(8 % kVec == 0);
    const RandomBits bits = random_bits(seed, position / 8);
    constexpr int kWords = (kVec + 1) / 2;
    unsigned words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = word_at<kWords>(bits, static_cast<unsigned>(position), i);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const bool odd = kVec == 1 ? position % 2 : e % 2;
      v[e] = (odd ? words[e / 2] : exchange_halves(words[e / 2])) <= last ? A(0) : v[e];
    }
  }

  // The same for one element, at any position.
  template <class A> __device__ A drop(unsigned long long position, A v) const {
    A one[1] = {v};
    drop_neighbours(position, one);
    return one[0];
  }

 private:
  // Word i of the kWords from `position` on. An index would put the words into memory.
  template <int kWords> __device__ static unsigned word_at(const RandomBits& bits, unsigned position, int i) {
    const auto& w = bits.word;
    if constexpr (kWords == 4) return w[i];
    if constexpr (kWords == 2) return position & 4 ? w[i + 2] : w[i];
    return position & 4 ? (position & 2 ? w[3] : w[2]) : (position & 2 ? w[1] : w[0]);
  }
};

}  // namespace kf
