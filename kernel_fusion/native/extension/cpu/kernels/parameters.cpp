// Weight and bias prepared as a whole, and their gradients rounded. Compiled once per instruction set.
#include "cpu/parameters.h"

#include "cpu/results.h"

namespace kf::cpu {
namespace CPU_CAPABILITY {

void prepare(const Parameter& p, int64_t n, void* out) {
  with_type(p.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    prepare_as<T>(p, 0, n, static_cast<AccOf<T>*>(out));
  });
}

void round_row(Dtype acc, const void* row, int64_t n, Dtype type, void* out, bool interleaved) {
  if (interleaved) {
    const auto* in = static_cast<const float*>(row);
    const auto results = Results<Interleaved>::at(type, out);
    return sweep<float>(n, [&](int64_t i, auto part) { results.put(i, load_pair(in + i, part), part); });
  }
  const auto round = [&]<class A>(const A* from) {
    with_type_of<A>(type, [&](auto* to) { narrow(from, n, static_cast<decltype(to)>(out)); });
  };
  if (acc == Dtype::kDouble) round(static_cast<const double*>(row));
  else round(static_cast<const float*>(row));
}

}  // namespace CPU_CAPABILITY
}  // namespace kf::cpu
