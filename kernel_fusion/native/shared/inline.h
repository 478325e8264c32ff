// Functions that host and device share.
#pragma once

#ifdef __CUDACC_RTC__
#define KF_INLINE __device__ inline
#else
// Builds of the CPU kernels share names, and the linker might keep one whose instructions the machine lacks.
#define KF_INLINE __attribute__((always_inline)) inline
#endif

// Before a lambda's body: called twice, it could stay a function that reads its captures from memory.
#define KF_INLINE_LAMBDA __attribute__((always_inline))
