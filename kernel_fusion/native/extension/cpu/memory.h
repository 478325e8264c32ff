// What the CPU operators ask of the memory that they are about to fill.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace kf {

// The address of a tensor, null where it is undefined.
inline const char* bytes(const at::Tensor& t) { return static_cast<const char*>(t.defined() ? t.const_data_ptr() : nullptr); }

// Asks for huge pages under a large result that is about to be written from end to end. The C library gives such a result back
// to the system when it is freed, so that the next one faults in every page again: 16384 of 4 KB for torch.neg of 4096 x 4096
// fp32, which takes 53 ms, of 8.5 for the work itself; in huge pages 13 (AMD EPYC, 1 thread). Below 4 MB it is taken from
// memory that was in use before, and there is nothing to win. A kernel that has no huge pages to give takes no notice.
inline void prefer_huge_pages([[maybe_unused]] const at::Tensor& result) {
#ifdef __linux__
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20, kLeast = 2 * kHugePage;
  if (!result.defined() || result.nbytes() < kLeast) return;
  const auto begin = reinterpret_cast<uintptr_t>(result.data_ptr()), end = begin + result.nbytes();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = end / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Whether a result is best written past the caches: a call that moves `bytes` leaves none of the result in them that it does
// not push out again, and a line that is not kept need not be read before it is written. Of three operands and a result of 16
// MB each, 2.8 ms instead of 3.6 (AMD EPYC, 32 MB of cache, 1 thread). Many threads have more cache, that of their cores: 16 of
// them take 0.17 ms for relu or a norm of 2048 x 2048 fp32 instead of 0.24, but for a norm of 4000 x 2048 0.49 instead of 0.39
// (Xeon).
inline bool past_caches(size_t bytes, int64_t threads = 1) {
  constexpr size_t kCache = size_t{32} << 20;  // what a core has of it; sysconf counts all there is in the socket
  constexpr size_t kOwn = size_t{7} << 19;     // and what it has when all of them work
  return bytes >= std::max(kCache, static_cast<size_t>(threads) * kOwn);
}

// Whether it fills so much of the caches that it will hardly all be found there.
inline bool nearly_past_caches(size_t bytes) { return past_caches(2 * bytes); }

}  // namespace kf
