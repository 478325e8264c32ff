// Finds and launches compiled kernels. It knows no kernel: a request is a row of numbers that Python's planner
// (backends/cuda/planner.py) understands, and a plan is what the planner answers.
#pragma once

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "cuda/driver.h"

namespace kf {

// The kernels, by the numbers that planner.py knows them by.
enum class Kernel : int32_t {
  kRowNormFwd, kRowNormBwd, kRowNormBwdWeight, kSumPartials, kPointwise, kPointwiseBwd, kReduce, kSoftmax, kSoftmaxBwd
};

// What a kernel is compiled for; the planner's key. The fields are those of the kernel's own struct in requests.h, followed
// by zeros; planner.py mirrors them.
struct KernelRequest {
  int32_t device = 0;
  Kernel kernel{};
  int32_t fields[22] = {};

  KernelRequest() = default;
  template <class Fields> KernelRequest(int device, Kernel kernel, const Fields& own) : device(device), kernel(kernel) {
    static_assert(sizeof own <= sizeof fields && sizeof own % sizeof(int32_t) == 0);
    std::memcpy(fields, &own, sizeof own);
  }
  bool operator==(const KernelRequest&) const = default;
};

// A kernel ready to be launched on one device.
struct LoadedKernel {
  driver::Function function;
  int threads, shared_bytes, cluster;
  int per_block, least_per_block;  // rows, or columns where a kernel works on columns: at most, and if few fill the device
  bool splits_weight, persistent;
  bool chained;    // launched before the kernel before it has ended; it waits by itself
  int max_blocks;  // that run at once on the whole device

  // Blocks for so many rows (or columns).
  int64_t grid(int64_t count) const {
    const int64_t at_once = max_blocks / cluster, fewest = (count + per_block - 1) / per_block;
    const int64_t most = (count + least_per_block - 1) / least_per_block;
    return (persistent ? std::min(fewest, at_once) : std::max(fewest, std::min(most, at_once))) * cluster;
  }
};

// Makes a device the current one of this thread, with its context bound, until the end of the scope. `stream` is the one
// that PyTorch works on there.
struct OnDevice {
  explicit OnDevice(c10::Device device);
  const c10::DeviceGuard guard;
  const driver::Stream stream;
};

// How many multiprocessors the device has; the driver is asked once per thread.
int multiprocessors(c10::Device device);

// The kernel for a request: a look-up, or on first use a call to the planner. Throws under graph capture if it would
// have to load.
const LoadedKernel& find_kernel(const KernelRequest& request, driver::Stream stream);

// Launches on `grid_x` blocks (a multiple of the cluster) times `grid_y`; `args` is the kernel's only parameter.
void launch(const LoadedKernel& kernel, int64_t grid_x, int64_t grid_y, driver::Stream stream, const void* args);

}  // namespace kf
