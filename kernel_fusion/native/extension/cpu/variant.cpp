// Chooses the build of the CPU kernels that PyTorch names for this processor, within ATEN_CPU_CAPABILITY.
// native/build.py asks PyTorch too. Our builds use only instructions of PyTorch's kernels of the same name, so they run
// where PyTorch's do.
#include <ATen/Version.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <string>
#include <string_view>

#include "cpu/kernels.h"

// Gradients, too, may be missing.
#define KF_MAY_BE_MISSING __attribute__((weak, visibility("default")))
extern "C" {
#if defined(__x86_64__)
extern const kf::cpu::GradientKernels kf_gradient_kernels_AVX512 KF_MAY_BE_MISSING;
extern const kf::cpu::GradientKernels kf_gradient_kernels_AVX2 KF_MAY_BE_MISSING;
#endif
extern const kf::cpu::GradientKernels kf_gradient_kernels_DEFAULT KF_MAY_BE_MISSING;
}

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
  const GradientKernels* gradients;
};

// Best first; the last serves all other names.
const std::array kVariants{
#if defined(__x86_64__)
    Variant{"AVX512", &AVX512::kernels, &kf_gradient_kernels_AVX512},
    Variant{"AVX2", &AVX2::kernels, &kf_gradient_kernels_AVX2},
#endif
    Variant{"DEFAULT", &DEFAULT::kernels, &kf_gradient_kernels_DEFAULT},
};

const Variant* best() {
  const std::string name = at::get_cpu_capability();
  for (const Variant& v : kVariants)
    if (v.name == name) return &v;
  return &kVariants.back();
}

// Set when the library is loaded.
std::atomic<const Variant*> in_use = best();

// Python's: opens the library of gradients for this machine, or says why it cannot. A library that lacks them has one variant.
using Opener = void (*)(const GradientKernels** gradients, const char** error);
std::atomic<Opener> opener{nullptr};
std::atomic<const GradientKernels*> opened{nullptr};

const GradientKernels& open_gradients() {
  const GradientKernels* gradients = nullptr;
  const char* error = "this library lacks them; `kernel-fusion warmup` builds one that has them";
  if (const Opener open = opener.load()) open(&gradients, &error);
  TORCH_CHECK(gradients, "kernel_fusion: there are no CPU kernels for the gradients of norms: ", error);
  opened = gradients;
  return *gradients;
}

}  // namespace

const Kernels& kernels() { return *in_use.load(std::memory_order_relaxed)->kernels; }

const GradientKernels& gradient_kernels() {
  if (const auto* gradients = in_use.load(std::memory_order_relaxed)->gradients) return *gradients;
  const auto* gradients = opened.load(std::memory_order_acquire);
  return gradients ? *gradients : open_gradients();
}

}  // namespace kf::cpu

// Called from Python through ctypes.
extern "C" __attribute__((visibility("default"))) void kf_set_gradient_opener(void* opener) {
  kf::cpu::opener = reinterpret_cast<kf::cpu::Opener>(opener);
}

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
