// Programmatic dependent launch: a kernel is launched while the one before it in the stream still runs, and waits here.
// So the time between kernels, about a microsecond, hides behind the tail of the first. Every kernel of ours calls this
// before it touches memory; launched in the ordinary way, it does nothing. sm_90 and newer.
#pragma once

namespace kf {

__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace kf
