// The executor of operations over rows: everything about the order in which pieces of rows are reduced, combined and written.
//
// An operation is a policy, which says what happens to a piece of a row. It has
//   Args                                  its arguments (cpu/kernels.h), with the types of carries and totals
//   kTogether                             the most rows that are finished together
//   row(index, room)                      what it knows about a row; `room` keeps data of the row from reduce to write
//   reduce(row, begin, end) -> Carry      what a piece leaves
//   finish(rows, count, carries, pieces, totals)    combines the pieces of rows in their order, and stores results per row
//   write(row, begin, end, carry, total)  computes a piece of the result, if there are results per column
// The pieces of a row depend on its length alone. So its bits are the same if one thread takes the row, which stays in a cache,
// and if threads share its pieces.
#pragma once

#include <algorithm>
#include <memory>

#include "cpu/kernels.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

template <class Policy> class RowLoops {
  using Args = typename Policy::Args;
  using Carry = typename Args::Carry;
  using Total = typename Args::Total;
  static constexpr int64_t kTogether = Policy::kTogether;

 public:
  RowLoops(Policy& policy, const Args& args, const RowTask<Args>& task)
      : policy(policy), task(task), shape(args.shape()), pieces(shape.pieces()) {}

  void run() {
    if (task.step == RowStep::kRows) {
      if constexpr (kTogether == 1)
        if (pieces == 1) return rows_of_one_piece();
      rows();
    } else if (task.step == RowStep::kFinish) {
      finish();
    } else {
      shared_pieces();
    }
  }

 private:
  using Row = decltype(std::declval<Policy&>().row(0, nullptr));

  // Rows of one piece. The policy is inlined, because calls and sums in memory would cost time in short rows.
  [[gnu::flatten]] void rows_of_one_piece() {
    const std::unique_ptr<char[]> room(new char[shape.room]);
    for (int64_t i = task.begin; i < task.end; ++i) {
      const Row row = policy.row(i, room.get());
      const Carry carry = policy.reduce(row, 0, shape.cols);
      Total total;
      policy.finish(&row, 1, &carry, 1, &total);
      if constexpr (Args::kWrites) policy.write(row, 0, shape.cols, carry, total);
    }
  }

  void rows() {
    const std::unique_ptr<char[]> room(new char[kTogether * shape.room]);
    const std::unique_ptr<Carry[]> carries(new Carry[kTogether * pieces]);
    Row group[kTogether];
    Total totals[kTogether];
    for (int64_t first = task.begin; first < task.end; first += kTogether) {
      const int64_t count = std::min(kTogether, task.end - first);
      for (int64_t r = 0; r < count; ++r) {
        group[r] = policy.row(first + r, room.get() + r * shape.room);
        for (int64_t piece = 0; piece < pieces; ++piece) carries[r * pieces + piece] = reduce(group[r], piece);
      }
      policy.finish(group, count, carries.get(), pieces, totals);
      for (int64_t r = 0; r < count; ++r)
        for (int64_t piece = 0; piece < pieces; ++piece) write(group[r], piece, carries[r * pieces + piece], totals[r]);
    }
  }

  void shared_pieces() {
    for (int64_t i = task.begin; i < task.end; ++i) {
      const Row row = row_at(i / pieces);
      if (task.step == RowStep::kReduce) task.carries[i] = reduce(row, i % pieces);
      else write(row, i % pieces, task.carries[i], task.totals[i / pieces]);
    }
  }

  void finish() {
    for (int64_t i = task.begin; i < task.end; ++i) {
      const Row row = row_at(i);
      policy.finish(&row, 1, task.carries + i * pieces, pieces, task.totals + i);
    }
  }

  Row row_at(int64_t index) { return policy.row(index, task.room + index * shape.room); }
  KF_INLINE Carry reduce(const Row& row, int64_t piece) {
    return policy.reduce(row, piece * shape.width, std::min(shape.cols, (piece + 1) * shape.width));
  }
  KF_INLINE void write(const Row& row, int64_t piece, const Carry& carry, const Total& total) {
    if constexpr (Args::kWrites)
      policy.write(row, piece * shape.width, std::min(shape.cols, (piece + 1) * shape.width), carry, total);
  }

  Policy& policy;
  const RowTask<Args>& task;
  const RowShape shape;
  const int64_t pieces;
};

template <class Policy>
void run_rows(Policy policy, const typename Policy::Args& args, const RowTask<typename Policy::Args>& task) {
  RowLoops<Policy>(policy, args, task).run();
}

}  // namespace
}  // namespace kf::cpu::CPU_CAPABILITY
