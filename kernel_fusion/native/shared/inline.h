#pragma once

#ifdef __CUDACC_RTC__
#define KF_INLINE __device__ inline
#else
// The linker might keep one whose instructions the machine lacks.
#define KF_INLINE __attribute__((always_inline)) inline
#endif

// A lambda that is called twice could stay a function.
#define KF_INLINE_LAMBDA __attribute__((always_inline))
