// Programmatic dependent launch: a kernel starts while the one before it runs, and waits here before it touches memory.
// After an ordinary launch it does nothing. sm_90 and newer.
#pragma once

namespace kf {

__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Computes the address of the first read before the wait. A store that never executes, because no address ends in 32
// ones, keeps the compiler from doing so later.
__device__ inline void wait_for_previous_kernel(const void* first_read) {
#if __CUDA_ARCH__ >= 900
  __shared__ unsigned unread;
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(&unread));
  const auto low = static_cast<unsigned>(reinterpret_cast<unsigned long long>(first_read));
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %1, 0xffffffff; @p st.shared.u32 [%0], %1; }" ::"r"(shared), "r"(low)
               : "memory");
#endif
  wait_for_previous_kernel();
}

}  // namespace kf
