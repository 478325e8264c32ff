// Weight and bias as the row norms take them.
#pragma once

#include <limits>
#include <tuple>

#include "cpu/chunk.h"
#include "cpu/kernels.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

// A NaN as arithmetic makes it, for `interleaved_bits`.
template <class A> inline Vectorized<A> plain_nan(const Vectorized<A>& v) {
  return Vectorized<A>::blendv(v, Vectorized<A>(std::numeric_limits<A>::quiet_NaN()), v != v);
}

// Elements [begin, end) to `out`.
template <class T> void prepare_as(const Parameter& p, int64_t begin, int64_t end, AccOf<T>* out) {
  using A = AccOf<T>;
  const T* in = static_cast<const T*>(p.data) + begin;
  const A offset = p.offset == 0 ? A(-0.0) : static_cast<A>(p.offset);  // -0.0 changes nothing, not even the sign of a zero
  const auto offsets = both(offset);
  sweep<A>(end - begin, [&](int64_t i, auto part) {
    if constexpr (std::is_same_v<T, c10::BFloat16>)
      if (p.interleaved) return store_pair(out + i, load_pair(static_cast<const Interleaved*>(in) + i, part) + offsets, part);
    auto v = load_pair(in + i, part) + offsets;
    if (p.interleaved) v = {plain_nan(v.a), plain_nan(v.b)};  // other results keep NaN
    if constexpr (std::is_same_v<A, float> && std::is_same_v<decltype(part), Whole>)
      if (p.interleaved) std::tie(v.a, v.b) = at::vec::deinterleave2(v.a, v.b);
    store_pair(out + i, v, part);
  });
}

// Columns [start, start + n), prepared.
template <class A> [[gnu::noinline]] void prepare_stretch(const Parameter& p, int64_t start, int64_t n, A* out) {
  with_type_of<A>(p.type, [&](auto* type) { prepare_as<std::remove_pointer_t<decltype(type)>>(p, start, start + n, out); });
}

// The same in place, or in `room`.
template <class A> KF_INLINE const A* stretch_of(const Parameter& p, int64_t start, int64_t n, A* room) {
  if (!p.data) return nullptr;
  if (p.as_is(kDtypeOf<A>)) return static_cast<const A*>(p.data) + start;
  prepare_stretch(p, start, n, room);
  return room;
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
