// Finds and launches compiled kernels. It knows no kernel: a request is a row of numbers that Python's planner
// (backends/cuda/planner.py) understands, and a plan is what the planner answers.
#pragma once

#include <c10/core/Device.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "cuda/driver.h"

namespace kf {

// What a kernel is compiled for; the planner's key. The fields and their order are mirrored in planner.py.
struct KernelRequest {
  int32_t device;
  int32_t kernel;  // 0 forward, 1 backward, 2 backward, weights alone, 3 sum of partials
  int32_t cols;
  int32_t rms;
  int32_t x, y, weight, bias;  // Dtype codes, -1: absent; y is dy in backward
  int32_t flags;               // Flag below
  int32_t align_x, align_y, align_weight, align_dx;

  enum Flag : int32_t { kStats = 1, kOffset = 2, kDX = 4, kDWeight = 8, kDBias = 16, kStridedX = 32, kStridedY = 64 };

  bool operator==(const KernelRequest&) const = default;
};

// A kernel ready to be launched on one device.
struct LoadedKernel {
  driver::Function function;
  int threads, shared_bytes, cluster;
  int per_block;  // rows, or columns where a kernel works on columns
  bool splits_weight, persistent;
  bool chained;    // launched before the kernel before it has ended; it waits by itself
  int max_blocks;  // that run at once on the whole device

  // Blocks for so many rows (or columns).
  int64_t grid(int64_t count) const {
    const int64_t groups = (count + per_block - 1) / per_block;
    return (persistent ? std::min<int64_t>(groups, max_blocks / cluster) : groups) * cluster;
  }
};

// The stream that PyTorch works on, and the context made current on this thread.
driver::Stream current_stream(c10::Device device);

// The kernel for a request: a look-up, or on first use a call to the planner. Throws under graph capture if it would
// have to load.
const LoadedKernel& find_kernel(const KernelRequest& request, driver::Stream stream);

// Launches on `grid_x` blocks (a multiple of the cluster) times `grid_y`; `args` is the kernel's only parameter.
void launch(const LoadedKernel& kernel, int64_t grid_x, int64_t grid_y, driver::Stream stream, const void* args);

}  // namespace kf
