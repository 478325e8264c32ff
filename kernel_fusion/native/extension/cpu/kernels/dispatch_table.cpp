// The table of the kernels of one instruction set. The files of this folder are compiled once per instruction set.
#include "cpu/kernels.h"

namespace kf::cpu::CPU_CAPABILITY {

KF_CPU_KERNELS(KF_KERNEL)

extern const Kernels kernels;
const Kernels kernels{KF_CPU_KERNELS(KF_ENTRY)};

}  // namespace kf::cpu::CPU_CAPABILITY
