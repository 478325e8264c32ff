// A function that host and device share.
#pragma once

#ifdef __CUDACC_RTC__
#define KF_INLINE __device__ inline
#else
// Always: a copy that is not inlined has one name in all the builds of the CPU kernels, and the linker would keep one of them,
// perhaps with instructions that the machine lacks.
#define KF_INLINE __attribute__((always_inline)) inline
#endif

// The same of a lambda, between its parameters and its body. One that is called from two places may otherwise stay a function,
// whose captures the loops around it then read from memory.
#define KF_INLINE_LAMBDA __attribute__((always_inline))
