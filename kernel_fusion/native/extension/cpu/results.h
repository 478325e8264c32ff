// The memory of row norms: addresses of elements, weight and bias in the form that the loops take, and stores of results.
#pragma once

#include <cstring>
#include <limits>
#include <tuple>

#include "cpu/chunk.h"
#include "cpu/kernels.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

inline const char* element(Dtype dtype, const void* tensor, int64_t index) {
  return static_cast<const char*>(tensor) + index * size_of(dtype);
}
inline char* element(Dtype dtype, void* tensor, int64_t index) { return static_cast<char*>(tensor) + index * size_of(dtype); }

template <class T> const T* from(const T* p, int64_t start) { return p ? p + start : nullptr; }

KF_INLINE void fetch(const void* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(p) + line);
}

// ---- Weight and bias -------------------------------------------------------------------------------------------------------

// v with every NaN replaced by the NaN that arithmetic makes, as `interleaved_bits` needs it.
template <class A> inline Vectorized<A> plain_nan(const Vectorized<A>& v) {
  return Vectorized<A>::blendv(v, Vectorized<A>(std::numeric_limits<A>::quiet_NaN()), v != v);
}

// Prepares columns [start, start + n) of a parameter: converts them to A, adds the offset, and changes their order if asked.
template <class A> [[gnu::noinline]] void prepare_stretch(const Parameter& p, int64_t start, int64_t n, A* out) {
  const A offset = p.offset == 0 ? A(-0.0) : static_cast<A>(p.offset);  // adding -0.0 changes no value, not even a zero's sign
  const auto offsets = both(offset);
  with_type_of<A>(p.type, [&]<class T>(T*) {
    const T* in = static_cast<const T*>(p.data) + start;
    sweep<A>(n, [&](int64_t i, auto part) {
      if constexpr (std::is_same_v<T, c10::BFloat16>)
        if (p.interleaved) return store_pair(out + i, load_pair(static_cast<const Interleaved*>(in) + i, part) + offsets, part);
      auto v = load_pair(in + i, part) + offsets;
      if (p.interleaved) v = {plain_nan(v.a), plain_nan(v.b)};  // loops in other orders keep a NaN's bits
      if constexpr (std::is_same_v<A, float> && std::is_same_v<decltype(part), Whole>)
        if (p.interleaved) std::tie(v.a, v.b) = at::vec::deinterleave2(v.a, v.b);
      store_pair(out + i, v, part);
    });
  });
}

// The prepared columns [start, start + n): where they lie, if they need no preparation, otherwise in `room`.
template <class A> KF_INLINE const A* stretch_of(const Parameter& p, int64_t start, int64_t n, A* room) {
  if (!p.data) return nullptr;
  if (p.as_is(kDtypeOf<A>)) return static_cast<const A*>(p.data) + start;
  prepare_stretch(p, start, n, room);
  return room;
}

// ---- Results ---------------------------------------------------------------------------------------------------------------

// Stores contiguous results of type T.
template <class T> struct Results {
  using A = AccOf<T>;
  Target<A> target;
  static Results at(Dtype, void* p, bool streams = false) { return {Target<A>::streamed(kDtypeOf<T>, p, streams)}; }
  KF_INLINE void put(int64_t i, const Pair<A>& v, Whole) const { target.template store<T>(i, v); }
  KF_INLINE void put(int64_t i, const Pair<A>& v, Part part) const { store_pair(static_cast<T*>(target.data) + i, v, part); }
};

// Stores contiguous results of a type known at run time.
template <class A> struct AnyResults {
  Target<A> target;
  static AnyResults at(Dtype type, void* p, bool streams = false) { return {Target<A>::streamed(type, p, streams)}; }
  template <class P> KF_INLINE void put(int64_t i, const Pair<A>& v, P part) const { target.store(i, v, part); }
};

// Stores the results of rows, at most kStretch elements at a time. Rows that end within a cache line can seldom be streamed
// by themselves, and a line that is partly streamed and partly stored is slowest. So such rows are assembled in the L1 cache
// and leave it in whole lines.
class RowResults {
 public:
  RowResults(Dtype type, const void* first, int64_t cols, bool streams)
      : type(type), streams(streams && first),
        cut(kCanStream && this->streams && (reinterpret_cast<uintptr_t>(first) | cols * size_of(type)) % kVector != 0) {}
  RowResults(const RowResults&) = delete;
  ~RowResults() {
    flush();
    if (streams) finish_streams();
  }

  // Returns an R (`Results` or `AnyResults`) that writes to `to`, perhaps by way of `room`. `close` must follow.
  template <class R> R open(void* to) {
    if (!cut) return R::at(type, to, streams);
    if (static_cast<char*>(to) != lines + end) {
      flush();
      begin = end = reinterpret_cast<uintptr_t>(to) % kLine;
      lines = static_cast<char*>(to) - begin;
    }
    return R::at(type, room + end);
  }

  // Ends the store that `open` began, of n elements.
  void close(int64_t n) {
    if (!cut) return;
    end += n * size_of(type);
    if (end >= kLine) stream_lines();
  }

 private:
  using V = Vectorized<float>;
  static constexpr int64_t kLine = 64, kVector = sizeof(V);

  void stream_lines() {
    int64_t i = 0;
    if (begin) {  // the earlier elements of this line belong to another thread or tensor
      std::memcpy(lines + begin, room + begin, kLine - begin);
      begin = 0;
      i = kLine;
    }
    for (; i + kLine <= end; i += kLine)
      for (int64_t j = i; j < i + kLine; j += kVector) stream(V::loadu(room + j), reinterpret_cast<float*>(lines + j));
    std::memcpy(room, room + i, end - i);  // the begun line, which later rows fill
    lines += i;
    end -= i;
  }

  void flush() {
    if (begin < end) std::memcpy(lines + begin, room + begin, end - begin);
    begin = end;
  }

  const Dtype type;
  const bool streams, cut;
  char* lines = nullptr;       // the address that the first byte of `room` is stored to
  int64_t begin = 0, end = 0;  // the bytes that wait in `room`
  alignas(kLine) char room[kLine + kStretch * sizeof(double)];
};

}  // namespace
}  // namespace kf::cpu::CPU_CAPABILITY
