// The stages of the CPU kernels, on chunks: buffers of the compute type A (float or double) that stay in the L1 cache.
// Included by files that are compiled once per instruction set.
//
// A kernel reads a stretch of up to kChunk<A> elements into a buffer, applies its stages one after the other, and writes the
// buffer back. Dtypes are switched at load and store, activations once per chunk, so no stage multiplies templates; what that
// costs in L1 traffic is hidden behind the memory that the chunk came from.
//
// All stages work on whole vectors. They read and write up to one vector past the n elements, so that an element gets the same
// bits wherever in a chunk it lies. Buffers are therefore kChunk<A> long, or padded likewise (`padded`); loads and stores
// touch exactly n elements.
#pragma once

#include <cstring>
#include <type_traits>

#include "cpu/dtype.h"
#include "cpu/math.h"
#include "shared/philox.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {

// A stage with a switch inside: compiled once for each compute type, not at every call.
#define KF_STAGE [[gnu::noinline]]

template <class A> inline constexpr int64_t kChunk = 4096 / sizeof(A);

// n rounded up to whole vectors.
template <class A> inline int64_t padded(int64_t n) {
  constexpr int64_t kStep = at::vec::Vectorized<A>::size();
  return (n + kStep - 1) / kStep * kStep;
}

template <class A> struct alignas(64) Chunk {
  A values[kChunk<A>] = {};  // what lies past the elements is finite from the beginning
  char gap[192];             // buffers at one distance of 4096 bytes would get in each other's way
  operator A*() { return values; }
};

// Calls f with a null pointer of the type that `dtype` names.
template <class F> inline void with_type(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kHalf: return f(static_cast<c10::Half*>(nullptr));
    case Dtype::kBFloat16: return f(static_cast<c10::BFloat16*>(nullptr));
    case Dtype::kFloat: return f(static_cast<float*>(nullptr));
    case Dtype::kDouble: return f(static_cast<double*>(nullptr));
  }
}

inline int64_t size_of(Dtype dtype) {
  return dtype == Dtype::kDouble ? 8 : dtype == Dtype::kFloat ? 4 : 2;
}

// ---- Load and store --------------------------------------------------------------------------------------------------------

template <class T, class A> inline void widen(const T* in, int64_t n, A* out) {
  if constexpr (std::is_same_v<T, A>) {
    std::memcpy(out, in, n * sizeof(A));
  } else if constexpr (sizeof(T) == 2 && std::is_same_v<A, float>) {
    using V = at::vec::Vectorized<T>;
    constexpr int64_t kStep = V::size(), kHalf = kStep / 2;
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      const auto [low, high] = at::vec::convert_to_float<T>(V::loadu(in + i));
      low.store(out + i);
      high.store(out + i + kHalf);
    }
    if (i < n) {
      const auto [low, high] = at::vec::convert_to_float<T>(V::loadu(in + i, n - i));
      low.store(out + i, std::min(kHalf, n - i));
      if (n - i > kHalf) high.store(out + i + kHalf, n - i - kHalf);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<A>(in[i]);
  }
}

template <class T, class A> inline void narrow(const A* in, int64_t n, T* out) {
  if constexpr (std::is_same_v<T, A>) {
    std::memcpy(out, in, n * sizeof(A));
  } else if constexpr (sizeof(T) == 2 && std::is_same_v<A, float>) {
    using V = at::vec::Vectorized<T>;
    using W = at::vec::Vectorized<float>;
    constexpr int64_t kStep = V::size(), kHalf = kStep / 2;
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep)
      at::vec::convert_from_float<T>(W::loadu(in + i), W::loadu(in + i + kHalf)).store(out + i);
    if (i < n) {
      const auto low = W::loadu(in + i, std::min(kHalf, n - i));
      const auto high = n - i > kHalf ? W::loadu(in + i + kHalf, n - i - kHalf) : W(0.0f);
      at::vec::convert_from_float<T>(low, high).store(out + i, n - i);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(in[i]);
  }
}

// out[i] = p[i * stride] for i in [0, n), n at most kChunk<A>; the stride in elements.
template <class A> KF_STAGE void load_chunk(Dtype dtype, const void* p, int64_t stride, int64_t n, A* out) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* in = static_cast<const T*>(p);
    if (stride == 1) return widen(in, n, out);
    T gathered[kChunk<A>];
    const int64_t distinct = stride == 0 ? 1 : n;
    for (int64_t i = 0; i < distinct; ++i) gathered[i] = in[i * stride];
    widen(gathered, distinct, out);
    if (stride == 0)
      for (int64_t i = 1; i < n; ++i) out[i] = out[0];
  });
}

// Whether elements in memory are what a chunk of them would be: of type A, neighbours, and whole vectors.
template <class A> inline bool is_chunk(Dtype dtype, int64_t stride, int64_t n) {
  return dtype == (std::is_same_v<A, double> ? Dtype::kDouble : Dtype::kFloat) && stride == 1 && padded<A>(n) == n;
}

// Where the elements that load_chunk would load can be read: in place, or else in `room`, where it loads them.
template <class A> inline const A* read_chunk(Dtype dtype, const void* p, int64_t stride, int64_t n, A* room) {
  if (is_chunk<A>(dtype, stride, n)) return static_cast<const A*>(p);
  load_chunk(dtype, p, stride, n, room);
  return room;
}

// Where elements can be computed that store_chunk will store: in place, where it then does nothing, or else in `room`.
template <class A> inline A* write_chunk(Dtype dtype, void* p, int64_t stride, int64_t n, A* room) {
  return is_chunk<A>(dtype, stride, n) ? static_cast<A*>(p) : room;
}

// p[i * stride] = in[i], rounded.
template <class A> KF_STAGE void store_chunk(Dtype dtype, const A* in, int64_t n, void* p, int64_t stride) {
  if (in == p) return;
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* out = static_cast<T*>(p);
    if (stride == 1) return narrow(in, n, out);
    T rounded[kChunk<A>];
    narrow(in, n, rounded);
    for (int64_t i = 0; i < n; ++i) out[i * stride] = rounded[i];
  });
}

// ---- Arithmetic ------------------------------------------------------------------------------------------------------------

// out = f(in) by vectors, two at a time, whose latencies overlap; in place where they are the same.
template <class A, class F> inline void map_chunk(const A* in, A* out, int64_t n, F&& f) {
  using V = at::vec::Vectorized<A>;
  constexpr int64_t kStep = V::size();
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    const V first = f(V::loadu(in + i)), second = f(V::loadu(in + i + kStep));
    first.store(out + i);
    second.store(out + i + kStep);
  }
  for (; i < n; i += kStep) f(V::loadu(in + i)).store(out + i);
}

// out = f(a, b) by vectors; in place where out is one of them.
template <class A, class F> inline void zip_chunk(const A* a, const A* b, A* out, int64_t n, F&& f) {
  using V = at::vec::Vectorized<A>;
  for (int64_t i = 0; i < n; i += V::size()) f(V::loadu(a + i), V::loadu(b + i)).store(out + i);
}

template <class A> inline void add_chunk(const A* a, const A* b, A* out, int64_t n) {
  zip_chunk(a, b, out, n, [](auto x, auto y) { return x + y; });
}

template <class A> inline void multiply_chunk(const A* a, const A* b, A* out, int64_t n) {
  zip_chunk(a, b, out, n, [](auto x, auto y) { return x * y; });
}

// values = values * scale
template <class A> inline void scale_chunk(A* values, double scale, int64_t n) {
  if (scale == 1.0) return;
  const at::vec::Vectorized<A> factor(static_cast<A>(scale));
  map_chunk(values, values, n, [&](auto x) { return x * factor; });
}

// ---- Activations -----------------------------------------------------------------------------------------------------------

#define KF_CODE(name) name,
enum class Activation : int32_t { KF_ACTIVATIONS(KF_CODE) };
#undef KF_CODE

inline bool is_identity(int32_t code) { return static_cast<Activation>(code) == Activation::identity; }

// out = the activation of `in`; in place where they are the same.
template <class A> KF_STAGE void activate_chunk(int32_t code, const A* in, A* out, int64_t n) {
  switch (static_cast<Activation>(code)) {
#define KF_CASE(name) \
  case Activation::name: return map_chunk(in, out, n, [](auto x) { return act::name::value<Math<A>>(x); });
    KF_ACTIVATIONS(KF_CASE)
#undef KF_CASE
  }
}

// out = g * the slope of the activation at x; in place where out is g.
template <class A> KF_STAGE void multiply_slope(int32_t code, const A* g, const A* x, A* out, int64_t n) {
  switch (static_cast<Activation>(code)) {
#define KF_CASE(name) \
  case Activation::name: return zip_chunk(g, x, out, n, [](auto d, auto at) { return act::times_slope<act::name, Math<A>>(d, at); });
    KF_ACTIVATIONS(KF_CASE)
#undef KF_CASE
  }
}

// ---- Dropout ---------------------------------------------------------------------------------------------------------------

// Zeroes the dropped ones of the elements at position, position + 1, ...: exactly n of them, at most kChunk<A>. Scales nothing.
template <class A> KF_STAGE void dropout_chunk(A* values, int64_t n, uint64_t position, uint64_t seed, uint32_t threshold) {
  if (n == 0) return;
  const uint64_t first = position / 8;
  const int64_t skip = static_cast<int64_t>(position % 8), blocks = (skip + n + 7) / 8;
  uint32_t words[4 * (kChunk<A> / 8 + 1)];
  for (int64_t block = 0; block < blocks; ++block) {
    const RandomBits r = random_bits(seed, first + static_cast<uint64_t>(block));
    for (int i = 0; i < 4; ++i) words[4 * block + i] = r.word[i];
  }
  uint16_t bits[8 * (kChunk<A> / 8 + 1)];  // element by element, as halves of words lie on a little-endian machine
  std::memcpy(bits, words, 16 * blocks);
  for (int64_t i = 0; i < n; ++i) values[i] = bits[skip + i] < threshold ? A(0) : values[i];
}

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
