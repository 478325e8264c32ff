// Functions that host and device share.
#pragma once

#ifdef __CUDACC_RTC__
#define KF_INLINE __device__ inline
#else
// Always: builds of the CPU kernels share names, and the linker would keep one copy, perhaps with instructions that the machine
// lacks.
#define KF_INLINE __attribute__((always_inline)) inline
#endif

// For a lambda, between its parameters and its body. If called twice, it could stay a function whose captures loops read from
// memory.
#define KF_INLINE_LAMBDA __attribute__((always_inline))
