// Memory for measurements, off by default. The freed memory of CPU tensors up to a given size is reused, so that no timed call
// causes page faults. The usual allocator does nearly the same, but depends on what was freed before.
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <mutex>
#include <unordered_map>

namespace kf {
namespace {

struct Block {
  size_t size;
  at::DataPtr memory;
};

// The freed blocks. It is never destroyed, because a tensor may be freed after everything else.
struct Idle {
  std::mutex mutex;
  std::unordered_multimap<size_t, Block*> blocks;
  size_t largest = 0;  // the size up to which blocks are kept, in bytes
};

Idle& idle() {
  static Idle& one = *new Idle;
  return one;
}

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  const std::lock_guard lock(idle().mutex);
  if (block->size <= idle().largest) idle().blocks.emplace(block->size, block);
  else delete block;
}

struct Keeper final : c10::Allocator {
  c10::Allocator* const usual = c10::GetCPUAllocator();

  at::DataPtr allocate(size_t size) override {
    std::unique_lock lock(idle().mutex);
    if (size > idle().largest) return mapped(size);
    auto found = idle().blocks.extract(size);
    lock.unlock();
    Block* block = found ? found.mapped() : new Block{size, usual->allocate(size)};
    return {block->memory.get(), block, give_back, block->memory.device()};
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

 private:
  static at::DataPtr mapped(size_t size) {
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, data != MAP_FAILED, "no ", size, " bytes could be mapped");
    return at::InefficientStdFunctionContext::makeDataPtr(data, [size](void* p) { munmap(p, size); }, at::kCPU);
  }
};

void keep_memory(int64_t largest) {
  static Keeper& keeper = *new Keeper;
  c10::SetCPUAllocator(largest < 0 ? keeper.usual : &keeper, 1);
  const std::lock_guard lock(idle().mutex);
  idle().largest = std::max<int64_t>(largest, 0);
  for (const auto& [size, block] : idle().blocks) delete block;
  idle().blocks.clear();
}

}  // namespace
}  // namespace kf

// Keeps freed blocks of at most `largest` bytes from now on; larger ones are mapped anew each time. A negative number restores
// PyTorch's allocator. Python calls this through ctypes.
extern "C" __attribute__((visibility("default"))) void kf_keep_memory(int64_t largest) { kf::keep_memory(largest); }
