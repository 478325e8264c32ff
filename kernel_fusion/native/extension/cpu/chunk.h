// Chunks: buffers of the compute type A (float or double) in the L1 cache, for data that cannot be used in place.
//
// Contiguous elements of a type that Source reads are read where they lie. Other elements are converted into a chunk,
// kChunk<A> at a time. Results that Target cannot store are written to a chunk first, and from there to memory.
#pragma once

#include <bit>
#include <cstring>
#include <type_traits>

#include "cpu/typed_row.h"
#include "shared/philox.h"

namespace kf::cpu::CPU_CAPABILITY {

// Marks functions that switch over types at run time. They are compiled once for each compute type, and never inlined.
#define KF_STAGE [[gnu::noinline]]

template <class A> inline constexpr int64_t kChunk = 4096 / sizeof(A);

template <class A> struct alignas(64) Chunk {
  A values[kChunk<A>];
  char gap[192];  // buffers 4096 bytes apart would evict each other
  operator A*() { return values; }
};

// Calls f with a null pointer to elements of this type, which tells f the type.
template <class F> inline void with_type(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kHalf: return f(static_cast<c10::Half*>(nullptr));
    case Dtype::kBFloat16: return f(static_cast<c10::BFloat16*>(nullptr));
    case Dtype::kFloat: return f(static_cast<float*>(nullptr));
    case Dtype::kDouble: return f(static_cast<double*>(nullptr));
  }
}

// The same, for a type whose accumulator type is A; calls nothing for others.
template <class A, class F> inline void with_type_of(Dtype dtype, F&& f) {
  with_type(dtype, [&]<class T>(T* type) {
    if constexpr (std::is_same_v<AccOf<T>, A>) f(type);
  });
}

// ---- Load and store --------------------------------------------------------------------------------------------------------

// Converts n elements. At least one of the types is the compute type.
template <class From, class To> inline void convert(const From* in, int64_t n, To* out) {
  if constexpr (std::is_same_v<From, To>) std::memcpy(out, in, n * sizeof(To));
  else if constexpr (std::is_same_v<AccOf<From>, AccOf<To>>)
    sweep<AccOf<To>>(n, [&](int64_t i, auto part) { store_pair(out + i, load_pair(in + i, part), part); });
  else
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<To>(in[i]);
}

// out[i] = in[i * stride] for i in [0, n).
template <class T> inline void gather(const T* in, int64_t stride, int64_t n, T* out) {
  const T first = *in;  // a copy, because the compiler cannot know that no store changes it
  if (stride == 0)
    for (int64_t i = 0; i < n; ++i) out[i] = first;
  else
    for (int64_t i = 0; i < n; ++i) out[i] = in[i * stride];
}

// The same for a type known at run time, converted to A. n is at most kChunk<A>.
template <class A> KF_STAGE void load_chunk(Dtype dtype, const void* p, int64_t stride, int64_t n, A* out) {
  with_type(dtype, [&]<class T>(T*) {
    const T* in = static_cast<const T*>(p);
    if (stride == 1) return convert(in, n, out);
    T gathered[kChunk<A>];
    gather(in, stride, n, gathered);
    convert(gathered, n, out);
  });
}

// A Source of n elements: where they lie, if Source can read them there, otherwise copied to `room`.
template <class A> KF_STAGE Source<A> read_chunk(Dtype dtype, const void* p, int64_t stride, int64_t n, A* room) {
  if (!Source<A>::reads(dtype)) {
    load_chunk(dtype, p, stride, n, room);
    return {kDtypeOf<A>, room};
  }
  if (stride == 1) return {dtype, p};
  with_type(dtype, [&]<class T>(T*) { gather(static_cast<const T*>(p), stride, n, reinterpret_cast<T*>(room)); });
  return {dtype, room};
}

// p[i * stride] = in[i], rounded.
template <class A> KF_STAGE void store_chunk(Dtype dtype, const A* in, int64_t n, void* p, int64_t stride) {
  with_type(dtype, [&]<class T>(T*) {
    T* out = static_cast<T*>(p);
    if (stride == 1) return convert(in, n, out);
    T rounded[kChunk<A>];
    convert(in, n, rounded);
    for (int64_t i = 0; i < n; ++i) out[i * stride] = rounded[i];
  });
}

// ---- Dropout ---------------------------------------------------------------------------------------------------------------

// One word of several blocks of random bits, each in the lower half of a vector's lane. Several blocks at once are faster
// than block by block.
constexpr int64_t kLanes = sizeof(at::vec::Vectorized<float>) / 8;
typedef unsigned long long Lanes __attribute__((vector_size(8 * kLanes)));
constexpr unsigned long long kLowerHalf = 0xffffffff;

struct LaneProduct {
  KF_INLINE Lanes operator()(const Lanes& a, unsigned b) const {
#if defined(CPU_CAPABILITY_AVX512)
    return (Lanes)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(CPU_CAPABILITY_AVX2)
    return (Lanes)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
    return (a & kLowerHalf) * b;
#endif
  }
};

// Writes the random words of `count` blocks from block `first` on, rounded up to whole vectors.
inline void draw_words(uint64_t seed, uint64_t first, int64_t count, uint32_t* words) {
  using V = at::vec::Vectorized<double>;
  Lanes block = {};
  for (int64_t lane = 0; lane < kLanes; ++lane) block[lane] = first + static_cast<uint64_t>(lane);
  for (int64_t start = 0; start < count; start += kLanes, block += kLanes) {
    Lanes word[4] = {block, block >> 32, Lanes{} + seed, Lanes{} + (seed >> 32)};
    philox(word, LaneProduct{});
    const auto pair = [&](int i) { return std::bit_cast<V>((word[i] & kLowerHalf) | word[i + 1] << 32); };
    const auto [some, others] = at::vec::interleave2(pair(0), pair(2));
    some.store(words);
    others.store(words + 2 * kLanes);
    words += 4 * kLanes;
  }
}

template <class A> using MaskOf = std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>;

// Writes a mask of all bits for each of n elements from `position` on that dropout keeps, and 0 for others. n is at most
// kChunk<A>. `last` is the largest random number that drops an element.
template <class A> KF_STAGE void draw_kept(uint64_t position, uint64_t seed, uint32_t last, int64_t n, MaskOf<A>* kept) {
  constexpr int64_t kBlocks = kChunk<A> / 8 + 1 + kLanes;
  const int64_t skip = static_cast<int64_t>(position % 8);
  uint32_t words[4 * kBlocks];
  draw_words(seed, position / 8, (skip + n + 7) / 8, words);
  const auto mask_of = [&](uint32_t bits) { return bits > last ? ~MaskOf<A>(0) : MaskOf<A>(0); };
  const uint32_t* word = words + skip / 2;
  if (skip % 2) {
    *kept++ = mask_of(*word++);
    --n;
  }
  for (int64_t i = 0; i < n / 2; ++i) {
    kept[2 * i] = mask_of(exchange_halves(word[i]));
    kept[2 * i + 1] = mask_of(word[i]);
  }
  if (n % 2) kept[n - 1] = mask_of(exchange_halves(word[n / 2]));
}

}  // namespace kf::cpu::CPU_CAPABILITY
