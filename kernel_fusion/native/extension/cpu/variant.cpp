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

// A variant's tables (kernels/dispatch_table.cpp, kernels/row_norm_bwd.cpp), at address 0 if the library lacks them.
#define KF_TABLES(name)                               \
  namespace name {                                    \
  extern const Kernels kernels __attribute__((weak)); \
  }                                                   \
  extern "C" const GradientKernels kf_gradient_kernels_##name __attribute__((weak, visibility("default")));
KF_VARIANTS(KF_TABLES)
#undef KF_TABLES

namespace {

struct Variant {
  const char* name;
  const Kernels* kernels;  // null: not in this library
  const GradientKernels* gradients;
};

#define KF_VARIANT(name) Variant{#name, &name::kernels, &kf_gradient_kernels_##name},
const std::array kVariants{KF_VARIANTS(KF_VARIANT)};
#undef KF_VARIANT

const Variant* best() {
  const std::string name = at::get_cpu_capability();
  for (const Variant& v : kVariants)
    if (v.name == name) return &v;
  return &kVariants.back();
}

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
