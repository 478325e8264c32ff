// Row norm, forward, for rows that are read twice: for the statistics, and again, from the caches, for y, with the
// formulas and the tree of row_norm_fwd.cuh.
//
// A thread holds kBatch vectors at a time in the first reading and kBatchAgain in the second, so it needs few
// registers. Several blocks then share a multiprocessor, and while one waits, others read or write. Memory: one read of
// x from memory and one from the caches, one write of y. The second reading and y are marked as last use, so that they
// evict no rows still to be read again. With a residual h is read again, by the thread that wrote it; otherwise x goes
// through its stages again.
#pragma once

#include "row_norm_fwd.cuh"

namespace kf {

template <class S> __device__ void row_norm_fwd_long(const RowNormFwdArgs& args) {
  using P = Place<S>;
  constexpr int kVec = S::kVec;
  const P at;
  const ForwardRow<S> row(args, at);
  if constexpr (S::kCluster > 1 && !is_second_pass<S>()) cluster_arrive();
  wait_for_previous_kernel();
  const Before<S> before(args);

  struct Loaded {
    Pack<typename S::X, kVec> x;
    Pack<Addend<S>, kVec> addend;
    Pack<ResidualGate<S>, kVec> gate;
  };
  auto* const h = row.h();
  const auto load = [&](int k, bool inside) {
    const int col = at.col(k, inside);
    return Loaded{row.load_x(col), row.load_addend(col), load_gate<S>(args, col)};
  };
  const auto value = [&](int k, const Loaded& loaded, bool inside) {
    const auto pack = before(loaded.x, loaded.addend, row.index, at.col(k, inside), loaded.gate);
    row.store_h(h, at.col(k, inside), pack);
    return pack;
  };
  const Affine<S> affine = [&] {
    if constexpr (is_second_pass<S>()) return affine_of_pieces<S>(args, at, row);
    else return affine_of_row<S>(args, at, row, moments_in_passing<S, S::kBatch>(at, load, value));
  }();
  if constexpr (is_first_pass<S>()) return;

  struct Again {
    Pack<typename PresentOr<typename S::Residual, typename S::X>::type, kVec> x;
    Pack<typename S::Weight, kVec> weight;
    Pack<typename S::Bias, kVec> bias;
    Pack<Factor<S>, kVec> factor;
  };
  auto* const y = row.y();
  const auto load_again = [&](int k, bool inside) {
    const int col = at.col(k, inside);
    Again again;
    if constexpr (kAddsResidual<S>) again.x = load_row<S, 16>(h, col);
    else again.x = row.template load_x<true>(col);
    again.weight = load_weight<S>(args, col);
    again.bias = load_bias<S>(args, col);
    if constexpr (kFactorFirst<S>) again.factor = row.load_addend(col);
    else again.factor = row.load_last_factor(col);
    return again;
  };
  batched_chunks<S, S::kBatchAgain, 0>(load_again, [&](int k, const Again& again, bool inside) {
    const int col = at.col(k, inside);
    const auto store_y_of = [&](const Pack<typename S::Row, kVec>& pack) {
      row.template store_y<true>(y, col, affine(pack, again.weight, again.bias, again.factor, args.weight_offset));
    };
    if constexpr (kAddsResidual<S>) store_y_of(again.x);
    else if constexpr (kFactorFirst<S>) store_y_of(before(again.x, again.factor, row.index, col));
    else store_y_of(before(again.x, {}, row.index, col));
  });
}

}  // namespace kf
