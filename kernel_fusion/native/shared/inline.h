// A function that host and device share.
#pragma once

#ifdef __CUDACC_RTC__
#define KF_INLINE __device__ inline
#else
// Always: a copy that is not inlined has one name in all the builds of the CPU kernels, and the linker would keep one of them,
// perhaps with instructions that the machine lacks.
#define KF_INLINE __attribute__((always_inline)) inline
#endif
