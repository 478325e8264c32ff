// How the CPU operators prepare the memory that they fill.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace kf {

// The address of a tensor, null if undefined.
inline const char* bytes(const at::Tensor& t) { return static_cast<const char*>(t.defined() ? t.const_data_ptr() : nullptr); }

// Asks for huge pages under a large result that is about to be written completely. The C library returns a freed result of this
// size to the system, so the next one faults in every page again, which takes several times as long as the work. Below 4 MB
// freed memory is reused. A kernel without huge pages ignores this.
inline void prefer_huge_pages([[maybe_unused]] const at::Tensor& result) {
#ifdef __linux__
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20, kLeast = 2 * kHugePage;
  if (!result.defined() || result.nbytes() < kLeast) return;
  const auto begin = reinterpret_cast<uintptr_t>(result.data_ptr()), end = begin + result.nbytes();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = end / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Whether to write a result past the caches. A call that moves `bytes` keeps nothing of the result in them anyway, and a line
// that is not kept need not be read before it is written. Many threads have the caches of all their cores.
inline bool past_caches(size_t bytes, int64_t threads = 1) {
  constexpr size_t kCache = size_t{32} << 20;  // of a core; sysconf counts the whole socket
  constexpr size_t kOwn = size_t{7} << 19;     // of a core when all of them work
  return bytes >= std::max(kCache, static_cast<size_t>(threads) * kOwn);
}

// Whether it fills the caches so much that hardly all of it stays there.
inline bool nearly_past_caches(size_t bytes) { return past_caches(2 * bytes); }

}  // namespace kf
