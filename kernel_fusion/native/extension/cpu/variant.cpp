// Chooses the build of the CPU kernels that PyTorch names for this processor, within ATEN_CPU_CAPABILITY.
// native/build.py asks PyTorch too. Our builds use only instructions of PyTorch's kernels of the same name, so they run
// where PyTorch's do.
#include <ATen/Version.h>

#include <array>
#include <atomic>
#include <string>
#include <string_view>

#include "cpu/kernels.h"

namespace kf::cpu {

// A variant's table (kernels/dispatch_table.cpp), at address 0 if the library lacks it.
#if defined(__x86_64__)
namespace AVX512 {
extern const Kernels kernels __attribute__((weak));
}
namespace AVX2 {
extern const Kernels kernels __attribute__((weak));
}
#endif
namespace DEFAULT {
extern const Kernels kernels __attribute__((weak));
}

namespace {

// Named as in native/build.py and by PyTorch.
struct Variant {
  const char* name;
  const Kernels* kernels;  // null: not in this library
};

// Best first; the last serves all other names.
const std::array kVariants{
#if defined(__x86_64__)
    Variant{"AVX512", &AVX512::kernels},
    Variant{"AVX2", &AVX2::kernels},
#endif
    Variant{"DEFAULT", &DEFAULT::kernels},
};

const Variant* best() {
  const std::string name = at::get_cpu_capability();
  for (const Variant& v : kVariants)
    if (v.name == name) return &v;
  return &kVariants.back();
}

// Set when the library is loaded.
std::atomic<const Variant*> in_use = best();

}  // namespace

const Kernels& kernels() { return *in_use.load(std::memory_order_relaxed)->kernels; }

}  // namespace kf::cpu

// Called from Python through ctypes.
extern "C" __attribute__((visibility("default"))) const char* kf_cpu_variant() { return kf::cpu::in_use.load()->name; }

// Makes all threads run a variant. Returns false, without effect, if the machine or the library lacks it.
extern "C" __attribute__((visibility("default"))) bool kf_use_cpu_variant(const char* name) {
  for (const auto* v = kf::cpu::best(); v != kf::cpu::kVariants.end(); ++v) {
    if (!v->kernels || std::string_view(v->name) != name) continue;
    kf::cpu::in_use = v;
    return true;
  }
  return false;
}
