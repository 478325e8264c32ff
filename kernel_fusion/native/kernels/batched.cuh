// A thread's way through memory: several loads on their way before the first is used.
#pragma once

namespace kf {

// use(i, load(i)) for i = first, first + step, ... below `end`, kBatch of them loaded at a time; the first i that is not.
template <int kBatch, class I, class Load, class Use>
__device__ I batched(I first, I end, I step, const Load& load, const Use& use) {
  I i = first;
#pragma unroll 1
  for (; i < end - (kBatch - 1) * step; i += kBatch * step) {
    decltype(load(i)) loaded[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) loaded[u] = load(i + u * step);
#pragma unroll
    for (int u = 0; u < kBatch; ++u) use(i + u * step, loaded[u]);
  }
#pragma unroll 1
  for (; i < end; i += step) use(i, load(i));
  return i;
}

}  // namespace kf
