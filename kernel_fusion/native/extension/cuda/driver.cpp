#include "cuda/driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <string>

namespace kf::driver {

void fail(const std::string& text) {
  TORCH_CHECK(false, "kernel_fusion: " + text);
  __builtin_unreachable();
}

const Api& api() {
  static const Api loaded = [] {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!library) fail("the CUDA driver libcuda.so.1 cannot be loaded: " + std::string(dlerror()));
    Api a{};
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) fail("the CUDA driver has no " + std::string(name) + "; CUDA 12.4 or newer is needed");
    };
#define KF_FIND(name, ...) find(a.name, #name);
    KF_DRIVER_FUNCTIONS(KF_FIND)
#undef KF_FIND
    return a;
  }();
  return loaded;
}

void check(Result result, const char* what) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  api().cuGetErrorString(result, &text);
  fail(std::string(what) + " failed: " + (text ? text : "unknown error") + " (" + std::to_string(result) + ")");
}

}  // namespace kf::driver
