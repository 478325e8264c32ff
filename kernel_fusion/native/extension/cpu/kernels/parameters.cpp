// Weight and bias prepared as a whole. Compiled once per instruction set.
#include "cpu/parameters.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {

void prepare(const Parameter& p, int64_t n, void* out) {
  with_type(p.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    prepare_as<T>(p, 0, n, static_cast<AccOf<T>*>(out));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
