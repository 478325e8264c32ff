#include "counters.h"

#include <atomic>
#include <cstdint>

namespace kf {
namespace {

std::atomic<int64_t> counts[static_cast<int>(Counter::kCount)];

}  // namespace

void count(Counter counter) { counts[static_cast<int>(counter)].fetch_add(1, std::memory_order_relaxed); }

}  // namespace kf

// Read from Python through ctypes.
extern "C" __attribute__((visibility("default"))) int64_t kf_count(int counter) { return kf::counts[counter].load(); }
