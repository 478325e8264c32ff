// A thread's way through memory: several loads on their way before the first is used.
#pragma once

namespace kf {

// use(i, load(i)) for i = first, first + step, ... below `end`, kBatch of them loaded at a time; the first i that is not below.
// Of the rest half as many, and so on, since slow loads are best waited for together; or one by one, which takes less code and,
// of long bodies, fewer registers.
template <int kBatch, bool kHalves = true, class I, class Load, class Use>
__device__ I batched(I first, I end, I step, const Load& load, const Use& use) {
  I i = first;
  // Left alone, the compiler unrolls this loop too, and a batch of 4 becomes 16 loads in 96 registers.
#pragma unroll 1
  for (; i < end - (kBatch - 1) * step; i += kBatch * step) {
    decltype(load(i)) loaded[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) loaded[u] = load(i + u * step);
#pragma unroll
    for (int u = 0; u < kBatch; ++u) use(i + u * step, loaded[u]);
  }
  if constexpr (kBatch > 1) return batched<kHalves ? kBatch / 2 : 1>(i, end, step, load, use);
  else return i;
}

}  // namespace kf
