// Reused memory, for measurements: what tensors on the CPU free is kept and handed out again, so that a call writes to memory
// that the process has had before, and no time goes into page faults. Off unless asked for.
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <unordered_map>

namespace kf {
namespace {

struct Block {
  size_t size;
  at::DataPtr memory;
};

// Never destroyed: a tensor may be the last thing that a process frees.
struct Idle {
  std::mutex mutex;
  std::unordered_multimap<size_t, Block*> blocks;
  bool keep = false;
};

Idle& idle() {
  static Idle& one = *new Idle;
  return one;
}

Block* take(size_t size) {
  const std::lock_guard lock(idle().mutex);
  const auto found = idle().blocks.extract(size);
  return found ? found.mapped() : nullptr;
}

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  const std::lock_guard lock(idle().mutex);
  if (idle().keep) idle().blocks.emplace(block->size, block);
  else delete block;
}

struct Keeper final : c10::Allocator {
  c10::Allocator* const usual = c10::GetCPUAllocator();

  at::DataPtr allocate(size_t size) override {
    Block* block = take(size);
    if (!block) block = new Block{size, usual->allocate(size)};
    return {block->memory.get(), block, give_back, block->memory.device()};
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

void keep_memory(bool keep) {
  static Keeper& keeper = *new Keeper;
  // The priority that replaces the allocator which PyTorch begins with, in both directions.
  c10::SetCPUAllocator(keep ? &keeper : keeper.usual, 1);
  const std::lock_guard lock(idle().mutex);
  idle().keep = keep;
  if (keep) return;
  for (const auto& [size, block] : idle().blocks) delete block;
  idle().blocks.clear();
}

}  // namespace
}  // namespace kf

// Called from Python through ctypes.
extern "C" __attribute__((visibility("default"))) void kf_keep_memory(bool keep) { kf::keep_memory(keep); }
