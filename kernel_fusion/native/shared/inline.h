// Functions that host and device share.
#pragma once

#ifdef __CUDACC_RTC__
#define KF_INLINE __device__ inline
#else
// Builds of the CPU kernels share names: the linker might keep one whose instructions the machine lacks.
#define KF_INLINE __attribute__((always_inline)) inline
#endif

// A lambda that is called twice could stay a function that reads its captures from memory.
#define KF_INLINE_LAMBDA __attribute__((always_inline))
