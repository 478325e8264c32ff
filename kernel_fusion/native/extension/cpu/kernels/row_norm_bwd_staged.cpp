// CPU row norms backward with stages or with tensors of two types, for bf16 and fp32. Compiled once per instruction set
// (-DCPU_CAPABILITY=...).
#include "cpu/row_norm_backward_staged.h"

namespace kf::cpu::CPU_CAPABILITY {

void backward_staged(const Backward& c, const BackwardStages& s, int64_t begin, int64_t end) {
  const Reading reading(c, s);
  if (reading.x == Dtype::kFloat) backward_staged_as<float>(c, s, reading, begin, end);
  else if (reading.x == Dtype::kBFloat16) backward_staged_as<c10::BFloat16>(c, s, reading, begin, end);
  else backward_staged_fp16_fp64(c, s, begin, end);
}

}  // namespace kf::cpu::CPU_CAPABILITY
