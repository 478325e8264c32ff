// Dropout's random bits: Philox4x32 with 7 rounds, keyed by seed and position, the same on every device. The definition, with
// its source, is backends/eager/dropout.py.
#pragma once

#include "shared/inline.h"

namespace kf {

struct RandomBits {
  unsigned word[4];
  // The 16 bits of element `i` of the eight.
  KF_INLINE unsigned of(int i) const { return i % 2 ? word[i / 2] >> 16 : word[i / 2] & 0xffffu; }
};

// The bits of elements 8 * block ... 8 * block + 7.
KF_INLINE RandomBits random_bits(unsigned long long seed, unsigned long long block) {
  RandomBits r{{static_cast<unsigned>(block), static_cast<unsigned>(block >> 32), 0, 0}};
  unsigned key[2] = {static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32)};
  for (int round = 0; round < 7; ++round) {
    const unsigned long long first = 0xD2511F53ull * r.word[0], second = 0xCD9E8D57ull * r.word[2];
    r = {{static_cast<unsigned>(second >> 32) ^ r.word[1] ^ key[0], static_cast<unsigned>(second),
          static_cast<unsigned>(first >> 32) ^ r.word[3] ^ key[1], static_cast<unsigned>(first)}};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return r;
}

}  // namespace kf
