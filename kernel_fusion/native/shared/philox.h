// Dropout's random bits: Philox4x32-7, as in backends/eager/dropout.py.
#pragma once

#include "shared/inline.h"

namespace kf {

// Elements 2j and 2j + 1 share word j: the even one exchanges its halves.
struct RandomBits {
  unsigned word[4];
};

// CUDA has an instruction; a 64-bit product would also add 0.
struct WideProduct {
  KF_INLINE unsigned long long operator()(unsigned a, unsigned b) const {
#ifdef __CUDA_ARCH__
    unsigned long long r;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(r) : "r"(a), "r"(b));
    return r;
#else
    return static_cast<unsigned long long>(a) * b;
#endif
  }
};

// The rounds; multiply(word, constant) has twice the width.
template <class Word, class Multiply> KF_INLINE void philox(Word (&word)[4], Multiply multiply) {
  for (unsigned round = 0; round < 7; ++round) {
    const unsigned key[2] = {round * 0x9E3779B9u, round * 0xBB67AE85u};  // of key 0: constants
    const auto first = multiply(word[0], 0xD2511F53u), second = multiply(word[2], 0xCD9E8D57u);
    word[0] = Word(second >> 32) ^ word[1] ^ key[0];
    word[1] = Word(second);
    word[2] = Word(first >> 32) ^ word[3] ^ key[1];
    word[3] = Word(first);
  }
}

KF_INLINE unsigned exchange_halves(unsigned word) { return word << 16 | word >> 16; }

// The bits of elements 8 * block ... 8 * block + 7.
KF_INLINE RandomBits random_bits(unsigned long long seed, unsigned long long block) {
  RandomBits r{{static_cast<unsigned>(block), static_cast<unsigned>(block >> 32), static_cast<unsigned>(seed),
                static_cast<unsigned>(seed >> 32)}};
  philox(r.word, WideProduct{});
  return r;
}

}  // namespace kf
