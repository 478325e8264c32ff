// How often each kind of kernel ran in this process: what tests assert, so that none passes through a fallback.
#pragma once

namespace kf {

enum class Counter { kCpuForward, kCpuBackward, kCudaLaunch, kCount };

void count(Counter counter);

}  // namespace kf
