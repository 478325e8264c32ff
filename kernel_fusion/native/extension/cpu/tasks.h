// How loops are shared among threads. No result depends on it.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

namespace kf {

// Elements that are worth a parallel region, which wakes every thread, however few of them find work in it.
constexpr int64_t kRegion = 32768;

// at::parallel_for over `count` steps of so many elements each: all threads, or none.
template <class F> void share(int64_t count, int64_t elements_each, F&& f) {
  constexpr int64_t kLeast = 2048;  // of a thread
  const int64_t grain = count * elements_each <= kRegion ? count : std::max<int64_t>(1, kLeast / std::max<int64_t>(1, elements_each));
  at::parallel_for(0, count, grain, f);
}

}  // namespace kf
