// Keeps the blocks of a persistent grid together. The memory system does not serve all multiprocessors alike. Left alone, the
// blocks that it favours are done early, and those it does not are then too few to use its bandwidth. So a block that is ahead
// of the average waits a little before it asks for more.
//
// Nothing but time depends on it. The word in which all blocks count may hold anything to begin with; grids of the same kernel
// that run at once count in the same word, each seems further on to the other, and nobody waits. A block that waits in vain,
// because others do not run, stops waiting.
#pragma once

#include "async_copy.cuh"

namespace kf {

__device__ unsigned pace_word;  // of this kernel, as every kernel is compiled by itself

// Of the plan: kRows, groups of a block; kPaceTolerance, by how many quarters of a step a block may be ahead of the average, 0
// for any; kPaceLeast, steps below which it is not worth it.
template <class S> struct Pace {
  static constexpr bool kOn = S::kPaceTolerance > 0;
  static_assert(!kOn || S::kPaceTolerance > 4, "a block would wait for all others before each step");
  static constexpr int kPatience = 16;  // readings, of more than half a microsecond each

  // In shared memory, since one thread of each group wants it once a step, and registers are scarce.
  struct Shared {
    unsigned progress;  // steps of all blocks since this one began, as it last knew; 0 before init()
    unsigned begun;     // what pace_word held then
    struct {
      unsigned due, on;
    } groups[S::kRows];  // due: the progress for the next step
  };

  Shared& shared;
  unsigned coming;  // what pace_word holds, read a step early

  // By one thread of each group of the block, before about `steps` steps. The first group makes as many as any.
  __device__ void init(int group, i64 steps) {
    const bool on = steps >= S::kPaceLeast;
    shared.groups[group].on = on;
    shared.groups[group].due = -(S::kPaceTolerance * gridDim.x / 4);
    if (on && group == 0) shared.begun = coming = read();
  }

  // Before a step of a group; the first one counts for all.
  __device__ void step(int group) {
    auto& mine = shared.groups[group];
    if (!mine.on) return;
    const bool counts = group == 0;
    const unsigned due = mine.due + gridDim.x;
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
