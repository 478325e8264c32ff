// Weight and bias prepared once per call. Compiled once per instruction set.
#include "cpu/parameters.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {

void prepare(const Parameter& p, int64_t begin, int64_t end, void* out) {
  with_type(p.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    prepare_as<T>(p, begin, end, static_cast<AccOf<T>*>(out) + begin);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
