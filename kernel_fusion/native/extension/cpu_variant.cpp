// Which build of the CPU kernels runs: the best that this machine has, limited by ATEN_CPU_CAPABILITY as PyTorch's are.
#include <array>
#include <atomic>
#include <cstdlib>
#include <string_view>

#include "cpu/kernels.h"

namespace kf::cpu {

// One table per variant, defined by kernels/table.cpp under different settings. At address 0 where the library was built
// without it, for a machine with a better one.
#if defined(__x86_64__)
namespace AVX512 { extern const Kernels kernels __attribute__((weak)); }
namespace AVX2 { extern const Kernels kernels __attribute__((weak)); }
#endif
namespace DEFAULT { extern const Kernels kernels __attribute__((weak)); }

namespace {

// Named as in native/build.py.
struct Variant {
  const char* name;
  const Kernels* kernels;
  bool supported;  // by this machine and this library
};

// The best one first; the last one runs everywhere.
const auto& variants() {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const std::array all{Variant{"AVX512", &AVX512::kernels, avx512 && &AVX512::kernels},
                              Variant{"AVX2", &AVX2::kernels, avx2 && &AVX2::kernels},
                              Variant{"DEFAULT", &DEFAULT::kernels, &DEFAULT::kernels != nullptr}};
#else
  static const std::array all{Variant{"DEFAULT", &DEFAULT::kernels, &DEFAULT::kernels != nullptr}};
#endif
  return all;
}

const Variant* best() {
  const char* text = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string_view limit = text ? text : "";
  for (const Variant& v : variants()) {
    const std::string_view name = v.name;
    const bool beyond = (limit == "default" && name != "DEFAULT") || (limit == "avx2" && name == "AVX512");
    if (v.supported && !beyond) return &v;
  }
  return &variants().back();
}

// Set when the library is loaded; read by every call, and so without a guard.
std::atomic<const Variant*> in_use = best();

}  // namespace

const Kernels& kernels() { return *in_use.load(std::memory_order_relaxed)->kernels; }

}  // namespace kf::cpu

// Called from Python through ctypes.
extern "C" __attribute__((visibility("default"))) const char* kf_cpu_variant() { return kf::cpu::in_use.load()->name; }

// Makes all threads run a variant from now on; false, and nothing changes, where this machine cannot run it.
extern "C" __attribute__((visibility("default"))) bool kf_use_cpu_variant(const char* name) {
  for (const auto& v : kf::cpu::variants()) {
    if (!v.supported || std::string_view(v.name) != name) continue;
    kf::cpu::in_use = &v;
    return true;
  }
  return false;
}
