// Memory that CPU operators fill.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace kf {

// The address, or null.
inline const char* bytes(const at::Tensor& t) { return static_cast<const char*>(t.defined() ? t.const_data_ptr() : nullptr); }

// Huge pages for a large result. The C library returns such memory to the system, so the next result faults in every
// page, which takes several times as long as the work. Below 4 MB it is reused.
inline void prefer_huge_pages([[maybe_unused]] const at::Tensor& result) {
#ifdef __linux__
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20, kLeast = 2 * kHugePage;
  if (!result.defined() || result.nbytes() < kLeast) return;
  const auto begin = reinterpret_cast<uintptr_t>(result.data_ptr()), end = begin + result.nbytes();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = end / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Whether to stream results: a call that moves `bytes` leaves nothing in the caches, and unread lines need not be
// fetched. Many threads have all their cores' caches.
inline bool past_caches(size_t bytes, int64_t threads = 1) {
  constexpr size_t kCache = size_t{32} << 20;  // of a core; sysconf counts a socket
  constexpr size_t kOwn = size_t{7} << 19;     // of a core when all work
  return bytes >= std::max(kCache, static_cast<size_t>(threads) * kOwn);
}

inline bool nearly_past_caches(size_t bytes) { return past_caches(2 * bytes); }

}  // namespace kf
