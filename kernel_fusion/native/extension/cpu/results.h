// Where the row norms leave their results; for the kernels, once per instruction set.
#pragma once

#include <cstring>

#include "cpu/kernels.h"
#include "cpu/typed_row.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {
namespace {

// Side by side, as elements T.
template <class T> struct Results {
  using A = AccOf<T>;
  Target<A> target;
  explicit Results(T* p, bool streams = false) : target(Target<A>::streamed(kDtypeOf<T>, p, streams)) {}
  KF_INLINE void put(int64_t i, const Pair<A>& v, Whole) const { target.template store<T>(i, v); }
  KF_INLINE void put(int64_t i, const Pair<A>& v, Part part) const { store_pair(static_cast<T*>(target.data) + i, v, part); }
};

// Those of rows, at most kStretch at a time. What is streamed, but begins and ends anywhere in a cache line, is put together in the
// L1 cache and leaves in whole lines: rows by themselves could seldom be streamed, and a line of which some elements are streamed and
// others stored costs most of all. Forward of 33554 x 250 fp32 takes 0.36 ns per element instead of 0.43, of 8388 x 1000 bf16 0.10
// instead of 0.15 (EPYC with AVX-512, 1 thread).
template <class T> class RowResults {
 public:
  RowResults(const void* first, int64_t cols, bool streams)
      : streams(streams),
        cut(kCanStream && streams && (reinterpret_cast<uintptr_t>(first) | cols * sizeof(T)) % Target<AccOf<T>>::kAlignment != 0) {}
  RowResults(const RowResults&) = delete;
  ~RowResults() {
    flush();
    if (streams) finish_streams();
  }

  // Where the results go that belong at `to`.
  Results<T> open(T* to) {
    if (!cut) return Results<T>(to, streams);
    if (reinterpret_cast<char*>(to) != lines + end) {
      flush();
      begin = end = reinterpret_cast<uintptr_t>(to) % kLine;
      lines = reinterpret_cast<char*>(to) - begin;
    }
    return Results<T>(reinterpret_cast<T*>(room + end));
  }

  // n of them are there.
  void close(int64_t n) {
    if (!cut) return;
    end += n * sizeof(T);
    if (end >= kLine) stream_lines();
  }

 private:
  using V = Vectorized<float>;
  static constexpr int64_t kLine = 64;

  void stream_lines() {
    int64_t i = 0;
    if (begin) {  // what comes before it in its line belongs to others
      std::memcpy(lines + begin, room + begin, kLine - begin);
      begin = 0;
      i = kLine;
    }
    for (; i + kLine <= end; i += kLine)
      for (int64_t j = i; j < i + kLine; j += sizeof(V)) stream(V::loadu(room + j), reinterpret_cast<float*>(lines + j));
    std::memcpy(room, room + i, end - i);  // of a line that goes on
    lines += i;
    end -= i;
  }

  void flush() {
    if (begin < end) std::memcpy(lines + begin, room + begin, end - begin);
    begin = end;
  }

  const bool streams, cut;
  char* lines = nullptr;       // where `room` goes
  int64_t begin = 0, end = 0;  // of what waits in it
  alignas(kLine) char room[kLine + kStretch * sizeof(T)];
};

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
