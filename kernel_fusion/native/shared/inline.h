// Functions that host and device share.
#pragma once

#ifdef __CUDACC_RTC__
#define KF_INLINE __device__ inline
#else
// Always: builds of the CPU kernels share names, and the linker might keep one whose instructions the machine lacks.
#define KF_INLINE __attribute__((always_inline)) inline
#endif

// For a lambda, before its body. Called twice, it could stay a function whose captures loops read from memory.
#define KF_INLINE_LAMBDA __attribute__((always_inline))
