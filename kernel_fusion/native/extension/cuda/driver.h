// The functions of the CUDA driver that loading and launching need, found at run time. So no CUDA header is needed, and the
// library does not link to the driver. Declarations follow the CUDA Driver API reference; the layouts of its structs are part
// of its stable binary interface.
#pragma once

#include <cstddef>
#include <string>

namespace kf::driver {

using Result = int;
using Device = int;
using Context = struct ContextHandle*;
using Library = struct LibraryHandle*;
using Kernel = struct KernelHandle*;
using Function = struct FunctionHandle*;
struct StreamHandle;  // PyTorch has another one, in the global namespace
using Stream = StreamHandle*;

constexpr Result kSuccess = 0;

enum : int {
  kAttributeClusterDimension = 4,
  kAttributeProgrammaticStreamSerialization = 6,
  kFunctionMaxDynamicSharedBytes = 8,
  kFunctionNonPortableClusterSize = 14,
  kDeviceMultiprocessorCount = 16,
  kCaptureStatusNone = 0,
  kCaptureModeRelaxed = 2,
};

struct LaunchAttribute {
  int id;
  char padding[8 - sizeof(int)];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int flag;
  } value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// clang-format off
#define KF_DRIVER_FUNCTIONS(X) \
  X(cuGetErrorString, Result, const char**) \
  X(cuDeviceGet, Device*, int ordinal) \
  X(cuDeviceGetAttribute, int*, int attribute, Device) \
  X(cuDevicePrimaryCtxRetain, Context*, Device) \
  X(cuCtxGetCurrent, Context*) \
  X(cuCtxSetCurrent, Context) \
  X(cuLibraryLoadData, Library*, const void* code, int* jit_options, void** jit_values, unsigned num_jit, int* options, \
                       void** values, unsigned num) \
  X(cuLibraryGetKernel, Kernel*, Library, const char* name) \
  X(cuKernelGetFunction, Function*, Kernel) \
  X(cuFuncLoad, Function) \
  X(cuFuncSetAttribute, Function, int attribute, int value) \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, int*, Function, int threads, size_t shared_bytes) \
  X(cuOccupancyMaxActiveClusters, int*, Function, const LaunchConfig*) \
  X(cuLaunchKernelEx, const LaunchConfig*, Function, void** parameters, void** extra) \
  X(cuStreamIsCapturing, Stream, int* status) \
  X(cuThreadExchangeStreamCaptureMode, int* mode)
// clang-format on

struct Api {
#define KF_POINTER(name, ...) Result (*name)(__VA_ARGS__);
  KF_DRIVER_FUNCTIONS(KF_POINTER)
#undef KF_POINTER
};

// The loaded driver; throws c10::Error without one.
const Api& api();

// Throws c10::Error. It takes one finished string. Several arguments would go through a stream, and streams crash if this
// library's compiler brings another libstdc++ than the one of the process.
[[noreturn]] void fail(const std::string& text);

// Throws c10::Error with the driver's text unless `result` is success.
void check(Result result, const char* what);

}  // namespace kf::driver
