// The memory that row norms read, and that of their results.
#pragma once

#include <cstring>

#include "cpu/kernels.h"
#include "cpu/typed_row.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

inline const char* element(Dtype dtype, const void* tensor, int64_t index) {
  return static_cast<const char*>(tensor) + index * size_of(dtype);
}
inline char* element(Dtype dtype, void* tensor, int64_t index) { return static_cast<char*>(tensor) + index * size_of(dtype); }

// Null stays null.
template <class T> const T* from(const T* p, int64_t start) { return p ? p + start : nullptr; }

KF_INLINE void fetch(const void* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(p) + line);
}

// Contiguous results of type T.
template <class T> struct Results {
  using A = AccOf<T>;
  Target<A> target;
  static Results at(Dtype, void* p, bool streams = false) { return {Target<A>::streamed(kDtypeOf<T>, p, streams)}; }
  KF_INLINE void put(int64_t i, const Pair<A>& v, Whole) const { target.template store<T>(i, v); }
  KF_INLINE void put(int64_t i, const Pair<A>& v, Part part) const { store_pair(static_cast<T*>(target.data) + i, v, part); }
};

// The same for a type known at run time.
template <class A> struct AnyResults {
  Target<A> target;
  static AnyResults at(Dtype type, void* p, bool streams = false) { return {Target<A>::streamed(type, p, streams)}; }
  template <class P> KF_INLINE void put(int64_t i, const Pair<A>& v, P part) const { target.store(i, v, part); }
};

// Results of rows, at most kStretch at a time. Rows that end within cache lines can seldom be streamed alone, and lines
// partly streamed and partly stored cost most. So they are assembled in the L1 cache and leave it in whole lines.
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

  // An R that writes at `to`.
  template <class R> R open(void* to) {
    if (!cut) return R::at(type, to, streams);
    if (static_cast<char*>(to) != lines + end) {
      flush();
      begin = end = reinterpret_cast<uintptr_t>(to) % kLine;
      lines = static_cast<char*>(to) - begin;
    }
    return R::at(type, room + end);
  }

  // n of them are written.
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
    if (begin) {  // the line's earlier elements belong to others
      std::memcpy(lines + begin, room + begin, kLine - begin);
      begin = 0;
      i = kLine;
    }
    for (; i + kLine <= end; i += kLine)
      for (int64_t j = i; j < i + kLine; j += kVector) stream(V::loadu(room + j), reinterpret_cast<float*>(lines + j));
    std::memcpy(room, room + i, end - i);  // a line that goes on
    lines += i;
    end -= i;
  }

  void flush() {
    if (begin < end) std::memcpy(lines + begin, room + begin, end - begin);
    begin = end;
  }

  const Dtype type;
  const bool streams, cut;
  char* lines = nullptr;       // where `room` goes
  int64_t begin = 0, end = 0;  // what waits in it
  alignas(kLine) char room[kLine + kStretch * sizeof(double)];
};

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
