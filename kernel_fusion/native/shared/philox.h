// Dropout's random bits: Philox4x32 with 7 rounds of the counter (position, seed), the same on every device. The definition,
// with its source, is backends/eager/dropout.py.
#pragma once

#include "shared/inline.h"

namespace kf {

// The 16 bits of element i of eight are half i % 2 of word i / 2.
struct RandomBits {
  unsigned word[4];
};

// In CUDA by the instruction itself: of a product of 64 bits the compiler adds 0 to the upper half, which takes as long.
KF_INLINE unsigned long long wide_product(unsigned a, unsigned b) {
#ifdef __CUDA_ARCH__
  unsigned long long r;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(r) : "r"(a), "r"(b));
  return r;
#else
  return static_cast<unsigned long long>(a) * b;
#endif
}

// The bits of elements 8 * block ... 8 * block + 7.
KF_INLINE RandomBits random_bits(unsigned long long seed, unsigned long long block) {
  RandomBits r{{static_cast<unsigned>(block), static_cast<unsigned>(block >> 32), static_cast<unsigned>(seed),
                static_cast<unsigned>(seed >> 32)}};
  for (unsigned round = 0; round < 7; ++round) {
    const unsigned key[2] = {round * 0x9E3779B9u, round * 0xBB67AE85u};  // of key 0: constants
    const unsigned long long first = wide_product(r.word[0], 0xD2511F53u), second = wide_product(r.word[2], 0xCD9E8D57u);
    r = {{static_cast<unsigned>(second >> 32) ^ r.word[1] ^ key[0], static_cast<unsigned>(second),
          static_cast<unsigned>(first >> 32) ^ r.word[3] ^ key[1], static_cast<unsigned>(first)}};
  }
  return r;
}

}  // namespace kf
