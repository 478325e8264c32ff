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

// The same, where the address of the first read is found before the wait, in time that costs nothing. The compiler would find
// it afterwards, if it were not for a store that wants it: to shared memory where nobody reads it, and never executed, since
// the address of no element ends in 32 ones.
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
