// How loops are shared among threads. No result depends on it.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

namespace kf {

// Elements that are worth a parallel region, which wakes every thread, however few of them find work in it, and of a thread.
constexpr int64_t kRegion = 32768, kLeast = 2048;

// at::parallel_for over `count` steps of so many elements each: all threads, or none. The more there are, the longer it takes to
// wake them: LayerNorm of 100 x 512 fp32 takes 11 microseconds by one thread, 9.7 by two, but up to 21 by 16 (Xeon with AVX-512).
template <class F> void share(int64_t count, int64_t elements_each, F&& f) {
  const bool worth_it = count * elements_each > kRegion + kLeast * at::get_num_threads();
  const int64_t grain = worth_it ? std::max<int64_t>(1, kLeast / std::max<int64_t>(1, elements_each)) : count;
  at::parallel_for(0, count, grain, f);
}

}  // namespace kf
