// The table of one instruction set. The files of this folder are compiled once per set.
#include "cpu/kernels.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {

PrepareParameter prepare;
RoundRow round_row;
RowNormForward forward;
RowNormForwardMoments forward_moments;
RowNormForwardStatistics forward_statistics;
RowNormForwardStretches forward_stretches;
RowNormForwardStaged forward_staged;
PointwiseLoop pointwise, pointwise_bwd;
PointwiseColumns pointwise_bwd_columns;
ReduceRows reduce_rows;
ReduceColumns reduce_columns;
AddRows add_rows;
StoreSums store_sums;
SoftmaxForwardRows softmax;
SoftmaxBackwardRows softmax_bwd;
RotaryForward rotary;
RotaryBackward rotary_bwd;
QuantizeRows quantize_rows;

extern const Kernels kernels;
// clang-format off
const Kernels kernels{prepare, round_row, forward, forward_moments, forward_statistics, forward_stretches, forward_staged,
                      pointwise, pointwise_bwd, pointwise_bwd_columns,
                      reduce_rows, reduce_columns, add_rows, store_sums, softmax, softmax_bwd, rotary, rotary_bwd, quantize_rows};
// clang-format on

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
