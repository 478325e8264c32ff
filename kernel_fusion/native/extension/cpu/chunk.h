// What stages do to a chunk, some elements in the accumulator type A that stay in L1. Each is a loop of its own, chosen once per
// chunk by a code, so that stages and dtypes do not multiply.
#pragma once

#include "cpu/kernels.h"
#include "cpu/math.h"
#include "cpu/pairs.h"
#include "shared/activations.h"
#include "shared/philox.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

template <class A> constexpr Dtype accumulator() { return std::is_same_v<A, double> ? Dtype::kDouble : Dtype::kFloat; }

// The address of an element.
inline const char* element(Dtype dtype, const void* tensor, int64_t index) {
  constexpr int64_t kBytes[] = {2, 2, 4, 8};
  return static_cast<const char*>(tensor) + index * kBytes[static_cast<int>(dtype)];
}
inline char* element(Dtype dtype, void* tensor, int64_t index) {
  return const_cast<char*>(element(dtype, static_cast<const void*>(tensor), index));
}

// `with_type` for those whose accumulator type is A.
template <class A, class F> void with_type_of(Dtype dtype, F&& f) {
  with_type(dtype, [&](auto* t) {
    if constexpr (std::is_same_v<AccOf<std::remove_pointer_t<decltype(t)>>, A>) f(t);
  });
}

// n elements, `stride` apart.
template <class A> void load_chunk(Dtype dtype, const void* p, int64_t stride, int64_t n, A* out) {
  with_type_of<A>(dtype, [&](auto* t) {
    const auto* in = static_cast<const std::remove_pointer_t<decltype(t)>*>(p);
    if (stride == 1)
      sweep<A>(
          n, [&](int64_t i) { store_pair(out + i, load_pair(in + i)); }, [&](int64_t i) { out[i] = load_one(in + i); });
    else
      for (int64_t i = 0; i < n; ++i) out[i] = load_one(in + i * stride);
  });
}

template <class A> void store_chunk(Dtype dtype, void* p, int64_t n, const A* in) {
  with_type_of<A>(dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    auto* out = static_cast<T*>(p);
    sweep<A>(
        n, [&](int64_t i) { store_pair(out + i, load_pair(in + i)); }, [&](int64_t i) { out[i] = static_cast<T>(in[i]); });
  });
}

// sum += in
template <class A> void add_chunk(const A* in, int64_t n, A* sum) {
  sweep<A>(
      n, [&](int64_t i) { store_pair(sum + i, load_pair(sum + i) + load_pair(in + i)); }, [&](int64_t i) { sum[i] += in[i]; });
}

// Calls f with the activation that has this code.
template <class F> void with_activation(int code, F&& f) {
  enum {
#define KF_CODE(name) code_of_##name,
    KF_ACTIVATIONS(KF_CODE)
#undef KF_CODE
  };
  switch (code) {
#define KF_CASE(name) \
  case code_of_##name: return f(act::name{});
    KF_ACTIVATIONS(KF_CASE)
#undef KF_CASE
  }
}

// f(offset, count) for each vector of [0, n), the last of them perhaps not full.
template <class A, class F> void each_vector(int64_t n, F&& f) {
  constexpr int64_t kSize = Vectorized<A>::size();
  int64_t i = 0;
  for (; i + kSize <= n; i += kSize) f(i, kSize);
  if (i < n) f(i, n - i);
}

// x = activation(x)
template <class A> void activate_chunk(int code, A* x, int64_t n) {
  with_activation(code, [&](auto activation) {
    using F = decltype(activation);
    using V = Vectorized<A>;
    if constexpr (!std::is_same_v<F, act::identity>)
      each_vector<A>(n, [&](int64_t i, int64_t count) { F::template value<Math<A>>(V::loadu(x + i, count)).store(x + i, count); });
  });
}

// Whether backward selects instead of multiplying: where the slope is 0, so is the gradient, whatever arrives.
template <class F>
inline constexpr bool kSelects = std::is_same_v<F, act::relu> || std::is_same_v<F, act::relu_squared> ||
                                 std::is_same_v<F, act::hardswish> || std::is_same_v<F, act::sign>;

// gradient *= activation'(x)
template <class A> void slope_chunk(int code, const A* x, A* gradient, int64_t n) {
  with_activation(code, [&](auto activation) {
    using F = decltype(activation);
    using V = Vectorized<A>;
    if constexpr (!std::is_same_v<F, act::identity>)
      each_vector<A>(n, [&](int64_t i, int64_t count) {
        const V slope = F::template slope<Math<A>>(V::loadu(x + i, count));
        V product = V::loadu(gradient + i, count) * slope;
        if constexpr (kSelects<F>) product = V::blendv(product, V(A(0)), slope == V(A(0)));
        product.store(gradient + i, count);
      });
  });
}

// Dropout of elements whose positions begin at `position`. What is dropped is 0, whatever it was.
template <class A> void dropout_chunk(A* x, int64_t n, int64_t position, uint64_t seed, uint32_t threshold) {
  const A scale = threshold < 65536 ? static_cast<A>(65536.0 / (65536 - threshold)) : A(0);
  for (int64_t i = 0; i < n;) {
    const int64_t at = position + i;
    const RandomBits bits = random_bits(seed, static_cast<uint64_t>(at / 8));
    for (int lane = static_cast<int>(at % 8); lane < 8 && i < n; ++lane, ++i)
      x[i] = bits.of(lane) < threshold ? A(0) : x[i] * scale;
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
