// The table of one instruction set, for the gradients of row norms. Its name is C's, because Python looks for it.
#include "cpu/kernels.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {

RowNormBackward backward;
RowNormBackwardSums backward_sums;
RowNormBackwardDx backward_dx;
RowNormBackwardOwn backward_own;
RowNormBackwardStaged backward_staged;

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu

#define KF_JOIN(a, b) a##b
#define KF_TABLE(set) KF_JOIN(kf_gradient_kernels_, set)

extern "C" {
extern const kf::cpu::GradientKernels KF_TABLE(CPU_CAPABILITY) __attribute__((visibility("default")));
const kf::cpu::GradientKernels KF_TABLE(CPU_CAPABILITY){
    kf::cpu::CPU_CAPABILITY::backward, kf::cpu::CPU_CAPABILITY::backward_sums, kf::cpu::CPU_CAPABILITY::backward_dx,
    kf::cpu::CPU_CAPABILITY::backward_own, kf::cpu::CPU_CAPABILITY::backward_staged};
}
