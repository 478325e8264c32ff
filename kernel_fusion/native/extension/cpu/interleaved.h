// bf16 vectors as vectors of the accumulator type, without moving elements between lanes.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <bit>
#include <type_traits>

#include "shared/inline.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

using at::vec::Vectorized;

// A bf16 whose pairs have even elements in one vector and odd ones in the other, at::vec's deinterleave2: each already
// lies in the upper half of a 32-bit word.
struct Interleaved : c10::BFloat16 {
  using c10::BFloat16::BFloat16;
};
using Words [[gnu::vector_size(sizeof(Vectorized<float>))]] = uint32_t;

// T where all operands and results have that type.
template <class T> using Alike = std::conditional_t<std::is_same_v<T, c10::BFloat16>, Interleaved, T>;

// Both vectors as bf16, to nearest, ties to even. A NaN survives only with lower 16 bits of zero, as from bf16 or
// arithmetic; others would cost two instructions more.
KF_INLINE Vectorized<int32_t> interleaved_bits(const Vectorized<float>& a, const Vectorized<float>& b) {
#if defined(CPU_CAPABILITY_AVX512)  // three instructions fewer than the formula
  const auto rounded = [](const Vectorized<float>& half) {
    const __m512i bits = _mm512_castps_si512(half), up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_sub_epi32(up, _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000)), up, _mm512_set1_epi32(-1));
  };
  const __m512i upper_half = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);  // bytes of a 16-byte lane
  return _mm512_mask_shuffle_epi8(rounded(b), 0x3333333333333333, rounded(a), upper_half);
#else
  const auto rounded = [](const Vectorized<float>& half) {
    const auto bits = std::bit_cast<Words>(half);
    return bits + 0x7fff + (bits >> 16 & 1);
  };
  return std::bit_cast<Vectorized<int32_t>>(rounded(a) >> 16 | (rounded(b) & 0xffff0000));
#endif
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
