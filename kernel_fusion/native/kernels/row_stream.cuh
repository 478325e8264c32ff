// The way in which streamed kernels read. A persistent block, or for long rows a cluster, streams rows through shared
// memory.
//
// A group of threads takes a row at a time, while coming rows are copied into its ring of kSlots slots. With three
// slots or more it works on two rows: while a row's sums travel between warps and blocks, the first pass over the next
// row runs.
//
// Warps of their own may work once per row: the combiner turns all warps' sums into what the second pass needs, the
// producer starts the copies.
#pragma once

#include "async_copy.cuh"
#include "pace.cuh"
#include "rows.cuh"
#include "tree.cuh"

namespace kf {

// A contiguous piece of a tensor, copied to a slot with all of its first and last 16 bytes, so any alignment works.
// Nothing may follow a tensor's last piece, whose rest goes by elements. kRowCols: columns of a row; pieces end within
// it or at its end.
template <class T, int kAlign, int kCols, int kRowCols = 1> struct Piece {
  static constexpr int kSize = static_cast<int>(sizeof(T));
  static constexpr bool kRest = kAlign < 16 || kRowCols * kSize % 16 != 0;
  static constexpr int kBytes = (kCols * kSize + 15) / 16 * 16 + (kAlign < 16 ? 16 : 0);  // in a slot

  const T* source;

  __device__ int lead() const { return kAlign >= 16 ? 0 : static_cast<int>(reinterpret_cast<unsigned long long>(source) & 15); }
  __device__ unsigned copied_bytes(int cols, bool last) const {
    return (lead() + cols * kSize + (kRest && last ? 0 : 15)) & ~15u;
  }
  __device__ void copy(char* slot, int cols, bool last, Mbarrier* b) const {
    const unsigned bytes = copied_bytes(cols, last);
    if (!kRest || bytes > 0) bulk_load(slot, reinterpret_cast<const char*>(source) - lead(), bytes, b);
  }
  __device__ void copy_rest(char* slot, int cols, bool last) const {
    if (!kRest || !last) return;
    const T* const from = source + cols;
    T* const to = const_cast<T*>(row_in(slot, 0)) + cols;
    const int count = min(cols, static_cast<int>(reinterpret_cast<unsigned long long>(from) & 15) / kSize);
#pragma unroll 1
    for (int i = 1; i <= count; ++i) to[-i] = from[-i];
  }
  // The address of column 0 of the row.
  __device__ const T* row_in(const char* slot, int first_col) const {
    return reinterpret_cast<const T*>(slot + lead()) - first_col;
  }
};

template <int kAlign, int kCols, int kRowCols> struct Piece<absent, kAlign, kCols, kRowCols> {
  static constexpr bool kRest = false;
  static constexpr int kBytes = 0;

  const absent* source;

  __device__ unsigned copied_bytes(int, bool) const { return 0; }
  __device__ void copy(char*, int, bool, Mbarrier*) const {}
  __device__ void copy_rest(char*, int, bool) const {}
  __device__ const absent* row_in(const char*, int) const { return nullptr; }
};

// `last`: the tensor may end after it.
template <class P> struct PieceCopy {
  P piece;
  char* slot;
  bool last;
};

// Starts copying `cols` columns, which arrive on `b`. One thread calls this.
template <class... P> __device__ void copy_pieces(Mbarrier* b, int cols, const PieceCopy<P>&... copies) {
  constexpr bool kRest = (P::kRest || ...);
  const unsigned bytes = (copies.piece.copied_bytes(cols, copies.last) + ...);
  if constexpr (kRest) mbarrier_expect(b, bytes);
  else mbarrier_arrive_expect(b, bytes);
  (copies.piece.copy(copies.slot, cols, copies.last, b), ...);
  if constexpr (kRest) {
    (copies.piece.copy_rest(copies.slot, cols, copies.last), ...);
    mbarrier_arrive(b);
  }
}

// The rows of a tensor in the columns of a block, in memory and in the slots.
template <class S, class Stream, class T, int kAlign, bool kStrided = false> struct StreamedRows {
  using P = Piece<T, kAlign, Stream::kCols, S::kCols>;
  static constexpr int kBytes = P::kBytes;  // in a slot

  const void* const& data;
  const RowLayout* layout;  // null: contiguous
  char* slots;              // its place in the first slot
  int slot_bytes, first_col;

  __device__ P piece(i64 row) const {
    const i64 offset = layout ? row_offset<kStrided>(*layout, row) : row * S::kCols;
    return P{static_cast<const T*>(data) + offset + first_col};
  }
  __device__ char* slot(int s) const { return slots + s * slot_bytes; }
  __device__ PieceCopy<P> copy(i64 row, int s, bool last) const { return {piece(row), slot(s), last}; }
  __device__ Pack<T, S::kVec> at(i64 row, int s, int col) const {
    return load_row<S, kAlign>(piece(row).row_in(slot(s), first_col), col);
  }
};

// A warp's first lane arrives for the others, after a __syncwarp. racecheck does not follow the others through that:
// tests/sanitize.py has every lane arrive for itself.
#ifdef KF_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// kFills: how often fill() arrives at a slot's barrier. kHelpers: warps after the only group's: combiner, producer.
// P: the place of a thread, of constant length or not.
template <class S, int kFills = 1, int kHelpers = 0, class P = Place<S>> struct RowStream {
  using A = float;
  static constexpr int kSlots = S::kSlots;
  static constexpr int kLag = kSlots > 2 ? 1 : 0;                         // rows between the passes
  static constexpr int kThreads = S::kWarps / S::kCluster * 32;           // of a group
  static constexpr int kCols = P::kLocalWarps * P::kVectors * P::kChunk;  // of a group at most
  // A warp ahead may announce its next two rows before another has read this row's sums.
  static constexpr int kBuffers = 4;
  static constexpr bool kCombiner = kHelpers > 0, kProducer = kHelpers > 1;
  static_assert(kHelpers == 0 || (S::kRows == 1 && S::kWarps > 1));

  using Pair = kf::Pair<A>;  // a warp's sums, or what was made of all
  struct Shared {
    Mbarrier full[kSlots], empty[kSlots], exchanged[kBuffers], combined[kBuffers];
    alignas(16) A sums[kBuffers][S::kWarps][2];  // pairs are read two at a time
    Pair results[kBuffers];                      // the combiner's
  };
  using Sums = const A (*)[2];  // [kWarps], one pair per warp
  using Pacing = typename Pace<S>::Shared;

  Shared& shared;  // of the group
  Pacing& pacing;  // of the block
  const P& at;
  int group, member;  // this thread, within the group

  // All threads of the block call this first.
  __device__ void init() const {
    if (member == 0) {
      if (group == 0) pacing.progress = 0;
      for (int s = 0; s < kSlots; ++s) {
        mbarrier_init(&shared.full[s], kFills);
        mbarrier_init(&shared.empty[s], kThreads / 32 * kWarpArrivals);
      }
      // In a block warps announce their sums; in a cluster bytes are counted.
      for (int b = 0; b < kBuffers; ++b) {
        mbarrier_init(&shared.exchanged[b],
                      S::kCluster > 1 ? 1 + (kWarpArrivals == 32 ? kThreads : 0) : S::kWarps * kWarpArrivals);
        if constexpr (kCombiner) mbarrier_init(&shared.combined[b], kWarpArrivals);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
    join();
  }

  __device__ static bool is_combiner() { return kCombiner && warp() == kThreads / 32; }
  __device__ static bool is_producer() { return kProducer && warp() == kThreads / 32 + 1; }

  // Whether this thread is one of those that combine the sums of a row.
  __device__ bool leader() const {
    if constexpr (!kCombiner) return at.leader();
    return at.lane == 0 && (S::kCluster == 1 || cluster_rank() == 0);
  }

  // No block writes to another's shared memory before that runs or after it leaves.
  __device__ void join() const {
    if constexpr (S::kCluster > 1) {
      __syncwarp();  // lane 0 may have been busy alone
      cluster_arrive();
      cluster_wait();
    }
  }

  // Rows first, first + step, ... below `rows`:
  //   fill(row, slot)               one thread starts the copies and announces their bytes on full[slot]
  //   first_pass(row, slot) -> own  the warp's two sums
  //   combine(row, sums) -> pair    by each warp or the combiner, of all warps' sums; a single warp's stay
  //   second_pass(row, slot, pair)  the slot is free after it
  // start() fills the ring; loads before run() or run_few() overlap with that. The producer calls produce() instead,
  // the combiner combine_all().
  template <class Fill> __device__ void start(i64 rows, i64 first, i64 step, Fill&& fill) const {
    if constexpr (!kProducer) {
      // In the loop's condition it would make backward of long rows much slower.
      if (member != 0) return;
      for (int s = 0; s < kSlots && first + s * step < rows; ++s) fill(first + s * step, s);
    }
  }

  template <class Fill, class First, class Combine, class Second>
  __device__ void run(i64 rows, i64 first, i64 step, Fill&& fill, First&& first_pass, Combine&& combine,
                      Second&& second_pass) const {
    int slot = 0, last = 0, before_last = 0;  // of this row and the two before
    unsigned parity = 0, n = 0;
    Pair own{}, next{};
    Pace<S> pace{pacing};
    const bool fills = !kProducer && member == 0;
    if (Pace<S>::kOn && fills) pace.init(group, rows / step);
    for (i64 row = first;; row += step, ++n) {
      const int free = kLag ? before_last : last;
      const i64 refill = row + (kSlots - 1 - kLag) * step;
      if (fills && n > kLag && refill < rows) {
        mbarrier_wait(&shared.empty[free], free >= slot ? parity ^ 1 : parity);
        if constexpr (Pace<S>::kOn) pace.step(group);
        fill(refill, free);
      }
      if (row < rows) {
        mbarrier_wait(&shared.full[slot], parity);
        next = first_pass(row, slot);
        announce(n % kBuffers, next.first, next.second);
      } else if (kLag == 0) {
        break;
      }
      if (n >= kLag) {
        const unsigned buffer = (n - kLag) % kBuffers;
        const unsigned phase = (n - kLag) / kBuffers % 2;
        const i64 passed = row - kLag * step;
        const Pair pair = collect(passed, buffer, phase, kLag ? own : next, combine);
        second_pass(passed, kLag ? last : slot, pair);
        __syncwarp();
        if (arrives()) mbarrier_arrive(&shared.empty[kLag ? last : slot]);
      }
      if (row >= rows) break;
      own = next;
      before_last = last;
      last = slot;
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
  }

  // run() for a group whose rows start() has all loaded: without ring and second row. Not with a producer.
  template <class First, class Combine, class Second>
  __device__ void run_few(i64 rows, i64 first, i64 step, First&& first_pass, Combine&& combine, Second&& second_pass) const {
    static_assert(kSlots <= kBuffers);
    i64 row = first;
#pragma unroll 1
    for (int slot = 0; row < rows; ++slot, row += step) {
      mbarrier_wait(&shared.full[slot], 0);
      const Pair own = first_pass(row, slot);
      announce(slot, own.first, own.second);
      second_pass(row, slot, collect(row, slot, 0, own, combine));
    }
  }

  template <class Fill> __device__ void produce(i64 rows, i64 first, i64 step, Fill&& fill) const {
    if (at.lane != 0) return;
    Pace<S> pace{pacing};
    if constexpr (Pace<S>::kOn) pace.init(group, rows / step);
    int slot = 0;
    unsigned parity = 1, n = 0;
    for (i64 row = first; row < rows; row += step, ++n) {
      if (n >= kSlots) {
        mbarrier_wait(&shared.empty[slot], parity);
        if constexpr (Pace<S>::kOn) pace.step(group);
      }
      fill(row, slot);
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
  }

  template <class Combine> __device__ void combine_all(i64 rows, i64 first, i64 step, Combine&& combine) const {
    unsigned n = 0;
    for (i64 row = first; row < rows; row += step, ++n) {
      const unsigned buffer = n % kBuffers;
      if (at.lane == 0) expect_sums(buffer);
      mbarrier_wait(&shared.exchanged[buffer], n / kBuffers % 2);
      const Pair pair = combine(row, static_cast<Sums>(shared.sums[buffer]));
      if (at.lane == 0) shared.results[buffer] = pair;
      if (arrives()) mbarrier_arrive(&shared.combined[buffer]);
      __syncwarp();
    }
  }

 private:
  // Whether this thread arrives on barriers for its warp.
  __device__ bool arrives() const { return kWarpArrivals == 32 || at.lane == 0; }

  // For branches of whole warps; the compiler then keeps once what a warp has once.
  __device__ static int warp() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

  // Waits for all sums; a single warp uses its own.
  template <class Combine>
  __device__ Pair collect(i64 row, unsigned buffer, unsigned phase, Pair own, Combine&& combine) const {
    if constexpr (kCombiner) {
      mbarrier_wait(&shared.combined[buffer], phase);
      return shared.results[buffer];
    } else if constexpr (S::kWarps > 1) {
      mbarrier_wait(&shared.exchanged[buffer], phase);
      return combine(row, static_cast<Sums>(shared.sums[buffer]));
    }
    return own;
  }

  // One thread per row expects a cluster's bytes.
  __device__ void expect_sums(unsigned buffer) const {
    if constexpr (S::kCluster > 1) mbarrier_arrive_expect(&shared.exchanged[buffer], S::kWarps * sizeof(Pair));
  }

  __device__ void announce(unsigned buffer, A first, A second) const {
    if constexpr (S::kWarps > 1) {
      auto& sums = shared.sums[buffer];
      Mbarrier* all = &shared.exchanged[buffer];
      if constexpr (S::kCluster > 1) {
        if (!kCombiner && member == 0) expect_sums(buffer);
        if (at.lane < S::kCluster) store_cluster_counted(sums[at.warp], at.lane, first, second, all);
        if constexpr (kWarpArrivals == 32) mbarrier_arrive(all);
      } else if (arrives()) {
        if (at.lane == 0) {
          sums[at.warp][0] = first;
          sums[at.warp][1] = second;
        }
        mbarrier_arrive(all);
      }
    }
  }
};

}  // namespace kf
