// The table of the kernels of one instruction set. The files of this folder are compiled once per instruction set.
#include "cpu/kernels.h"

namespace kf::cpu::CPU_CAPABILITY {

KF_CPU_KERNELS(KF_KERNEL)

// The name is C's and visible, because a wheel has the tables of all sets in a library of their own.
#define KF_JOIN(a, b) a##b
#define KF_TABLE(set) KF_JOIN(kf_cpu_kernels_, set)
extern "C" {
extern const Kernels KF_TABLE(CPU_CAPABILITY) __attribute__((visibility("default")));
const Kernels KF_TABLE(CPU_CAPABILITY){KF_CPU_KERNELS(KF_ENTRY)};
}

}  // namespace kf::cpu::CPU_CAPABILITY
