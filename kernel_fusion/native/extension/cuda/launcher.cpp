#include "cuda/launcher.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kf {
namespace {

// The planner's answer. The pointers stay valid for the life of the process.
struct KernelPlan {
  const char* error = nullptr;  // null if planning succeeded
  const char* image = nullptr;  // machine code
  const char* name = nullptr;
  Launch launch;
};

using Planner = void (*)(const int* key, const char** error, const char** image, const char** name, Launch* launch);
std::atomic<Planner> planner{nullptr};
std::atomic<uint64_t> able_devices{0};  // a bit for each device that can run the kernels
// In a rehearsal, CPU tensors stand for those of a GPU that need not be there. These are its planner and its number of
// multiprocessors.
std::atomic<Planner> rehearsal{nullptr};
std::atomic<int> rehearsed_multiprocessors{0};

struct Hash {
  size_t operator()(const KernelKey& key) const {
    static_assert(std::has_unique_object_representations_v<KernelKey>);
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(&key), sizeof key});
  }
};

using Table = std::unordered_map<KernelKey, std::unique_ptr<LoadedKernel>, Hash>;
std::shared_mutex table_mutex;
Table table;

// This thread's last kernels. Most callers alternate between a few, and this look-up takes no lock.
struct Recent {
  static constexpr int kSize = 16;
  KernelKey key[kSize];
  const LoadedKernel* kernel[kSize] = {};
};
thread_local Recent recent;
std::atomic<uint64_t> generation{0};
thread_local uint64_t recent_generation = 0;

// PyTorch's device guards bind no context to a fresh thread, and the driver calls below need one.
void bind_context(int device) {
  const auto& cu = driver::api();
  static std::mutex mutex;
  static std::vector<driver::Context> primary;
  thread_local driver::Context known[64] = {};
  driver::Context current = nullptr;
  driver::check(cu.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (device < 64 && known[device] && known[device] == current) return;
  driver::Context wanted = nullptr;
  {
    const std::lock_guard lock(mutex);
    if (primary.size() <= static_cast<size_t>(device)) primary.resize(device + 1);
    if (!primary[device]) {
      driver::Device handle;
      driver::check(cu.cuDeviceGet(&handle, device), "cuDeviceGet");
      driver::check(cu.cuDevicePrimaryCtxRetain(&primary[device], handle), "cuDevicePrimaryCtxRetain");
    }
    wanted = primary[device];
  }
  if (current != wanted) driver::check(cu.cuCtxSetCurrent(wanted), "cuCtxSetCurrent");
  if (device < 64) known[device] = wanted;
}

driver::Stream stream_of(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  bind_context(device.index());
  const c10::impl::VirtualGuardImpl pytorch(device.type());
  return static_cast<driver::Stream>(pytorch.getStream(device).native_handle());
}

// The configuration of a launch, and the attributes that it points to.
struct Configuration {
  driver::LaunchAttribute attributes[2] = {};
  driver::LaunchConfig config;

  Configuration(const LoadedKernel& kernel, int64_t grid_x, int64_t grid_y, driver::Stream stream)
      : config{unsigned(grid_x), unsigned(grid_y), 1, unsigned(kernel.threads), 1, 1, unsigned(kernel.shared_bytes),
               stream,           attributes,       0} {
    if (kernel.cluster > 1) {
      auto& attribute = attributes[config.num_attributes++];
      attribute.id = driver::kAttributeClusterDimension;
      attribute.value.cluster = {static_cast<unsigned>(kernel.cluster), 1, 1};
    }
    if (kernel.dependent) {
      auto& attribute = attributes[config.num_attributes++];
      attribute.id = driver::kAttributeProgrammaticStreamSerialization;
      attribute.value.flag = 1;
    }
  }
  Configuration(const Configuration&) = delete;
};

int count_multiprocessors(int ordinal) {
  const auto& cu = driver::api();
  driver::Device device;
  int count = 0;
  driver::check(cu.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  driver::check(cu.cuDeviceGetAttribute(&count, driver::kDeviceMultiprocessorCount, device), "cuDeviceGetAttribute");
  return count;
}

// The number of blocks of `kernel` that run at once. For clusters the driver is asked about clusters, because the grouping of
// multiprocessors matters, and one cluster too many in a persistent grid would double the time.
int max_blocks(const LoadedKernel& kernel, int ordinal) {
  const auto& cu = driver::api();
  int count = 0;
  if (kernel.cluster > 1) {
    Configuration alone(kernel, kernel.cluster, 1, nullptr);
    alone.config.num_attributes = 1;  // only the attribute of the cluster's size
    driver::check(cu.cuOccupancyMaxActiveClusters(&count, kernel.function, &alone.config), "cuOccupancyMaxActiveClusters");
    if (count == 0)
      driver::fail("this device has no room for a cluster of " + std::to_string(kernel.cluster) +
                   " blocks, which rows of this "
                   "length need; the backend 'eager' computes them");
    return count * kernel.cluster;
  }
  driver::check(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel.function, kernel.threads, kernel.shared_bytes),
                "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  return std::max(1, count * count_multiprocessors(ordinal));
}

std::unique_ptr<LoadedKernel> load(int device, const KernelPlan& plan) {
  const auto& cu = driver::api();
  driver::Library library;
  driver::Kernel kernel;
  auto loaded = std::make_unique<LoadedKernel>(LoadedKernel{plan.launch});
  driver::check(cu.cuLibraryLoadData(&library, plan.image, nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
  driver::check(cu.cuLibraryGetKernel(&kernel, library, plan.name), "cuLibraryGetKernel");
  driver::check(cu.cuKernelGetFunction(&loaded->function, kernel), "cuKernelGetFunction");
  // Lazy loading would load the code at the first launch, which a graph capture forbids.
  driver::check(cu.cuFuncLoad(loaded->function), "cuFuncLoad");
  if (loaded->shared_bytes > 0)
    driver::check(cu.cuFuncSetAttribute(loaded->function, driver::kFunctionMaxDynamicSharedBytes, loaded->shared_bytes),
                  "cuFuncSetAttribute");
  if (loaded->cluster > 8)
    driver::check(cu.cuFuncSetAttribute(loaded->function, driver::kFunctionNonPortableClusterSize, 1), "cuFuncSetAttribute");
  loaded->max_blocks = max_blocks(*loaded, device);
  return loaded;
}

// Lets this thread load code during another thread's graph capture in global mode.
struct RelaxedCapture {
  int mode = driver::kCaptureModeRelaxed;
  RelaxedCapture() { driver::check(driver::api().cuThreadExchangeStreamCaptureMode(&mode), "capture mode"); }
  ~RelaxedCapture() { driver::api().cuThreadExchangeStreamCaptureMode(&mode); }
};

// The planner's answer. The planner may compile, and takes Python's lock, so none of ours may be held.
KernelPlan planned(Planner ask, const KernelKey& key) {
  KernelPlan plan;
  ask(key.numbers, &plan.error, &plan.image, &plan.name, &plan.launch);
  if (plan.error) driver::fail(plan.error);
  return plan;
}

const LoadedKernel& kept(const KernelKey& key, std::unique_ptr<LoadedKernel> loaded) {
  const std::unique_lock lock(table_mutex);
  return *table.try_emplace(key, std::move(loaded)).first->second;  // if another thread was first, its kernel
}

bool is_rehearsed(const KernelKey& key) { return key.device() < 0; }  // CPU tensors have no device number

const LoadedKernel& plan_and_load(const KernelKey& key, driver::Stream stream) {
  if (is_rehearsed(key)) {
    const Launch how = planned(rehearsal.load(), key).launch;
    return kept(key, std::make_unique<LoadedKernel>(LoadedKernel{how, nullptr, rehearsed_multiprocessors * how.cluster}));
  }
  int capturing = driver::kCaptureStatusNone;
  driver::check(driver::api().cuStreamIsCapturing(stream, &capturing), "cuStreamIsCapturing");
  if (capturing != driver::kCaptureStatusNone)
    driver::fail(
        "the first use of a kernel fell inside a CUDA graph capture, which cannot load code. Run the same call, forward "
        "and backward, once before the capture; `kernel-fusion warmup` compiles ahead, so that this takes little time.");
  const KernelPlan plan = planned(planner.load(), key);
  const RelaxedCapture relaxed;
  return kept(key, load(key.device(), plan));
}

}  // namespace

bool cuda_enabled(int device) { return device < 64 && (able_devices.load(std::memory_order_relaxed) >> device & 1) != 0; }

bool rehearsing() { return rehearsal.load(std::memory_order_relaxed) != nullptr; }

OnDevice::OnDevice(c10::Device device) : guard(device), stream(stream_of(device)) {}

int multiprocessors(c10::Device device) {
  if (device.is_cpu()) return rehearsed_multiprocessors;
  thread_local int known[64] = {};
  const int ordinal = device.index();
  if (ordinal >= 64) return count_multiprocessors(ordinal);
  if (!known[ordinal]) known[ordinal] = count_multiprocessors(ordinal);
  return known[ordinal];
}

const LoadedKernel& find_kernel(const KernelKey& key, driver::Stream stream) {
  const auto now = generation.load(std::memory_order_acquire);
  if (recent_generation != now) {
    recent = Recent();
    recent_generation = now;
  }
  const auto place = Hash()(key) % Recent::kSize;
  if (recent.kernel[place] && recent.key[place] == key) return *recent.kernel[place];
  const LoadedKernel* found = nullptr;
  {
    const std::shared_lock lock(table_mutex);
    const auto it = table.find(key);
    if (it != table.end()) found = it->second.get();
  }
  if (!found) found = &plan_and_load(key, stream);
  recent.key[place] = key;
  recent.kernel[place] = found;
  return *found;
}

void launch(const LoadedKernel& kernel, int64_t grid_x, int64_t grid_y, driver::Stream stream, const void* args) {
  if (!kernel.function) return;
  const Configuration configuration(kernel, grid_x, grid_y, stream);
  void* parameters[] = {const_cast<void*>(args)};
  driver::check(driver::api().cuLaunchKernelEx(&configuration.config, kernel.function, parameters, nullptr),
                "launching a kernel");
  count(Counter::kCudaLaunch);
}

}  // namespace kf

// Sets the planner, and the devices that the kernels serve, as bits. Other devices take the eager definition. Python calls this
// through ctypes.
extern "C" __attribute__((visibility("default"))) void kf_set_planner(void* planner, uint64_t devices) {
  kf::planner.store(reinterpret_cast<kf::Planner>(planner));
  kf::able_devices.store(devices);
}

// Begins a rehearsal with this planner, or ends it if the planner is null.
extern "C" __attribute__((visibility("default"))) void kf_rehearse(void* planner, int multiprocessors) {
  const std::unique_lock lock(kf::table_mutex);
  std::erase_if(kf::table, [](const auto& entry) { return kf::is_rehearsed(entry.first); });
  kf::generation.fetch_add(1);
  kf::rehearsed_multiprocessors.store(multiprocessors);
  kf::rehearsal.store(reinterpret_cast<kf::Planner>(planner));
}

// Forgets every kernel, so that the next call plans again (tests force other plans). Loaded code stays loaded.
extern "C" __attribute__((visibility("default"))) void kf_forget_kernels() {
  const std::unique_lock lock(kf::table_mutex);
  for (auto& entry : kf::table) entry.second.release();
  kf::table.clear();
  kf::generation.fetch_add(1);
}
