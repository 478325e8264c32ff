// Chooses the build of the CPU kernels that PyTorch names for this processor, within ATEN_CPU_CAPABILITY. It uses only
// instructions of PyTorch's kernels of that name.
#include <ATen/Version.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <string>
#include <string_view>

#include "cpu/kernels.h"

// Named as in native/build.py and by PyTorch, best first; the last serves all other names.
#if defined(__x86_64__)
#define KF_VARIANTS(X) X(AVX512) X(AVX2) X(DEFAULT)
#else
#define KF_VARIANTS(X) X(DEFAULT)
#endif

namespace kf::cpu {

// A variant's table (kernels/dispatch_table.cpp), at address 0 if the library lacks it.
#define KF_TABLE(name) extern "C" const Kernels kf_cpu_kernels_##name __attribute__((weak, visibility("default")));
KF_VARIANTS(KF_TABLE)
#undef KF_TABLE

namespace {

struct Variant {
  const char* name;
  const Kernels* kernels;  // null: not in this library
};

#define KF_VARIANT(name) Variant{#name, &kf_cpu_kernels_##name},
const std::array kVariants{KF_VARIANTS(KF_VARIANT)};
#undef KF_VARIANT

const Variant* best() {
  const std::string name = at::get_cpu_capability();
  for (const Variant& v : kVariants)
    if (v.name == name) return &v;
  return &kVariants.back();
}

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
