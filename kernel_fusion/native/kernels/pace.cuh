// Keeps the blocks of a persistent grid together. The memory system favours some multiprocessors. Their blocks would
// finish early, and those that are left would be too few to use its bandwidth. So a block that is ahead of the average
// waits.
//
// Results do not depend on it. The word in which blocks count may hold anything at first. Concurrent grids of one
// kernel share it, so each seems behind and nobody waits. A block that waits in vain stops waiting.
#pragma once

#include "async_copy.cuh"

namespace kf {

__device__ unsigned pace_word;  // one per kernel

// The plan S says how many groups of threads a block has (kRows), by how many quarters of a step a block may be ahead
// (kPaceTolerance; 0 for any), and from how many steps on waiting pays (kPaceLeast).
template <class S> struct Pace {
  static constexpr bool kOn = S::kPaceTolerance > 0;
  static_assert(!kOn || S::kPaceTolerance > 4, "a block would wait for all others before each step");
  static constexpr int kPatience = 16;  // readings, of more than half a microsecond each

  // This lies in shared memory, because registers are scarce.
  struct Shared {
    unsigned progress;  // steps of all blocks since this one began; 0 before init()
    unsigned begun;     // pace_word at that time
    struct {
      unsigned due, on;
    } groups[S::kRows];  // due: the progress for the next step
  };

  Shared& shared;
  unsigned coming;  // pace_word, read a step early

  // One thread per group calls this before about `steps` steps, most in the first group.
  __device__ void init(int group, i64 steps) {
    // With more groups than run at once, blocks would wait for others that have not begun.
    const bool on = steps >= S::kPaceLeast && (!S::kGrouped || gridDim.x > S::kCluster);
    shared.groups[group].on = on;
    shared.groups[group].due = -(S::kPaceTolerance * blocks() / 4);
    if (on && group == 0) shared.begun = coming = read();
  }

  // A group calls this before each step. The first group counts the steps of the block.
  __device__ void step(int group) {
    auto& mine = shared.groups[group];
    if (!mine.on) return;
    const bool counts = group == 0;
    const unsigned due = mine.due + blocks();
    mine.due = due;
    if (counts) publish(coming);
    for (int readings = 0; static_cast<int>(due - progress()) > 0; ++readings) {
      if (readings == kPatience) {
        mine.on = false;
        return;
      }
      if (counts) publish(read());
      else asm volatile("nanosleep.u32 500;");
    }
    if (!counts) return;
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(&pace_word) : "memory");
    coming = read();
  }

 private:
  __device__ static unsigned blocks() {
    if constexpr (S::kGrouped) return gridDim.x * gridDim.y;
    return gridDim.x;
  }
  __device__ unsigned read() const {
    unsigned v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(&pace_word) : "memory");
    return v;
  }
  __device__ void publish(unsigned v) const {
    const unsigned address = shared_address(&shared.progress);
    asm volatile("st.relaxed.cta.shared::cta.u32 [%0], %1;" ::"r"(address), "r"(v - shared.begun) : "memory");
  }
  __device__ unsigned progress() const {
    unsigned v;
    asm volatile("ld.relaxed.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(&shared.progress)) : "memory");
    return v;
  }
};

}  // namespace kf
