// Finds and launches compiled kernels without knowing any of them. A key is a row of numbers that Python's planner understands
// (backends/cuda/planner.py), and a plan is the planner's answer.
#pragma once

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "cuda/driver.h"
#include "cuda/specs.h"
#include "operators.h"

namespace kf {

inline int64_t size_of(at::ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); }

// The largest power of two that divides n and is at most `most`, which is a power of two.
inline int64_t dividing_power(int64_t n, int64_t most) {
  while (n % most != 0) most /= 2;
  return most;
}

inline void check_length(int64_t cols) {
  if (cols > INT32_MAX) driver::fail("rows of more than 2^31 - 1 elements are not supported, got N = " + std::to_string(cols));
}

// The alignment that all addresses p + k * steps have, at most that of vectors of `vector_bytes`.
inline int32_t alignment_within(const void* p, int64_t steps, int64_t vector_bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(steps);
  return std::min<int32_t>(alignment_of(reinterpret_cast<const void*>(bits)),
                           static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(vector_bytes))));
}

// The numbers by which the planner knows a kernel: the device, the kernel's number, the fields of spec and access, then zeros.
struct KernelKey {
  int numbers[2 + kKeyFields] = {};

  KernelKey() = default;
  template <class S, class A>
  KernelKey(c10::Device device, const S& spec, const A& access) : numbers{device.index(), S::kKernel} {
    static_assert(sizeof spec + sizeof access <= kKeyFields * sizeof(int));
    std::memcpy(numbers + 2, &spec, sizeof spec);
    std::memcpy(numbers + 2 + sizeof spec / sizeof(int), &access, sizeof access);
  }
  int device() const { return numbers[0]; }
  bool operator==(const KernelKey&) const = default;
};

// A kernel ready to be launched on one device.
struct LoadedKernel : Launch {
  driver::Function function;  // null in a rehearsal
  int max_blocks;             // the number of blocks that run at once on the device

  // The number of blocks for this many rows (or columns) of each of `groups` groups.
  int64_t grid(int64_t count, int64_t groups = 1) const {
    const int64_t at_once = std::max<int64_t>(1, max_blocks / cluster / groups), fewest = (count + per_block - 1) / per_block;
    const int64_t most = (count + least_per_block - 1) / least_per_block;
    return (persistent ? std::min(fewest, at_once) : std::max(fewest, std::min(most, at_once))) * cluster;
  }
};

// Makes a device current on this thread and binds its context, until the end of the scope. `stream` is PyTorch's current stream
// on that device.
struct OnDevice {
  explicit OnDevice(c10::Device device);
  const c10::DeviceGuard guard;
  const driver::Stream stream;
};

// The number of the device's multiprocessors. It asks the driver once per thread.
int multiprocessors(c10::Device device);

// The kernel for a key. It is looked up or, at first use, planned and loaded. Throws if it would have to be loaded during a
// graph capture.
const LoadedKernel& find_kernel(const KernelKey& key, driver::Stream stream);

// Launches `grid_x` blocks (a multiple of the cluster) times `grid_y`; `args` is the kernel's only parameter.
void launch(const LoadedKernel& kernel, int64_t grid_x, int64_t grid_y, driver::Stream stream, const void* args);

// Launches the kernel for `spec` and `access` over `count` rows.
template <class S, class A>
void launch_over(int64_t count, c10::Device device, const S& spec, const A& access, const void* args) {
  const OnDevice on(device);
  const auto& kernel = find_kernel({device, spec, access}, on.stream);
  launch(kernel, kernel.grid(count), 1, on.stream, args);
}

// How a kernel that reads vectors of `vec` elements sees these rows.
inline RowAccess row_access(const Rows& rows, int64_t vec) {
  return {std::min(rows.alignment, static_cast<int>(vec * size_of(rows.tensor.scalar_type()))), rows.strided};
}

// The same of logits, or of probabilities: the number of vectors in a row is rounded up to 2^k or 3 * 2^k, for which a kernel
// is compiled. `other` may be a mask.
SoftmaxAccess softmax_access(const Rows& x, const Rows* other, bool mask_repeats = false);

}  // namespace kf
