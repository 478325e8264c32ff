// CPU row norms backward with stages or with tensors of two types, for fp16 and fp64. Compiled once per instruction set
// (-DCPU_CAPABILITY=...).
#include "cpu/row_norm_backward_staged.h"

namespace kf::cpu::CPU_CAPABILITY {

void backward_staged_fp16_fp64(const Backward& c, const BackwardStages& s, int64_t begin, int64_t end) {
  const Reading reading(c, s);
  if (reading.x == Dtype::kDouble) backward_staged_as<double>(c, s, reading, begin, end);
  else backward_staged_as<c10::Half>(c, s, reading, begin, end);
}

}  // namespace kf::cpu::CPU_CAPABILITY
