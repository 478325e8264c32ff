// The executors of row operations. They say which threads read a row of run-time length, and when.
//
//   resident   lanes of a warp, a block or a cluster hold the row in registers
//   streamed   persistent blocks or clusters copy coming rows to shared memory (row_stream.cuh) and read each twice there
//   twice      a block or a cluster reads the row twice from memory, in batches
//   once       lanes of a warp or a block read the row once from memory, in batches, and keep only numbers of it
//
// All run the tree of DynamicPlace. An operation is a policy P, made for one row:
//
//   First, Second            types of the row's tensors, and their pointers first and second, which a stream redirects
//   limit(end)               columns from here on need not be read
//   load(col)                a vector, as loaded
//   kLimited                 whether that can come before the end
//   hold(col, limit, loaded, held, inside) what is held of it; of a column at the limit or beyond, nothing was loaded
//   of_warp(at, limit, held) the two numbers of a warp, by all its lanes; may change what is held
//   Running                  the same, a vector at a time
//   join(lane, slots)        the row's two numbers, from those of its warps
//   finish(whole), finish(own, whole)   what write() needs, if a row has one warp, and if it has more
//   write(col, held, finish) what of_warp() left
//   finish_anew(whole), write_anew(col, held, anew)   the same of a vector that is read once more
//
// A row that is read once needs, beside load() and limit():
//
//   Numbers, begin()            what a thread knows of its vectors, and what it knows of none
//   take(col, loaded, numbers)  takes a vector
//   leave(col)                  of a vector that is not read
//   join<kLanes>()              of Numbers: what kLanes neighbours know together
//   finish(member, members, numbers)  after all threads of the row have taken their vectors, by each of them
#pragma once

#include "row_stream.cuh"
#include "rows.cuh"
#include "shared/names.h"
#include "tree.cuh"

namespace kf {

// The two numbers of the row, from those of this warp.
template <class P, class S, class A> __device__ Pair<A> join_warps(const DynamicPlace<S>& at, const Pair<A>& own) {
  if constexpr (S::kWarps == 1) return own;
  __shared__ A slots[S::kWarps][2];
  Exchange<S> exchange{slots};
  if constexpr (S::kCluster > 1) cluster_wait();
  exchange.put(at.warp, at.lane, own.first, own.second);
  exchange.barrier();
  return P::join(at.lane, slots);
}

template <class P, class S> __device__ void row_resident(const typename P::Args& args) {
  if constexpr (S::kCluster > 1) cluster_arrive();
  wait_for_previous_kernel();
  const DynamicPlace<S> at(static_cast<int>(args.cols));
  const i64 wanted = static_cast<i64>(blockIdx.x / S::kCluster) * S::kRows + at.row;
  const bool live = S::kRows == 1 || wanted < args.rows;  // else the last row again: all lanes of a warp take part
  const P row(args, live ? wanted : args.rows - 1);
  const int limit = row.limit(at.end);
  typename P::Loaded loaded[S::kVectors];
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i)
    if (at.col(i) < limit) loaded[i] = row.load(at.col(i));
  typename P::Held held[S::kVectors];
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i) row.hold(at.col(i), limit, loaded[i], held[i]);
  const auto own = P::of_warp(at, limit, held);
  const auto whole = join_warps<P>(at, own);
  const auto finish = [&] {
    if constexpr (S::kWarps == 1) return row.finish(whole);
    else return row.finish(own, whole);
  }();
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i)
    if (live && at.col(i) < at.end) row.write(at.col(i), held[i], finish);
}

template <class P, class S> __device__ void row_twice(const typename P::Args& args) {
  if constexpr (S::kCluster > 1) cluster_arrive();
  wait_for_previous_kernel();
  const DynamicPlace<S> at(static_cast<int>(args.cols));
  const P row(args, blockIdx.x / S::kCluster);
  const int limit = row.limit(at.end);
  using Loaded = typename P::Loaded;
  using Held = typename P::Held;
  typename P::Running running;
  batched<S::kUnroll, false>(
      at.first, limit, at.kStep, [&](int col) { return row.load(col); },
      [&](int col, const Loaded& loaded) {
        Held held;
        row.hold(col, limit, loaded, held, true);
        running.add(held);
      });
  const auto whole = join_warps<P>(at, running.of_warp());
  const auto anew = P::finish_anew(whole);
  const auto load = [&](int col) { return !P::kLimited || col < limit ? row.load(col) : Loaded(); };
  batched<S::kUnroll, false>(at.first, at.end, at.kStep, load, [&](int col, const Loaded& loaded) {
    Held held;
    row.hold(col, limit, loaded, held, !P::kLimited);
    row.write_anew(col, held, anew);
  });
}

template <class P, class S> __device__ void row_streamed(const typename P::Args& args) {
  using At = DynamicPlace<S>;
  using Stream = RowStream<S, 1, S::kHelpers, At>;
  using First = Piece<typename P::First, P::kAlignFirst, Stream::kCols, S::kVec>;
  using Second = Piece<typename P::Second, P::kAlignSecond, Stream::kCols, S::kVec>;
  constexpr int kSlotBytes = First::kBytes + Second::kBytes;
  extern __shared__ __align__(128) char slots[];  // [kSlots][kSlotBytes]
  __shared__ typename Stream::Shared shared;
  __shared__ typename Stream::Pacing pacing;

  const int member = threadIdx.x;
  const At at(static_cast<int>(args.cols), member);
  const Stream stream{*settled_shared(&shared), pacing, at, 0, member};
  stream.init();
  const int first_col = at.block_begin(), cols = at.block_cols();
  char* const ring = settled_shared(slots);
  const auto fill = [&](i64 index, int slot) {
    const P row(args, index);
    // The last vector that is needed is copied whole.
    const int wanted = (row.limit(first_col + cols) - first_col + S::kVec - 1) / S::kVec * S::kVec;
    Mbarrier* const full = &stream.shared.full[slot];
    if (wanted <= 0) {
      mbarrier_arrive(full);
      return;
    }
    const bool last = index == args.rows - 1;
    char* const to = ring + slot * kSlotBytes;
    copy_pieces(full, wanted, PieceCopy<First>{{row.first + first_col}, to, last},
                PieceCopy<Second>{{row.second + first_col}, to + First::kBytes, last});
  };
  // The policy of a row whose tensors are in a slot.
  const auto in_slot = [&](i64 index, int slot) {
    P row(args, index);
    const char* const from = ring + slot * kSlotBytes;
    row.first = First{row.first + first_col}.row_in(from, first_col);
    row.second = Second{row.second + first_col}.row_in(from + First::kBytes, first_col);
    return row;
  };
  const auto combine = [&](i64, typename Stream::Sums sums) { return P::join(at.lane, sums); };
  const i64 begin = blockIdx.x / S::kCluster, step = gridDim.x / S::kCluster;
  wait_for_previous_kernel();
  if (Stream::is_combiner()) {
    stream.combine_all(args.rows, begin, step, combine);
    stream.join();
    return;
  }
  if (Stream::is_producer()) {
    stream.produce(args.rows, begin, step, fill);
    stream.join();
    return;
  }
  stream.start(args.rows, begin, step, fill);

  const auto held_at = [&](const P& row, int limit, int i, typename P::Held& held) {
    typename P::Loaded loaded;
    if (at.col(i) < limit) loaded = row.load(at.col(i));
    row.hold(at.col(i), limit, loaded, held);
  };
  const auto first_pass = [&](i64 index, int slot) {
    const P row = in_slot(index, slot);
    const int limit = row.limit(at.end);
    typename P::Held held[S::kVectors];
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) held_at(row, limit, i, held[i]);
    return P::of_warp(at, limit, held);
  };
  const auto second_pass = [&](i64 index, int slot, const Pair<float>& whole) {
    const P row = in_slot(index, slot);
    const int limit = row.limit(at.end);
    const auto anew = P::finish_anew(whole);
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) {
      if (at.col(i) >= at.end) continue;
      typename P::Held held;
      held_at(row, limit, i, held);
      row.write_anew(at.col(i), held, anew);
    }
  };
  stream.run(args.rows, begin, step, fill, first_pass, combine, second_pass);
  stream.join();
}

template <class P, class S> __device__ void row_once(const typename P::Args& args) {
  wait_for_previous_kernel();
  const DynamicPlace<S> at(static_cast<int>(args.cols));
  const i64 wanted = static_cast<i64>(blockIdx.x) * S::kRows + at.row;
  const bool live = S::kRows == 1 || wanted < args.rows;  // else the last row again, of which nothing is read
  const P row(args, live ? wanted : args.rows - 1);
  const int end = live ? at.end : 0;
  auto numbers = row.begin();
  int col = batched<S::kUnroll>(
      at.first, row.limit(end), at.kStep, [&](int col) { return row.load(col); },
      [&](int col, const typename P::Loaded& loaded) { row.take(col, loaded, numbers); });
  for (; col < end; col += at.kStep) row.leave(col);
  numbers.template join<S::kLanes>();
  if constexpr (S::kWarps > 1) {
    static_assert((S::kWarps & (S::kWarps - 1)) == 0 && S::kWarps <= 32);
    __shared__ typename P::Numbers slots[S::kWarps];
    if (at.lane == 0) slots[at.warp] = numbers;
    __syncthreads();
    numbers = slots[at.lane % S::kWarps];
    numbers.template join<S::kWarps>();
  } else {
    __syncwarp();
  }
  if (live) row.finish(at.warp * S::kLanes + at.lane, S::kWarps * S::kLanes, numbers);
}

// Runs an operation by the executor that its plan names.
template <template <class> class P, class S> __device__ void run_rows(const typename P<S>::Args& args) {
  if constexpr (S::kReading == Reading::kResident) row_resident<P<S>, S>(args);
  else if constexpr (S::kReading == Reading::kStreamed) row_streamed<P<S>, S>(args);
  else if constexpr (S::kReading == Reading::kOnce) row_once<P<S>, S>(args);
  else row_twice<P<S>, S>(args);
}

}  // namespace kf
